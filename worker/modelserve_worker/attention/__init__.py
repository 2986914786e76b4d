"""Attention backends over the paged cache: kernels on a GPU, plain PyTorch elsewhere, and profile `exact`."""
