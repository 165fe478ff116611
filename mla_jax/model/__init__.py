"""DeepSeek's decoder (V2, V3 and descendants) in plain functions over a pytree of weights."""

from mla_jax.model.transformer import decode, forward, lm_logits, mtp_forward, prefill

__all__ = ["decode", "forward", "lm_logits", "mtp_forward", "prefill"]
