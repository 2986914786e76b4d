"""LoRA adapters of one rank: read from files into host memory, and from there into slots of device memory."""
