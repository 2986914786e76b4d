"""Attention kernels in Triton, for any GPU from Ampere on."""
