"""A DeepSeek-style decoder in plain functions over a pytree of weights."""
