"""Which request computes which tokens in which pages, step by step. Torch-free."""
