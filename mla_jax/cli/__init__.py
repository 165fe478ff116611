"""The commands of `python -m mla_jax`, one module each."""
