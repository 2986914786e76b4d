"""Attention kernels: what the table of kernels chose, bound to launches."""
