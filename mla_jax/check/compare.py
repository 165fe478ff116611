"""One problem through one implementation: how far from the answer, and whether that is near enough."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from mla_jax.attention.api import IMPLEMENTATIONS, mla_decode
from mla_jax.check.problems import LATENT, Problem

# out in 16 bits is rounded by 2^-9 of its size; as much again for rounded weights where values cancel.
OUT_RELATIVE, OUT_ABSOLUTE = 2.0**-7, 1e-3
# Weights rounded to bf16 err by up to 2^-9 of their size, and independently: 4 sigma. FlashMLA's dense FP8 kernel
# rounds weights to e4m3, by up to 2^-4.
WEIGHTS, FP8_WEIGHTS = 2.0**-7, 2.0**-3
RMS, FP8_RMS = 4e-3, 4e-2
LSE = 1e-5  # of max(1, |lse|); products and sums are float32
FP8_LSE = 5e-3  # Hopper's FP8 products keep about 13 bits while they accumulate
PEERS = ("torch",)
NAMES = (*IMPLEMENTATIONS, *PEERS, "transformers")


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        status: pass, fail or skip.
        reason: why it failed or was skipped, in one sentence.
        max_abs, relative_rms, lse_error: of out and lse against the answer; None if skipped.
    """

    case: str
    implementation: str
    status: str
    reason: str | None = None
    max_abs: float | None = None
    relative_rms: float | None = None
    lse_error: float | None = None

    def as_json(self) -> dict[str, Any]:
        """For the command's `rows`."""
        errors = {"max_abs": self.max_abs, "relative_rms": self.relative_rms, "lse": self.lse_error}
        return {
            "case": self.case,
            "implementation": self.implementation,
            "status": self.status,
            "reason": self.reason,
            "errors": None if self.status == "skip" else errors,
            **({} if self.status == "skip" else errors),
        }


def compare(problem: Problem, names: tuple[str, ...]) -> list[Row]:
    """A row per implementation."""
    call, answer = problem.call(), problem.answer()
    return [_row(problem, name, call, answer) for name in names if name != "transformers"]


def _row(problem: Problem, name: str, call: dict[str, Any], answer: tuple[np.ndarray, ...]) -> Row:
    if (reason := _cannot_run(name, call)) is not None:
        return Row(problem.name, name, "skip", reason.rstrip(".") + ".")
    try:
        out, lse = _run(problem, name, call)
    except NotImplementedError as error:
        return Row(problem.name, name, "skip", str(error))
    except Exception as error:  # a row that breaks must not hide the others
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Row(problem.name, name, "fail", f"raised {type(error).__name__}: {first_line:.200}")
    return judge(problem, name, out, lse, answer)


def _cannot_run(name: str, call: dict[str, Any]) -> str | None:
    if name in PEERS:
        return peers().torch_reason()
    return IMPLEMENTATIONS[name].cannot_run(call["q"], call["kv_cache"], d_v=LATENT)


def _run(problem: Problem, name: str, call: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    if name in PEERS:
        q, keys = problem.numbers
        masks = [problem.sees(b) for b in range(len(keys))]
        return peers().torch_attention(q, keys, masks, LATENT)
    out, lse = mla_decode(**call, d_v=LATENT, implementation=name)
    return np.asarray(out, np.float64), np.asarray(lse, np.float64)


def judge(problem: Problem, name: str, out: np.ndarray, lse: np.ndarray, answer: tuple[np.ndarray, ...]) -> Row:
    """The row of a result."""
    want, want_lse, spread = answer
    fp8_weights = name == "flash_mla" and problem.kv_format == "fp8_e4m3"
    fp8_products = name in ("flash_mla", "mosaic_gpu") and problem.kv_format == "fp8_e4m3"
    difference = np.abs(out - want)
    rms = float(np.sqrt((difference**2).sum() / max((want**2).sum(), 1e-30)))
    seen = ~np.isneginf(want_lse)
    off = np.abs(lse[seen] - want_lse[seen]) / np.maximum(1, np.abs(want_lse[seen]))
    numbers = (float(difference.max(initial=0)), rms, float(off.max(initial=0)))
    limit = OUT_ABSOLUTE + OUT_RELATIVE * np.abs(want) + (FP8_WEIGHTS if fp8_weights else WEIGHTS) * spread
    reason = None
    if not np.isfinite(out).all():
        reason = f"{int((~np.isfinite(out)).sum())} numbers of out are not finite."
    elif not np.array_equal(np.isneginf(lse), ~seen) or out[~seen.transpose(0, 2, 1)].any():
        reason = "A row that sees no key must have out 0 and lse -inf, and no other row."
    elif not (difference <= limit).all():
        reason = f"{int((difference > limit).sum())} numbers of out differ by more than rounding explains."
    elif rms > (FP8_RMS if fp8_weights else RMS):
        reason = f"The relative RMS error of out is {rms:.1e}."
    elif not numbers[2] <= (FP8_LSE if fp8_products else LSE):
        reason = f"lse differs by {numbers[2]:.1e} of its size."
    return Row(problem.name, name, "pass" if reason is None else "fail", reason, *numbers)


def peers() -> Any:
    """torch and transformers, which `mla_jax` itself never imports."""
    from flash_mla_jax import peers

    return peers
