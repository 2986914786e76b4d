"""Device kernels. Each has one plain PyTorch twin, which is the implementation wherever no faster one exists."""
