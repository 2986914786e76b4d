"""Has the C library keep memory that a step on a CPU has freed, for the next step."""

from __future__ import annotations

import ctypes

# Of <malloc.h>; see mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 256 << 20
_LARGEST_IN_HEAP_BYTES = (32 << 20, 256 << 20)  # some versions of glibc take no more than the first


def keep_freed_memory() -> None:
    """Keep up to 256 MiB of what is freed for the next step, in this process.

    By default blocks of some megabytes go back to the system when they are freed, and each page of them is cleared anew
    when the next layer asks for as much: half the time of a step in which 31 requests decode. What is kept was in use
    before, so the process is no larger than at its largest. Nothing happens where the C library has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for size in _LARGEST_IN_HEAP_BYTES:
            mallopt(_M_MMAP_THRESHOLD, size)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
