"""Bytes of weights on one rank: the text model's, an assistant's, and of quantised matrices."""
