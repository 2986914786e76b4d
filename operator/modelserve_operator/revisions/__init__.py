"""Revisions: what a plan is kept as, and the history of a ModelServe."""
