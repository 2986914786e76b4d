"""From engine arguments to ranks that are ready: device, weights, profile, pool; and compiling kernels ahead."""
