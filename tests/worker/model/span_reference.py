"""Transformers' logits of prompts with rows of embeddings, and such prompts with random ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from model_checkpoints import random_tokens
from torch import Tensor

from modelserve_worker.embedded_spans import EmbeddedSpan

PLACEHOLDER = 7  # what stands in a prompt for a row of an image


def random_span(start: int, rows: int, *, hidden: int, seed: int, mutual: bool = True) -> EmbeddedSpan:
    """Embeddings of the size that scaled rows of the table have."""
    values = np.random.default_rng(seed).standard_normal((rows, hidden)).astype(np.float32)
    return EmbeddedSpan.of(start, values, mutual=mutual)


def prompt_of(length: int, spans: Sequence[EmbeddedSpan], *, seed: int, vocab_size: int = 256) -> tuple[int, ...]:
    """Random tokens, and placeholders where the spans are."""
    tokens = random_tokens(length, seed=seed, vocab_size=vocab_size)
    for span in spans:
        tokens[span.start : span.end] = [PLACEHOLDER] * len(span)
    return tuple(tokens)


def spanned_logits(directory: Path, token_ids: Sequence[int], spans: Sequence[EmbeddedSpan]) -> Tensor:
    """float32 [len(token_ids), vocab]: in one pass, with the masks that transformers makes of images for itself."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import create_masks_for_vision_model

    config = json.loads((directory / "config.json").read_text())
    text = Gemma4TextConfig(**config.get("text_config", config))
    prefix = {"key_mapping": {"^model.language_model": "model"}} if "text_config" in config else {}
    model = Gemma4ForCausalLM.from_pretrained(
        directory, config=text, dtype=torch.float32, attn_implementation="eager", **prefix
    ).eval()
    ids, blocks = torch.tensor([token_ids]), torch.full((1, len(token_ids)), -1)
    for number, span in enumerate(spans):
        ids[0, span.start : span.end] = text.pad_token_id
        if span.mutual:
            blocks[0, span.start : span.end] = number
    with torch.no_grad():
        rows = model.get_input_embeddings()(ids)
        per_layer = model.model.get_per_layer_inputs(ids) if text.hidden_size_per_layer_input else None
        for span in spans:
            rows[0, span.start : span.end] = torch.from_numpy(span.embeddings)
        positions = torch.arange(len(token_ids))[None]
        masks = create_masks_for_vision_model(model.config, rows, None, None, positions, blocks)
        hidden = model.model(
            inputs_embeds=rows, per_layer_inputs=per_layer, attention_mask=masks, position_ids=positions,
            use_cache=False,
        ).last_hidden_state  # fmt: skip
        cap = text.final_logit_softcapping
        logits: Tensor = cap * torch.tanh(model.lm_head(hidden) / cap)
    return logits[0].float()
