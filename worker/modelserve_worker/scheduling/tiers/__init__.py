"""Tiers behind the prefix cache, such as host memory: where pages are spilled to, and restored from."""
