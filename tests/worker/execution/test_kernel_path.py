"""The attention backend of GPUs and its kernels as one, in Triton's interpreter: whole models against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_checkpoints import load_checkpoint, make_checkpoint, random_tokens, reference_logits
from paged_logits import Forced, Traffic, replay
from triton.runtime import interpreter

from modelserve_worker.execution import model_runner


@pytest.fixture(autouse=True)
def kernels_run_interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On the CPU, as on a GPU whose kernels are all Triton's."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(model_runner, "runs_on_kernels", lambda *_: True)
    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, *scope: Any) -> None:  # bounds of loops may be arrays of one element
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(np.asarray(self.handle.data).item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    with np.errstate(over="ignore", invalid="ignore"):  # padding rows hold what memory held
        yield


@pytest.mark.parametrize("variant", ["31B", "E4B"])
def test_steps_through_the_kernels_say_what_the_reference_says(variant: str, tmp_path: Path) -> None:
    """Prompts in chunks and decodes of two requests, of which last rows go on alone; every row is stamped."""
    make_checkpoint(variant, tmp_path, seed=2, head_dim=64, global_head_dim=128)  # as the kernels take them
    requests = [Forced(tuple(random_tokens(length, seed=length)), length - 1) for length in (31, 5)]
    done = replay(
        load_checkpoint(tmp_path), Traffic(tuple(requests), chunk=24, max_num_seqs=2), narrowed=True, audited=True
    )
    for forced, positions, rows in zip(requests, done.positions, done.logits, strict=True):
        expected = reference_logits(tmp_path, list(forced.token_ids))[positions]
        assert float((rows - expected).abs().max()) < 1e-4
