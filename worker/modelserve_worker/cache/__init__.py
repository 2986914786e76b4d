"""The paged KV cache of one rank, and copies of its pages to and from host memory."""
