"""What an FP8 latent cache costs the demo model: `python tests/benchmarks/fp8_accuracy.py [--json FILE]`.

Bits per byte of the held-out sample, teacher-forced top-1 agreement with the bf16 cache, and tokens per step with one
drafted by the MTP module, for each FP8 format, for calibrated scales, for queries in e4m3 too, and for caches that are
broken on purpose. The broken ones must lose visibly, or the small losses of the others would mean nothing.
"""

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax import MLAConfig, PagedKVCache, load_checkpoint
from mla_jax.decode.accept import accept_length
from mla_jax.decode.calibrate import calibrate
from mla_jax.decode.evaluate import Score, evaluate
from mla_jax.demo import CHECKPOINT, HELDOUT
from mla_jax.model.cache import create_cache
from mla_jax.model.params import ModelParams
from mla_jax.speculative.config import Speculation

# Neither trained on nor part of the sample: bytes of the plays behind it, see mla_jax/demo/text.py.
CALIBRATION = Path(__file__).parents[1] / "data" / "calibration.txt"
OUTLIER = 30_000.0  # how much larger one latent would be than all others; e4m3 forgives a factor of 1000


@partial(jax.tree_util.register_dataclass, data_fields=("layers", "scales"), meta_fields=("format",))
@dataclass(frozen=True)
class WrittenWithoutScale(PagedKVCache):
    """A plain cast on the way in, multiplied on the way out: how SGLang's latent pool writes."""

    def write(self, *args: Any) -> PagedKVCache:
        """Wrong on purpose."""
        return replace(self, layers=PagedKVCache.write(replace(self, scales=None), *args).layers)


def create_broken_cache(*args: Any, **options: Any) -> PagedKVCache:
    """In the place of `create_cache`."""
    cache = create_cache(*args, **options)
    return WrittenWithoutScale(cache.layers, cache.format, cache.scales)


@dataclass(frozen=True)
class Row:
    """One cache: its format, its scales from the calibrated ones (None: no scales), how it is made, and whether queries
    are in e4m3 too."""

    name: str
    kv_format: str
    scales: Callable[[jax.Array], jax.Array] | None = None
    create: Callable[..., PagedKVCache] = create_cache
    is_control: bool = False
    fp8_queries: bool = False


ROWS = (
    Row("bf16", "bf16"),
    Row("fp8_e4m3, scale 1", "fp8_e4m3"),
    Row("fp8_e4m3, calibrated", "fp8_e4m3", lambda scales: scales),
    Row("fp8_e4m3, calibrated, e4m3 queries", "fp8_e4m3", lambda scales: scales, fp8_queries=True),
    Row("fp8_ds_mla", "fp8_ds_mla"),
    Row("broken: scale on one side only", "fp8_e4m3", lambda scales: scales, create_broken_cache, True),
    Row("broken: an outlier decides the scale", "fp8_e4m3", lambda scales: scales * OUTLIER, is_control=True),
)


def measure(
    params: ModelParams,
    config: MLAConfig,
    tokens: list[int],
    scales: jax.Array,
    rows: Sequence[Row] = ROWS,
    prompts: Sequence[int] = (),
) -> Iterator[dict[str, Any]]:
    """A row of results after the other; the first is what the others are compared with.

    A row holds bits_per_byte; excess, relative to bf16; top1_agreement with bf16; and, if there is a text to take
    prompts from, accept_length: tokens that a sequence commits in a step with one drafted token, greedily.
    """
    baseline: Score | None = None
    for row in rows:
        own = replace(params, kv_scales=None if row.scales is None else row.scales(scales))
        drafts, how = {}, {"kv_format": row.kv_format, "fp8_queries": row.fp8_queries}
        with (
            mock.patch("mla_jax.decode.evaluate.create_cache", row.create),
            mock.patch("mla_jax.decode.engine.create_cache", row.create),
        ):
            score = evaluate(own, config, tokens, **how)
            if prompts:
                accepted = accept_length(own, config, prompts, Speculation(1, 1, 2), **how)
                drafts = {"accept_length": accepted.mean}
        baseline = baseline or score
        yield {
            "cache": row.name,
            "bits_per_byte": score.bits_per_byte,
            "excess": score.bits_per_byte / baseline.bits_per_byte - 1,
            "top1_agreement": score.top1_agreement(baseline),
            **drafts,
            "is_control": row.is_control,
        }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-bytes", type=int, metavar="N", help="of the sample; default: all")
    parser.add_argument("--no-drafts", action="store_true", help="leave out the MTP module")
    parser.add_argument("--json", metavar="FILE", help="write the results to this file")
    args = parser.parse_args()
    started = time.perf_counter()
    config, params = load_checkpoint(CHECKPOINT, jnp.float32)
    found = calibrate(params, config, list(CALIBRATION.read_bytes()))
    rows = []
    text = list(HELDOUT.read_bytes())
    prompts = [] if args.no_drafts else text
    for row in measure(params, config, text[: args.max_bytes], found.scales, prompts=prompts):
        rows.append(row)
        drafts = f"  {row['accept_length']:.4f} tokens/step" if prompts else ""
        print(
            f"  {row['cache']:<37} {row['bits_per_byte']:.4f} bits/byte  {100 * row['excess']:+8.3f} %"
            f"  top-1 {100 * row['top1_agreement']:6.2f} %" + drafts,
            flush=True,
        )
    result = {
        "command": " ".join(["python tests/benchmarks/fp8_accuracy.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "scales": np.asarray(found.scales).tolist(),
        "seconds": round(time.perf_counter() - started, 1),
        "rows": rows,
    }
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
