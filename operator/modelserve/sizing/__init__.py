"""Byte arithmetic of the hybrid KV cache and of all else on the GPU. The worker allocates with these functions."""
