"""Which kernel computes which operation: decided once at start, read by the planner and the worker. Torch-free."""
