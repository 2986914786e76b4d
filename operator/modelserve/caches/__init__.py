"""Caches of models, as the operator and the Jobs that fill them know them."""
