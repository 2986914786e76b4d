"""The training loop: AdamW on float32 masters, products in bfloat16 on a GPU, and what the model can do so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from batches import batches, pack_final_answers
from decoder import Decoder, Rows, loss_of
from rendering import Rendered, Renderer
from schedule import Phase, Schedule
from torch import Tensor

from modelserve_tools.evaluation.skills import exercise

LOG_EVERY = 50


class Trainer:
    """Trains `decoder.weights` in place."""

    def __init__(self, decoder: Decoder, schedule: Schedule, *, variant: str, seed: int, workers: int) -> None:
        self._decoder = decoder
        self._schedule = schedule
        self._variant = variant
        self._seed = seed
        self._workers = workers
        self._device = decoder.weights["norm.weight"].device
        matrices = [w for w in decoder.weights.values() if w.dim() > 1]
        vectors = [w for w in decoder.weights.values() if w.dim() == 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
            lr=schedule.rate, betas=(0.9, 0.95), fused=self._device.type == "cuda",
        )  # fmt: skip
        self._done = 0
        self._began = time.monotonic()
        self._losses: list[float] = []

    def seconds(self) -> float:
        """Since the trainer was made."""
        return time.monotonic() - self._began

    def run(self, *, after_phase: Callable[[Phase], None] = lambda phase: None) -> list[float]:
        """Mean losses in nats a trained token, of each LOG_EVERY steps and of what is left of a phase."""
        for phase in self._schedule.phases:
            self._phase(phase)
            after_phase(phase)
        return self._losses

    def _phase(self, phase: Phase) -> None:
        streams = [
            batches(stream, variant=self._variant, seed=f"{self._seed} {phase.name} {i}", workers=self._workers)
            for i, (stream, _) in enumerate(phase.streams)
        ]
        self._steps(phase, streams)

    def _steps(self, phase: Phase, streams: Sequence[Iterator[Rows]]) -> None:
        recent: list[list[Tensor]] = [[] for _ in streams]
        began, tokens = time.monotonic(), 0
        for step in range(phase.steps):
            which = phase.stream_of(step)
            rows = next(streams[which]).to(self._device)
            loss = self._step(rows, rate=self._rate(phase, step))
            recent[which].append(loss)
            tokens += rows.input_ids.numel()
            if (step + 1) % LOG_EVERY == 0 or step + 1 == phase.steps:
                means = [torch.stack(losses).mean().item() if losses else float("nan") for losses in recent]
                self._losses.append(means[0])
                seconds = time.monotonic() - began
                print(
                    f"{self.seconds():6.1f} s {phase.name:8} step {step + 1:5} "
                    f"loss {' '.join(f'{mean:.4f}' for mean in means)} {tokens / seconds / 1e3:.0f}k tokens/s",
                    flush=True,
                )
                recent = [[] for _ in streams]
                began, tokens = time.monotonic(), 0

    def _rate(self, phase: Phase, step: int) -> float:
        warm = min(1.0, (self._done + 1) / self._schedule.warmup)
        left = 1.0 - step / phase.steps if phase.decay else 1.0
        return self._schedule.rate * warm * left

    def _step(self, rows: Rows, *, rate: float) -> Tensor:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(self._decoder.logits(rows), rows.labels)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(self._decoder.weights.values()), 1.0)
        self._optimizer.step()
        self._done += 1
        return loss.detach()


@torch.no_grad()
def exact_matches(decoder: Decoder, documents: Sequence[Rendered], *, tokens_at_once: int = 131_072) -> list[bool]:
    """Whether greedy decoding would give the final answer, exactly, for each document.

    Teacher forcing tells: greedy decoding follows the answer as long as each of its tokens has the largest logit.
    """
    window = decoder.architecture.sliding_window
    device = decoder.weights["norm.weight"].device
    order = sorted(range(len(documents)), key=lambda i: len(documents[i].token_ids))
    right = [False] * len(documents)
    while order:
        length = -(-len(documents[order[-1]].token_ids) // window) * window
        take = order[-max(1, tokens_at_once // length) :]
        del order[-len(take) :]
        rows = pack_final_answers([documents[i] for i in take], window=window).to(device)
        hits = (decoder.logits(rows).argmax(-1) == rows.labels) | (rows.labels < 0)
        for i, hit in zip(take, hits.all(1).tolist(), strict=True):
            right[i] = hit
    return right


def accuracy(
    decoder: Decoder, renderer: Renderer, *, cells: Sequence[tuple[str, int | None]], count: int, seed: int
) -> dict[tuple[str, int | None], float]:
    """Share of exact answers per (skill, distance) over `count` held-out exercises."""
    shares = {}
    for skill, distance in cells:
        made = [exercise(skill, seed=seed, index=i, distance=distance) for i in range(count)]
        shares[skill, distance] = sum(exact_matches(decoder, [renderer.render(e) for e in made])) / count
    return shares
