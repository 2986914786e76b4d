"""Host memory that a worker needs."""
