"""FlashMLA's dense operators for a CPU: same schemas, in a namespace of their own, that allocate as FlashMLA does.

The arithmetic is a plain loop in float64, but it follows the metadata part by part and merges pieces from the scratch,
so that a wrong schedule, a wrong size or memory from elsewhere shows.
"""

import itertools
import math

import torch
from torch.utils._python_dispatch import _disable_current_modes

from flash_mla_jax import provider

NAMESPACE = "flash_mla_stand_in"
SMS = 132
D_V, PAGE = 512, 64
library = torch.library.Library(NAMESPACE, "DEF")
misbehave = None  # a test sets "allocate", "elsewhere" or "more"


def dense(q, kcache, d_v, lens, table, scale, causal, metadata, num_splits):
    batch, queries, heads, _ = q.shape
    parts = max(SMS // -(-queries * heads // PAGE), 1)
    q, out, lse = _prepare(q, q.dtype, heads_first=True)
    if metadata is None:
        metadata = lens.new_empty((parts, 8))
        num_splits = lens.new_empty((batch + 1,))
        with _disable_current_modes():
            _schedule(lens, parts, metadata, num_splits)
    _attend(q, kcache, lens, table, scale, 1.0, causal, metadata, num_splits, out, lse, tokens=False)
    out = out.view(batch, 1, queries, heads, d_v).transpose(1, 2).reshape(batch, queries, heads, d_v)
    lse = lse.view(batch, 1, queries, heads).transpose(2, 3).reshape(batch, heads, queries)
    return (q[:, :, 0, :d_v] if misbehave == "elsewhere" else out), lse, metadata, num_splits


def dense_fp8(q, kcache, d_v, lens, table, scale, causal, metadata, num_splits, descale_q, descale_k):
    batch, queries, heads, _ = q.shape
    q, out, lse = _prepare(q, torch.bfloat16, heads_first=False)
    with _disable_current_modes():
        dq, dk = float(descale_q), float(descale_k)
    _attend(q, kcache, lens, table, scale * dq * dk, dk, causal, metadata, num_splits, out, lse, tokens=True)
    out = out.view(batch, queries, heads, 1, d_v).transpose(2, 3).reshape(batch, queries, heads, d_v)
    lse = lse.view(batch, 1, queries, heads).transpose(2, 3).reshape(batch, heads, queries)
    return [out, lse]


def metadata_fp8(lens, rows, heads_k):
    metadata = lens.new_empty((max(SMS // -(-rows // PAGE), 1), 8))
    num_splits = lens.new_empty((lens.shape[0] + 1,))
    with _disable_current_modes():
        _schedule(lens, metadata.shape[0], metadata, num_splits, tokens=True)
    return [metadata, num_splits]


def _prepare(q, out_dtype, *, heads_first):
    """q with rows in one dim, and the two results, in the operator's order of allocation."""
    batch, queries, heads, d = q.shape
    rows = queries * heads
    q = q.view(batch, queries, 1, heads, d).transpose(2, 3).reshape(batch, rows, 1, d)
    shape = (batch, 1, rows, D_V) if heads_first else (batch, rows, 1, D_V)
    return q, q.new_empty(shape, dtype=out_dtype), q.new_empty((batch, 1, rows), dtype=torch.float32)


def _attend(q, kcache, lens, table, scale, value_scale, causal, metadata, num_splits, out, lse, *, tokens):
    batch, rows = lse.shape[0], lse.shape[2]
    pieces = batch + metadata.shape[0]
    lse_accum = q.new_empty((pieces, 1, rows), dtype=torch.float32)
    out_accum = q.new_empty((pieces, 1, rows, D_V), dtype=torch.float32)
    if misbehave == "allocate":
        torch.zeros(4)
    if misbehave == "more":
        q.new_empty((1,), dtype=torch.uint8)
    with _disable_current_modes():
        _walk(
            q,
            kcache,
            lens,
            table,
            scale,
            value_scale,
            causal,
            metadata,
            num_splits,
            (out, lse),
            (out_accum, lse_accum),
            tokens,
        )


def _walk(q, kcache, lens, table, scale, value_scale, causal, metadata, num_splits, results, scratch, tokens):
    (out, lse), (out_accum, lse_accum) = results, scratch
    batch = lens.shape[0]
    splits = num_splits.tolist()
    flat_out = out.view(batch, -1, D_V)
    for row in metadata.tolist():
        if tokens:
            begin_req, begin, end_req, end, split = row[0], row[1] // PAGE, row[2], -(-row[3] // PAGE), row[4]
        else:
            begin_req, end_req, begin, end, split = row[:5]
        if begin_req >= batch:
            continue
        for request in range(begin_req, end_req + 1):
            first = begin if request == begin_req else 0
            assert lens[request] > 0 or not tokens, "illegal memory access"  # as its kernel on an H200
            blocks = -(-int(lens[request]) // PAGE)
            last = end if request == end_req else blocks
            piece, piece_lse = _piece(
                q[request], kcache, table[request], int(lens[request]), first, last, scale, causal
            )
            if splits[request + 1] - splits[request] == 1:
                flat_out[request] = (piece * value_scale).to(out.dtype)
                lse[request, 0] = torch.where(piece_lse == -math.inf, math.inf, piece_lse)
            else:
                index = splits[request] + (split if request == begin_req else 0)
                out_accum[index, 0], lse_accum[index, 0] = piece.float(), piece_lse.float()
    for request in range(batch):
        start, stop = splits[request], splits[request + 1]
        if stop - start == 1:
            continue
        parts_lse = lse_accum[start:stop, 0].double()
        total = torch.logsumexp(parts_lse, 0)
        weights = torch.exp(parts_lse - torch.where(total == -math.inf, 0.0, total))
        merged = (weights[..., None] * out_accum[start:stop, 0].double()).sum(0)
        flat_out[request] = (merged * value_scale).to(out.dtype)
        lse[request, 0] = torch.where(total == -math.inf, math.inf, total)


def _piece(q, kcache, table, length, first, last, scale, causal):
    """out and lse of one request's rows over blocks first to last, in float64."""
    rows = q.shape[0]
    queries, heads = causal if isinstance(causal, tuple) else (1, rows)
    pages = table[first:last].long()
    keys = kcache[pages, :, 0].view(-1, kcache.shape[-1])
    keys = keys.to(torch.float64)[: max(length - first * PAGE, 0)]
    logits = scale * q[:, 0].double() @ keys.T
    if causal:
        query = torch.arange(rows) // heads
        position = first * PAGE + torch.arange(keys.shape[0])
        logits = torch.where(position[None] <= length - queries + query[:, None], logits, -math.inf)
    lse = torch.logsumexp(logits, 1) if keys.shape[0] else torch.full((rows,), -math.inf, dtype=torch.float64)
    weights = torch.exp(logits - torch.where(lse == -math.inf, 0.0, lse)[:, None])
    return weights @ keys[:, :D_V], lse


def _schedule(lens, parts, metadata, num_splits, tokens=False):
    """FlashMLA's scheduler, request by request."""
    lens = lens.tolist()
    blocks = [max(n - 1, 0) // PAGE + 1 if n or not tokens else 0 for n in lens]
    payload = -(-sum(n + 5 for n in blocks) // parts) + 5
    counts, rows = [0], []
    request = block = split = 0
    for _ in range(parts):
        start, room = (request, block, split), payload
        while request < len(lens):
            left = blocks[request] - block
            if room < left + 5:
                if room > 5:
                    block, split = block + room - 5, split + 1
                break
            room -= left + 5
            counts.append(counts[-1] + split + 1)
            request, block, split = request + 1, 0, 0
        end_req = request if block else request - 1
        end = block or (blocks[end_req] if lens[end_req] else 0)
        rows.append((start, end_req, end))
    pieces = [b - a for a, b in itertools.pairwise(counts)]
    for part, ((begin_req, begin, begin_split), end_req, end) in enumerate(rows):
        if tokens:
            row = [begin_req, begin * PAGE, end_req, min(end * PAGE, lens[end_req]), begin_split, 0, 0, 0]
        else:
            first = pieces[min(begin_req, len(lens) - 1)] > 1
            row = [begin_req, end_req, begin, end, begin_split, int(first), int(pieces[end_req] > 1), 0]
        metadata[part] = torch.tensor(row, dtype=torch.int32)
    num_splits.copy_(torch.tensor(counts, dtype=torch.int32))


def _causal_shape(kernel):
    """The plain loop needs s_q and h_q for the mask; the operators know them from q."""

    def call(q, kcache, d_v, lens, table, scale, causal, *rest):
        shape = (q.shape[1], q.shape[2]) if causal and q.shape[1] > 1 else False
        return kernel(q, kcache, d_v, lens, table, scale, shape, *rest)

    return call


for kind, kernel in ((provider.DENSE, _causal_shape(dense)), (provider.DENSE_FP8, _causal_shape(dense_fp8)),
                     (provider.METADATA_FP8, metadata_fp8)):  # fmt: skip
    schema = provider.SCHEMAS[kind]
    library.define(schema)
    library.impl(schema.split("(")[0], kernel, "CPU")

PROVIDER = provider.from_operators("the stand-in", getattr(torch.ops, NAMESPACE), platform="cpu")
