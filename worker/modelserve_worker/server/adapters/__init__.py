"""Adapters that this server serves: which, from where, how far each is, and the routes by which they are told."""
