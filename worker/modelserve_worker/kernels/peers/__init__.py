"""Sums over the GPUs of a tensor-parallel group, through each other's memory."""
