"""What one reconcile sees of a ModelServe, and what follows from it alone. Pure."""
