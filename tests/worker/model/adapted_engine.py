"""Engines on the CPU that serve adapters, and what transformers computes of the weights with the adapter merged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from peft_adapters import LINEARS, PER_LAYER, adapted
from transformers import Gemma4ForCausalLM

from modelserve.engine_args import EngineArgs
from modelserve.sizing.adapters import ADAPTABLE
from modelserve_worker.engine.engine import Engine
from modelserve_worker.engine_startup import build_engine
from modelserve_worker.request import Request, SamplingParams

TARGETS = {
    "E2B": LINEARS + PER_LAYER, "E4B": LINEARS + PER_LAYER, "12B": LINEARS, "26B-A4B": LINEARS, "31B": LINEARS,
}  # fmt: skip
TOLERANCE = 2e-4


def train(base: Path, into: Path, *, seed: int, **settings: Any) -> Gemma4ForCausalLM:
    """An adapter whose factors are all random, saved as PEFT does; the model with it merged."""
    return adapted(base, into, seed=seed, **{"target_modules": LINEARS} | settings).merge_and_unload().eval()


def reference(model: Gemma4ForCausalLM, tokens: Sequence[int]) -> torch.Tensor:
    """Log probabilities of tokens 1.. given those before, float64 [N - 1]."""
    with torch.no_grad():
        logits = model(torch.tensor([list(tokens)])).logits[0].double()
    chosen = torch.tensor(list(tokens[1:]))[:, None]
    return logits.log_softmax(-1)[:-1].gather(1, chosen)[:, 0]


def engine_of(base: Path, **settings: Any) -> Engine:
    """With room for adapters of every kind unless `settings` say otherwise."""
    args = EngineArgs(
        model=str(base), device="cpu", dtype="float32", max_model_len=128, max_num_seqs=16, max_num_batched_tokens=48,
        max_num_mixed_tokens=24, cpu_memory_bytes=2 << 30, max_lora_rank=8, **{"lora_targets": ADAPTABLE} | settings,
    )  # fmt: skip
    return build_engine(args, lambda *_: None).engine


def load(engine: Engine, digest: str, directory: Path) -> str | None:
    """The problem, if there is one."""
    answers: SimpleQueue[str | None] = SimpleQueue()
    engine.read_adapter(digest, str(directory), answers.put)
    return answers.get(timeout=60)


def scored(engine: Engine, requests: Sequence[Request]) -> dict[str, tuple[torch.Tensor, list[int], torch.Tensor]]:
    """By request: log probabilities of its prompt, its tokens, and their log probabilities."""
    for request in requests:
        engine.add(request)
    prompts: dict[str, torch.Tensor] = {}
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    drawn: dict[str, list[float]] = {request.request_id: [] for request in requests}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            if output.prompt_logprobs is not None:
                prompts[output.request_id] = torch.from_numpy(output.prompt_logprobs.logprobs.copy()).double()
            tokens[output.request_id] += output.token_ids
            drawn[output.request_id] += [each.logprob for each in output.logprobs]
    return {name: (prompts[name], tokens[name], torch.tensor(drawn[name]).double()) for name in prompts}


def request(name: str, tokens: Sequence[int], adapter: str = "", *, max_tokens: int = 4) -> Request:
    sampling = SamplingParams(
        seed=1, max_tokens=max_tokens, temperature=0.0, logprobs=0, prompt_logprobs=0, ignore_eos=True
    )
    return Request(name, list(tokens), sampling, adapter=adapter)


def prompts(count: int, vocabulary: int) -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(7)
    for index in range(count):
        yield torch.randint(6, vocabulary, (9 + 7 * index,), generator=generator).tolist()
