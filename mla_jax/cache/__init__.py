"""What a token leaves behind: formats, pages and the paged cache of latents. Knows nothing of attention."""
