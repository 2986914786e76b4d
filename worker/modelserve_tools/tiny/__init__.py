"""Small random Gemma 4 checkpoints in Hugging Face's layout, for demos and tests."""
