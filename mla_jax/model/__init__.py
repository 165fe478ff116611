"""A DeepSeek-V3-style decoder in plain functions over a pytree of weights."""
