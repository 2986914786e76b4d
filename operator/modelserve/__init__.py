"""Shared core of modelserve: API types, model geometry, cache sizing and planning. Needs pydantic and PyYAML only."""

__version__ = "0.2.0"
