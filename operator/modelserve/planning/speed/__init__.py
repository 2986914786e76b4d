"""How long steps take, and how fast a candidate is expected to be."""
