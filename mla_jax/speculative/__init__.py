"""Speculative decoding: draft with the multi-token-prediction module, verify, accept, roll back."""
