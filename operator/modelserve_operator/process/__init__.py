"""How the operator's process lives: its queue, metrics, endpoint, leadership and tasks."""
