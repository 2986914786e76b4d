"""Sampling by several ranks of a small model, each with its share of the logits; ranks are processes joined by gloo.

    export PYTHONPATH=operator:worker:tests/worker/model
    python tests/worker/model/rank_sampling.py [--ranks 2] [--tokens 100000]

Batches of 64 rows of every kind (greedy, unfiltered, top-k, filters of the whole vocabulary, penalties, biases, token
masks, log probabilities) sample step after step, and each step's tokens are the next one's input. Beside its own
sampler each rank gathers all logits and draws from them as one rank does. Says how many tokens were equal; exits 1 when
one was not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from dense_attention import DenseAttention
from model_checkpoints import load_checkpoint, make_checkpoint
from rank_logits import on_every_rank
from torch import Tensor

from modelserve_worker.batch import AdmittedRequest
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.request import SamplingParams
from modelserve_worker.step.sampler import Sampler, SamplerOutput
from modelserve_worker.step.token_masks import TokenMaskBuffer, TokenMasks

ROWS = 64
VOCABULARY = 1024
CAP = 30.0
EOS = (1, 7)
LOGPROBS = 3
BROKEN = 4  # the step with NaNs in the last rank's share
BROKEN_ROW = 5
KINDS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {},
    {"top_k": 64, "top_p": 0.95},
    {"top_k": 5, "min_p": 0.05, "temperature": 0.7, "min_tokens": 3},
    {"temperature": 1.5, "logprobs": LOGPROBS},
    {"top_p": 0.9},
    {"top_k": 20, "repetition_penalty": 1.3, "presence_penalty": 0.2},
    {"top_k": 300, "logprobs": LOGPROBS},
    {"temperature": 0.0, "logit_bias": ((9, 3.0), (900, 2.0))},
)
FILTERED, REPORTED = (5, 7), (4, 7)  # of KINDS


class RecordingParallel(TensorParallel):
    """Notes the shape of everything that it gathers."""

    gathered: list[tuple[int, ...]]

    def all_gather(self, x: Tensor) -> Tensor:
        self.gathered.append(tuple(x.shape))
        return super().all_gather(x)


class Batch:
    """One sampler and its rows, row i of kind i mod the number of kinds, in slot ROWS - 1 - i."""

    def __init__(self, parallel: TensorParallel) -> None:
        self._sampler = Sampler(
            max_num_seqs=ROWS, vocab_size=VOCABULARY, softcap=CAP, parallel=parallel,
            device=torch.device("cpu"),
        )  # fmt: skip
        self._slots = np.arange(ROWS, dtype=np.int32)[::-1].copy()
        self._masks = TokenMaskBuffer(max_num_seqs=ROWS, vocab_size=VOCABULARY, device=torch.device("cpu"))
        self._sampler.admit(
            [
                AdmittedRequest(
                    slot, str(row), SamplingParams(seed=row, max_tokens=9, **KINDS[row % len(KINDS)]), (3,), (), EOS
                )
                for row, slot in enumerate(self._slots.tolist())
            ]
        )

    def sample(self, logits: Tensor, step: int) -> SamplerOutput:
        counts = np.full(ROWS, step, dtype=np.int32)
        return self._sampler.sample(
            logits,
            slots=torch.from_numpy(self._slots),
            positions=torch.full((ROWS,), 10 + step, dtype=torch.int32),
            output_counts=torch.from_numpy(counts),
            host_slots=self._slots,
            masks=self._constrained(step),
        )

    def _constrained(self, step: int) -> TokenMasks | None:
        """Every third step a seventh of the rows, rows of all kinds, may take a third of the tokens."""
        if step % 3:
            return None
        rng = np.random.default_rng(step)
        rows = np.arange(step % 7, ROWS, 7, dtype=np.int32)
        bits = (rng.random((len(rows), VOCABULARY)) < 0.3).astype(np.uint8)
        bits[:, 11] = 1
        return self._masks.send(rows, np.packbits(bits, axis=1, bitorder="little").view(np.int32), rows=ROWS)


def sampled_tokens(directory: Path, steps: int, parallel: TensorParallel) -> list[Tensor]:
    """Of one rank: its tokens [steps, ROWS]; those of one rank alone from the gathered logits; columns of the reported
    log probabilities of both, concatenated over steps; and the shapes that it gathered, one row each."""
    recording = RecordingParallel(parallel.rank, parallel.size)
    object.__setattr__(recording, "gathered", [])
    model = load_checkpoint(directory, parallel=parallel)
    together, alone = Batch(recording), Batch(TensorParallel())
    ids = torch.arange(3, 3 + ROWS)
    tokens: tuple[list[Tensor], list[Tensor]] = ([], [])
    reported: tuple[list[Tensor], list[Tensor]] = ([], [])
    for step in range(steps):
        hidden = model(ids, torch.arange(ROWS), DenseAttention(model.architecture))
        share = model.head(hidden)
        if step == BROKEN and parallel.rank == parallel.size - 1:
            share[BROKEN_ROW, -1] = torch.nan
        for found, scores, output in (
            (tokens[0], reported[0], together.sample(share, step)),
            (tokens[1], reported[1], alone.sample(parallel.all_gather(share), step)),
        ):
            found.append(output.tokens)
            assert output.logprobs is not None
            scores.append(torch.cat([output.logprobs.chosen, output.logprobs.top_logprobs.flatten()]))
        ids = tokens[0][-1].clamp(min=0)
    columns = [torch.stack(each) for each in (*tokens, *reported)]
    return [*columns, torch.tensor(recording.gathered)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=100_000)
    chosen = parser.parse_args()
    steps, started = -(-chosen.tokens // ROWS), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint("31B", Path(folder) / "model", seed=6, vocab_size=VOCABULARY)
        work = partial(sampled_tokens, Path(folder) / "model", steps)
        ranks = on_every_rank(work, size=chosen.ranks, scratch=Path(folder), timeout_s=3600)
    first = ranks[0][0]
    between = sum(int((rank[0] != first).sum()) for rank in ranks)
    against = sum(int((rank[1] != first).sum()) for rank in ranks)
    print(f"{chosen.ranks} ranks, {steps} steps of {ROWS} rows in {time.monotonic() - started:.0f} s:")
    print(f"{first.numel()} tokens ({first.unique().numel()} different ones)")
    print(f"{between} differ between ranks, {against} from the draw of one rank")
    return int(between + against > 0)


if __name__ == "__main__":
    sys.exit(main())
