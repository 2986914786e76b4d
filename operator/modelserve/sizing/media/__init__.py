"""What media cost a worker: weights and rows on its device, memory and processors of its host."""
