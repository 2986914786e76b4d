"""Matrices of linear layers as checkpoints store them, a module for each type, with the product that layers ask of."""
