"""Host memory that a worker on GPUs needs beside its processes."""

from __future__ import annotations

WEIGHT_READERS = 8  # threads of one rank; together they fill a PCIe 5.0 link from the page cache
STAGING_BYTES_PER_THREAD = 8 << 20  # two pieces, small enough to stay in a processor's cache between read and copy
WEIGHT_STAGING_BYTES = WEIGHT_READERS * STAGING_BYTES_PER_THREAD
"""Pinned buffers of one rank while it loads; they are gone when it is ready."""
