"""Which prompt lookup a device has, in a module of its own: the kernels import their plain twin's constants."""

from __future__ import annotations

from functools import cache

import torch

from modelserve_worker.kernels.prompt_lookup import LookupDoor, PlainLookup


@cache
def lookup_door(device: torch.device) -> LookupDoor:
    """The implementation for a device, chosen once: Triton kernels on CUDA, the plain twin elsewhere."""
    if device.type != "cuda":
        return PlainLookup()
    from modelserve_worker.kernels.prompt_lookup_triton import TritonLookup

    return TritonLookup()
