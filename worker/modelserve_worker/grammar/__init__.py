"""Constrained output: grammars, their compilation, and which tokens they let follow. Torch-free."""
