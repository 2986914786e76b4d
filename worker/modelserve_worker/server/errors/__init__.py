"""Errors as clients of each API read them."""
