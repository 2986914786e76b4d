"""Pools of accelerators: what nodes, Karpenter and the catalogue offer a plan."""
