"""Kernels run in Triton's interpreter where there is no GPU; it must be chosen before any kernel module is imported.

No example of Hypothesis is held to a time: a busy machine is no fault.
"""

import os
from typing import Any

import hypothesis

# As in the engine's process (engine/process.py); read when torch is loaded. Tests run side by side on every core.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import torch

hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from triton.runtime import interpreter

    _patch_lang_tensor = interpreter._patch_lang_tensor

    def _with_index(tensor: Any, scope: Any) -> None:
        """Triton 3.6 takes int() of arrays of one element, which NumPy 2.4 refuses: `range` of a kernel needs it."""
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _with_index
