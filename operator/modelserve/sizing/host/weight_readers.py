"""Host memory that a worker on GPUs needs beside its processes."""

from __future__ import annotations

WEIGHT_READERS = 8  # threads of one rank; together they fill a PCIe 5.0 link from the page cache
STAGING_BYTES_PER_THREAD = 8 << 20  # pinned until the load ends: two pieces that stay in a processor's cache
