"""What steps cost, by which the scheduler sizes them."""
