"""Logits where a right answer is to be said, through the engine's paged path and through transformers.

The answer is forced token by token. Greedy decoding says an answer if and only if the largest logit of every one of
its positions, the end of the turn included, is the answer's token; so one pass tells what decoding would say.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import block_local
import torch
from rendering import Rendered, Renderer
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig
from transformers import Gemma4ForCausalLM as ReferenceModel

from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout
from modelserve_tools.evaluation import flags as eval_flags
from modelserve_tools.evaluation.cells import Cell
from modelserve_tools.evaluation.skills import exercise
from modelserve_tools.tiny.__main__ import chat_template
from modelserve_tools.tiny.variants import VARIANTS
from modelserve_worker.layers.placement import Placement
from modelserve_worker.weights.checkpoint_config import read_architecture, read_weight_format
from modelserve_worker.weights.files import InvalidCheckpoint
from modelserve_worker.weights.loader import load_model

sys.path.append(str(Path(__file__).parents[1] / "worker" / "model"))  # for those who are not run by pytest

from paged_logits import Forced, Traffic, geometry_of, replay

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOKENS_PER_PASS = 16_384  # of the reference, padding included; a longer prompt is a pass of its own


class AnswerLogits(Protocol):
    """What a model says where it should say the final answer of each conversation."""

    def __call__(self, rendered: Sequence[Rendered]) -> list[Tensor]:
        """float32 [answer tokens, vocab] of each, on the CPU; row i predicts token i of the answer."""
        ...


class EngineLogits:
    """The engine: prompts prefilled in chunks of `chunk` tokens, the answer's tokens decoded one by one.

    `kv_dtype` None: the rows have the weights' dtype. `layout` None: rows of V alone, where the model allows it. Reads
    are not audited, since stamps would stop what damages them on purpose.
    """

    def __init__(
        self,
        directory: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: KVCacheDtype | None = None,
        layout: KVCacheLayout | None = None,
        chunk: int = 512,
        max_num_seqs: int = 8,
    ) -> None:
        placement = Placement(device, dtype, weight_format=read_weight_format(directory))
        self.model = load_model(read_architecture(directory), directory, placement)
        self.chunk = chunk
        self._kv_dtype = kv_dtype or KVCacheDtype(str(dtype).removeprefix("torch."))
        self._layout = layout
        self._max_num_seqs = max_num_seqs

    def __call__(self, rendered: Sequence[Rendered]) -> list[Tensor]:
        requests = tuple(Forced(r.token_ids, r.prompt_tokens, kept_from=r.prompt_tokens - 1) for r in rendered)
        geometry = geometry_of(self.model, dtype=self._kv_dtype, layout=self._layout)
        traffic = Traffic(requests, chunk=self.chunk, max_num_seqs=self._max_num_seqs)
        return replay(self.model, traffic, geometry=geometry, audited=False).logits


def reference_model(directory: Path, *, dtype: torch.dtype, attention: str = "sdpa") -> ReferenceModel:
    """The text model in transformers, on the CPU. Raises InvalidCheckpoint when names or shapes of weights differ."""
    block_local.register()
    # A text model's tensors have no "language_model" in their names; without the mapping they stay random.
    read: Any = ReferenceModel.from_pretrained(
        directory,
        config=AutoConfig.from_pretrained(directory).get_text_config(),
        key_mapping={r"^model\.language_model\.": "model."},
        dtype=dtype,
        attn_implementation=attention,
        output_loading_info=True,
    )
    model, loading = read
    if different := [f"{what}: {sorted(names)[:3]}" for what, names in loading.items() if names]:
        raise InvalidCheckpoint(f"transformers cannot read {directory}: {'; '.join(different)}")
    return model


class TransformersLogits:
    """transformers, whole conversations at once and without a cache. Raises InvalidCheckpoint when weights differ.

    `attention` is "sdpa", "eager" or "block_local", which is much faster where the context is many windows.
    """

    def __init__(self, directory: Path, *, dtype: torch.dtype, device: torch.device, attention: str = "sdpa") -> None:
        model = reference_model(directory, dtype=dtype, attention=attention)
        self._model = model.to(device).eval()
        self._device = device

    def __call__(self, rendered: Sequence[Rendered]) -> list[Tensor]:
        logits: dict[int, Tensor] = {}
        for group in _passes(rendered):
            logits |= zip(group, self._forward([rendered[i] for i in group]), strict=True)
        return [logits[i] for i in range(len(rendered))]

    @torch.inference_mode()
    def _forward(self, group: Sequence[Rendered]) -> Sequence[Tensor]:
        """One pass. Padding comes last, where no query that matters can see it."""
        inputs = [torch.tensor(r.token_ids[:-1]) for r in group]
        padded = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True)
        hidden = self._model.model(input_ids=padded.to(self._device), use_cache=False).last_hidden_state
        answers = torch.cat([hidden[i, r.prompt_tokens - 1 : len(r.token_ids) - 1] for i, r in enumerate(group)])
        logits: Tensor = self._model.lm_head(answers)
        if cap := self._model.config.final_logit_softcapping:
            logits = torch.tanh(logits / cap) * cap
        return torch.split(logits.float().cpu(), [len(r.token_ids) - r.prompt_tokens for r in group])


def _passes(rendered: Sequence[Rendered]) -> Iterator[list[int]]:
    """Numbers of the conversations of each pass, like with like in length."""
    group: list[int] = []
    for i in sorted(range(len(rendered)), key=lambda i: len(rendered[i].token_ids)):
        if group and (len(group) + 1) * len(rendered[i].token_ids) > TOKENS_PER_PASS:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def checkpoint_renderer(directory: Path) -> Renderer:
    """The renderer of a checkpoint's own tokenizer and template. Raises InvalidCheckpoint for a foreign template."""
    template = (directory / "chat_template.jinja").read_text()
    variant = next((name for name in VARIANTS if chat_template(name) == template), None)
    if variant is None:
        raise InvalidCheckpoint(f"{directory / 'chat_template.jinja'} is not the template of {', '.join(VARIANTS)}")
    return Renderer(Tokenizer.from_file(str(directory / "tokenizer.json")), variant=variant)


def exercise_flags(argv: Sequence[str]) -> argparse.Namespace:
    """What modelserve-eval would ask with these flags; the endpoint that it needs is this process."""
    return eval_flags.parse(["--base-url", "http://in-process", *argv])


def render_cell(renderer: Renderer, cell: Cell, *, seed: int, first: int = 0) -> list[Rendered]:
    """Exercises `first`, `first` + 1, ... that `modelserve-eval --seed` asks in this cell, `cell.n` of them."""
    asked = (exercise(cell.skill, seed=seed, index=first + i, distance=cell.distance) for i in range(cell.n))
    return [renderer.render(each) for each in asked]


def is_exact(rendered: Rendered, logits: Tensor) -> bool:
    """True when greedy decoding says the final answer; logits [answer tokens, vocab] as from AnswerLogits."""
    answer = torch.tensor(rendered.token_ids[rendered.prompt_tokens :])
    return bool(torch.equal(logits.argmax(-1), answer))


def divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """KL(reference || logits) in nats, float64 [N], of logits [N, vocab]: sum over tokens of p (log p - log q).

    In float64, because float32 sums could not tell less than about 1e-7 from nothing.
    """
    p, q = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)
