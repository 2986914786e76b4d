"""Attention kernels in CUDA C++ for Hopper, each with its launch."""
