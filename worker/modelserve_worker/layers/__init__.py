"""Layers of the Gemma 4 decoder, each sharded over a tensor-parallel group and free of any knowledge of the cache."""
