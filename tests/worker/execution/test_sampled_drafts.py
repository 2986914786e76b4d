"""Penalties of rows behind drafts: each row counts the drafts before it, and what is not accepted is not counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from modelserve_worker.batch import AdmittedRequest
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.request import SamplingParams
from modelserve_worker.step.sampler import Sampler

VOCABULARY, SLOTS = 40, 6
KINDS = (
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 1.0, "repetition_penalty": 1.8},
    {"temperature": 1.0},
)


def sampler_of() -> Sampler:
    sampler = Sampler(
        max_num_seqs=SLOTS, vocab_size=VOCABULARY, softcap=None, parallel=TensorParallel(), device=torch.device("cpu")
    )
    sampler.admit(
        [
            AdmittedRequest(
                slot, str(slot), SamplingParams(seed=slot, max_tokens=9, **KINDS[slot % len(KINDS)]), (1,), ()
            )
            for slot in range(SLOTS)
        ]
    )
    return sampler


def drawn(sampler: Sampler, logits: torch.Tensor, slots: np.ndarray, counts: np.ndarray, **drafted) -> list[int]:
    output = sampler.sample(
        logits, slots=torch.from_numpy(slots), positions=torch.from_numpy(counts + 7),
        output_counts=torch.from_numpy(counts), host_slots=slots, **drafted,
    )  # fmt: skip
    return output.tokens.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_rows_behind_drafts_are_penalised_as_if_they_came_one_by_one(seed: int) -> None:
    random = np.random.default_rng(seed)
    together, alone = sampler_of(), sampler_of()
    known = np.zeros(SLOTS, dtype=np.int32)
    for _ in range(6):
        lengths = random.integers(1, 6, SLOTS).tolist()
        logits = torch.from_numpy(random.normal(size=(SLOTS, 5, VOCABULARY)).astype(np.float32) * 2)
        expected, drafts = [], []
        for slot, length in enumerate(lengths):
            said = []
            for offset in range(length):  # one by one, until a draft is wrong
                count = known[slot : slot + 1] + np.int32(offset)
                said += drawn(alone, logits[slot, offset][None], np.array([slot], dtype=np.int32), count)
                right = offset + 1 < length and random.random() < 0.7
                drafts.append(-1 if offset + 1 == length else said[-1] if right else (said[-1] + 1) % VOCABULARY)
                if not right:
                    drafts += [5] * (length - offset - 2) + [-1] * (offset + 1 < length)
                    break
            expected.append(said)
        slots, offsets = np.repeat(np.arange(SLOTS), lengths), np.concatenate([np.arange(n) for n in lengths])
        tokens = drawn(
            together, logits[slots, offsets], slots.astype(np.int32), known[slots] + offsets.astype(np.int32),
            offsets=offsets.astype(np.int32), proposed=torch.tensor(drafts, dtype=torch.int32),
        )  # fmt: skip
        first = 0
        for slot, said in enumerate(expected):
            assert tokens[first : first + len(said)] == said
            first += lengths[slot]
            known[slot] += len(said)
        penalised = [slot for slot in range(SLOTS) if slot % 3 < 2]
        assert torch.equal(together._seen[penalised], alone._seen[penalised])
