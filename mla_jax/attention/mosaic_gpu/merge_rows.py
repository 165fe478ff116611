"""Merging rows of pieces: what a warp does with what it reads from the workspace. See `pieces` for what lies there.

These are chains of few steps, each as long as the way to another SM's data, so a step asks for much at once.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from mla_jax.attention.mosaic_gpu.config import HALF, LOG2E
from mla_jax.attention.mosaic_gpu.hardware import SCALAR
from mla_jax.attention.mosaic_gpu.pieces import GROUPS, ROW_BYTES, WORDS
from mla_jax.attention.mosaic_gpu.ptx import at_byte, f32, float32, i32, int32, ptx, pure, times, warp_and_lane
from mla_jax.attention.mosaic_gpu.scores import LOWEST

Ref = Any
WARPS = 4
LANES = 32
AT_ONCE = 64  # pieces of which a warp reads a row at once, where there are many
TEAM = 8  # lanes that read 64 dims of a piece then, 16 bytes each
TEAMS = LANES // TEAM


class Where(NamedTuple):
    """Halves of rows of a shared request to merge, and its pieces: numbers that all threads have."""

    first_slot: jax.Array  # workspace slot of the first piece
    second_slot: jax.Array  # of the piece after it; the others follow
    pieces: jax.Array
    first_row: jax.Array  # halves are counted from it
    last_row: jax.Array  # it takes the place of those behind it
    first: jax.Array  # half to merge
    both: jax.Array  # 1: halves are the left and the right one of each row in turn; 0: of `side` alone
    side: jax.Array


class _Half(NamedTuple):
    """One half of a row, in registers."""

    row: Any
    side: Any


class _Workspace(NamedTuple):
    """Addresses and sizes of what is read and written, and `Where` in registers."""

    out: Any
    lse: Any
    part_out: Any
    part_lse: Any
    part_scale: Any
    rows: int  # in a slot
    element: Any  # type of the output
    by_thread: bool
    where: Where

    def half(self, ahead: Any) -> _Half:
        """So far ahead of the first to merge."""
        where = self.where
        index = arith.addi(where.first, ahead)
        row = arith.minsi(arith.addi(where.first_row, arith.shrui(index, where.both)), where.last_row)
        return _Half(row, arith.select(_is_zero(where.both), where.side, arith.andi(index, i32(1))))

    def row_of(self, piece: Any, row: Any) -> Any:
        """Index of a row of a piece in the workspace; the last piece's in place of one that does not exist."""
        piece = arith.minsi(piece, arith.subi(self.where.pieces, i32(1)))
        first = _is_zero(piece)
        later = arith.addi(self.where.second_slot, arith.subi(piece, i32(1)))
        return arith.addi(times(arith.select(first, self.where.first_slot, later), self.rows), row)

    def lse_of(self, piece: Any, index: Any) -> Any:
        """Of a row of a piece; -inf if there is no such piece."""
        there = arith.cmpi(arith.CmpIPredicate.slt, piece, self.where.pieces)
        return arith.select(there, _load(at_byte(self.part_lse, times(index, 4))), f32(float("-inf")))

    def scale_of(self, index: Any, side: Any, group: Any) -> Any:
        """Of a group of 64 dims of a side."""
        group = arith.addi(times(side, GROUPS), group)
        return _load(at_byte(self.part_scale, arith.addi(times(index, 4 * 2 * GROUPS), times(group, 4))))

    def numbers_at(self, index: Any, side: Any, word: Any) -> Any:
        """Address of a word of two numbers of a side."""
        offset = arith.addi(times(side, 2 * HALF), times(word, 4))
        return at_byte(self.part_out, arith.addi(times(index, ROW_BYTES), offset))

    def store(self, half: _Half, word: Any, numbers: Sequence[Any]) -> None:
        """Neighbours of the output, which pieces have at `word` and behind it: two, or all that a lane reads."""
        if not self.by_thread:
            self._store(half, word, numbers)
            return
        for i in range(0, len(numbers), 2):
            at = arith.addi(word, i32(i // 2))
            group, pair, column = (arith.divui(at, i32(16)), *_quad(at))
            at = arith.addi(arith.addi(times(group, 16), times(column, 4)), pair)
            self._store(half, at, numbers[i : i + 2])

    def _store(self, half: _Half, word: Any, numbers: Sequence[Any]) -> None:
        offset = arith.addi(times(half.side, 2 * HALF), times(word, 4))
        address = at_byte(self.out, arith.addi(times(half.row, ROW_BYTES), offset))
        kind = "bf16" if isinstance(self.element, ir.BF16Type) else "f16"
        count = len(numbers) // 2
        narrow = "".join(f"cvt.rn.{kind}x2.f32 w{i}, ${2 * i + 2}, ${2 * i + 1};" for i in range(count))
        vector = f".v{count}" if count > 1 else ""
        words = ", ".join(f"w{i}" for i in range(count))
        ptx(f"{{ .reg .b32 w<{count}>; {narrow} st.global{vector}.b32 [$0], {{{words}}}; }}", address, *numbers)

    def store_lse(self, half: _Half, top: Any, total: Any, *, lane: Any) -> None:
        """In natural log; -inf for a row that sees no key. One thread of the left half does it."""
        log = arith.addf(top, _unary("lg2.approx.f32", total))
        empty = arith.cmpf(arith.CmpFPredicate.OEQ, total, f32(0.0))
        lse = arith.select(empty, f32(float("-inf")), arith.mulf(log, f32(1 / LOG2E)))
        one = _is_zero(arith.ori(half.side, lane))
        address = at_byte(self.lse, times(half.row, 4))
        ptx("st.global.f32 [$0], $1;", address, lse, predicate=one)


def _quad(word: Any) -> tuple[Any, Any]:
    return arith.remui(arith.divui(word, i32(4)), i32(4)), arith.remui(word, i32(4))


def merge_few(refs: Sequence[Ref], where: Where, *, count: int, unroll: int, by_thread: bool) -> None:
    """Merge 4 * count halves of rows, each warp `count` of them, reading `unroll` pieces of each at once."""

    def body(work: _Workspace) -> None:
        warp, lane = warp_and_lane()
        halves = [work.half(arith.addi(warp, i32(WARPS * j))) for j in range(count)]
        states = [f32(LOWEST), *[f32(0.0)] * (1 + 2 * WORDS)] * count
        size = len(states) // count
        steps = arith.divui(arith.addi(work.where.pieces, i32(unroll - 1)), i32(unroll))
        loop: Any = scf.ForOp(i32(0), steps, i32(1), states)  # type: ignore[call-arg]
        with ir.InsertionPoint(loop.body):
            pieces = [arith.addi(times(loop.induction_variable, unroll), i32(u)) for u in range(unroll)]
            found = [[_read_wide(work, piece, half, lane) for piece in pieces] for half in halves]
            states = list(loop.inner_iter_args)
            scf.yield_([x for j in range(count) for x in _advance(states[j * size : (j + 1) * size], found[j])])
        for j, half in enumerate(halves):
            top, total, *output = loop.results[j * size : (j + 1) * size]
            inverse = _inverse(total)
            work.store(half, times(lane, WORDS), [arith.mulf(x, inverse) for x in output])
            work.store_lse(half, top, total, lane=lane)

    _run(body, refs, where, by_thread=by_thread)


def _read_wide(work: _Workspace, piece: Any, half: _Half, lane: Any) -> tuple[Any, Any, list[Any]]:
    """lse, scale and this lane's 8 numbers of half a row of a piece."""
    index = work.row_of(piece, half.row)
    lse = work.lse_of(piece, index)
    scale = work.scale_of(index, half.side, arith.divui(lane, i32(LANES // GROUPS)))
    address = work.numbers_at(index, half.side, times(lane, WORDS))
    return lse, scale, _read_words(address)


def _advance(state: Sequence[Any], found: Sequence[tuple[Any, Any, list[Any]]]) -> list[Any]:
    """One step of a row's merge: largest lse, sum of exp2(lse - that), and numbers weighted so."""
    before, total, *output = state
    top = before
    for lse, _, _ in found:
        top = arith.maxnumf(top, lse)
    decay = _exp2(arith.subf(before, top))
    total, output = arith.mulf(total, decay), [arith.mulf(x, decay) for x in output]
    for lse, scale, words in found:
        weight = _exp2(arith.subf(lse, top))
        total, weight = arith.addf(total, weight), arith.mulf(weight, scale)
        numbers = [number for word in words for number in _widen(word)]
        output = [_fma(number, weight, x) for number, x in zip(numbers, output, strict=True)]
    return [top, total, *output]


def merge_many(refs: Sequence[Ref], where: Where, *, by_thread: bool) -> None:
    """Merge half a row, each warp 64 dims of it, its teams different pieces, which they add up in the end.

    Each lane finds the weights of some pieces, and passes them to the teams that have read those.
    """

    def body(work: _Workspace) -> None:
        warp, lane = warp_and_lane()
        team, half = arith.divui(lane, i32(TEAM)), work.half(i32(0))
        group = times(warp, LANES)  # its first word
        word = arith.addi(group, times(arith.remui(lane, i32(TEAM)), WORDS))
        start = [f32(LOWEST), *[f32(0.0)] * (1 + 2 * WORDS)]
        loop: Any = scf.ForOp(i32(0), work.where.pieces, i32(AT_ONCE), start)  # type: ignore[call-arg]
        with ir.InsertionPoint(loop.body):
            first = loop.induction_variable
            pieces = [arith.addi(first, arith.addi(lane, i32(i))) for i in range(0, AT_ONCE, LANES)]
            indices = [work.row_of(piece, half.row) for piece in pieces]
            lses = [work.lse_of(*args) for args in zip(pieces, indices, strict=True)]
            scales = [work.scale_of(index, half.side, warp) for index in indices]
            numbers = []
            for u in range(0, AT_ONCE, TEAMS):
                index = work.row_of(arith.addi(first, arith.addi(team, i32(u))), half.row)
                numbers.append(_read_words(work.numbers_at(index, half.side, word)))
            before, total, *output = loop.inner_iter_args
            top = arith.maxnumf(before, _over_lanes(arith.maxnumf, functools.reduce(arith.maxnumf, lses)))
            decay, weights = _exp2(arith.subf(before, top)), [_exp2(arith.subf(lse, top)) for lse in lses]
            total = functools.reduce(arith.addf, weights, arith.mulf(total, decay))  # of this lane's pieces
            output = [arith.mulf(x, decay) for x in output]
            weights = [arith.mulf(*args) for args in zip(weights, scales, strict=True)]
            for u, words in zip(range(0, AT_ONCE, TEAMS), numbers, strict=True):
                factor = _from_lane(weights[u // LANES], arith.addi(team, i32(u % LANES)))
                found = [number for word in words for number in _widen(word)]
                output = [_fma(x, factor, y) for x, y in zip(found, output, strict=True)]
            scf.yield_([top, total, *output])
        top, total, *output = loop.results
        total = _over_lanes(arith.addf, total)
        inverse = _inverse(total)
        numbers = [arith.mulf(x, inverse) for x in _shared_out(output, lane)]
        work.store(half, arith.addi(word, team), numbers)
        work.store_lse(half, top, total, lane=arith.ori(warp, lane))

    _run(body, refs, where, by_thread=by_thread)


def _shared_out(numbers: Sequence[Any], lane: Any) -> list[Any]:
    """The sum over all teams of two of each lane's numbers: those of word `team`."""
    for distance in (LANES // 2, LANES // 4):
        upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane, i32(distance)), i32(0))
        pairs = list(zip(numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :], strict=True))
        kept = [arith.select(upper, high, low) for low, high in pairs]
        given = [arith.select(upper, low, high) for low, high in pairs]
        numbers = [arith.addf(x, mgpu_utils.shfl_bfly(y, distance)) for x, y in zip(kept, given, strict=True)]
    return list(numbers)


def _read_words(address: Any) -> list[Any]:
    """Eight numbers."""
    return list(ptx("ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", address, result_types=[int32()] * WORDS))


def _run(body: Any, refs: Sequence[Ref], where: Where, *, by_thread: bool) -> None:
    """`body` with the addresses of out [rows, 512] and lse [rows] of a request, part_out, part_lse, part_scale."""

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), *[SCALAR] * len(where)))
    def merge(ctx: Any, *args: Any) -> None:
        arrays, numbers = args[: len(refs)], args[len(refs) :]
        out, lse, part_out, part_lse, part_scale = (mgpu_utils.memref_ptr(array) for array in arrays)
        rows, element = ir.MemRefType(arrays[3].type).shape[1], ir.MemRefType(arrays[0].type).element_type
        registers = Where(*(number.registers.item() for number in numbers))
        body(_Workspace(out, lse, part_out, part_lse, part_scale, rows, element, by_thread, registers))

    merge(*refs, *where)


def _is_zero(x: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.eq, x, i32(0))


def _load(address: Any) -> Any:
    return ptx("ld.global.f32 $0, [$1];", address, result_types=float32())


def _unary(instruction: str, x: Any) -> Any:
    return pure(f"{instruction} $0, $1;", x, result_types=float32())


def _exp2(x: Any) -> Any:
    return _unary("ex2.approx.ftz.f32", x)


def _fma(x: Any, y: Any, z: Any) -> Any:
    return pure("fma.rn.f32 $0, $1, $2, $3;", x, y, z, result_types=float32())


def _inverse(total: Any) -> Any:
    """1 / total, 1 for a row that sees no key."""
    empty = arith.cmpf(arith.CmpFPredicate.OEQ, total, f32(0.0))
    return arith.divf(f32(1.0), arith.select(empty, f32(1.0), total))


def _widen(word: Any) -> list[Any]:
    """Two float16 numbers."""
    code = "{ .reg .b16 a; .reg .b16 b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"
    return list(pure(code, word, result_types=[float32()] * 2))


def _over_lanes(combine: Any, x: Any) -> Any:
    for distance in (1, 2, 4, 8, 16):
        x = combine(x, mgpu_utils.shfl_bfly(x, distance))
    return x


def _from_lane(x: Any, lane: Any) -> Any:
    return ptx("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", x, lane, result_types=x.type)
