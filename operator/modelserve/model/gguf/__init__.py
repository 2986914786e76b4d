"""GGUF checkpoints of Gemma 4: the header, its files, the geometry and the weight format that it states."""
