"""The Gemma 4 decoder and the names its weights have in a checkpoint."""
