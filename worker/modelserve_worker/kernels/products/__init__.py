"""Products with a layer's matrix, by the format that it is stored in."""
