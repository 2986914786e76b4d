"""The additive term of LoRA adapters: what a product by a matrix is increased by, row by row."""
