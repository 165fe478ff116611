"""`python -m mla_jax check`: the same problems through every implementation, against float64."""
