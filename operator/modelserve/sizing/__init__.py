"""Byte arithmetic of the hybrid KV cache and of everything else on the GPU. The worker allocates with these functions."""
