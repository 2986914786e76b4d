"""Builders of the objects that the operator applies: one module per kind, all pure."""
