"""What a stored form costs a model: how far its distributions move, and whether that is little."""
