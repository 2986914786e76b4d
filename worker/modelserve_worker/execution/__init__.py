"""Everything that owns a device tensor: weights, cache, attention, sampling and the ranks that share a model."""
