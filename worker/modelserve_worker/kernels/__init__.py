"""Device kernels. Each has one reference in plain PyTorch, which runs wherever no faster one exists."""
