"""What a cluster brings to plans: pools of GPUs, the catalogue, and what workers measured."""
