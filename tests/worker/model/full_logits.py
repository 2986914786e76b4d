"""Logits of every row of a step, which the product never makes: it samples, or scores, the rows that are asked for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from modelserve_worker.batch import ScheduledBatch
from modelserve_worker.kernels.sampling.sampling import softcapped
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.runner.model_runner import GPUModelRunner


@torch.no_grad()
def compute_logits(model: Gemma4ForCausalLM, hidden: Tensor) -> Tensor:
    """hidden [N, H] after the final norm -> float32 [N, vocab], softcapped, on every rank."""
    return softcapped(model.parallel.all_gather(model.head(hidden)), model.architecture.final_logit_softcapping)


@torch.inference_mode()
def forward_hidden(runner: GPUModelRunner, batch: ScheduledBatch, *, every_row: bool = False) -> Tensor:
    """Run the model over one step and write its rows: hidden states of all of them [T, H], or of the `kept` rows where
    the step is narrowed and not `every_row` is asked for."""
    if every_row:
        batch = replace(batch, sampled=batch.lengths, given=batch.lengths, targets=np.zeros_like(batch.token_ids))
    return runner._hidden(runner._pack(batch), batch)


@torch.inference_mode()
def teacher_forced_logits(runner: GPUModelRunner, batch: ScheduledBatch) -> Tensor:
    """Run one step without sampling: the logits of every token, float32 [T, vocab]."""
    return compute_logits(runner.model, forward_hidden(runner, batch, every_row=True))
