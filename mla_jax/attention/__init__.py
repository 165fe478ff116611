"""MLA decode attention over a paged latent cache. Knows nothing of models."""
