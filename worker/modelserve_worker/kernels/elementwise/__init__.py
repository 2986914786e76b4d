"""Elementwise and row-wise arithmetic of the decoder."""
