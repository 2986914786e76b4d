"""Small block drafters of a tiny target, and what they would propose if nothing were paged, cut or kept."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dense_attention import DenseAttention
from dflash_drafters import CONFIGS, DenseDraftAttention, write_drafter

from modelserve.model.architecture import ModelArchitecture
from modelserve.sizing.pages import CacheGeometry, KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve.sizing.weights.dflash import draft_cache
from modelserve_worker.drafters.block_drafter import BlockDrafter
from modelserve_worker.models.dflash import DFlash
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.scheduling.costs.step_costs import Seconds
from modelserve_worker.scheduling.stats import TimedStep
from modelserve_worker.weights.loader import load_dflash

WINDOW = 40


def write_block_drafter(
    directory: Path, target: Path, *, kind: str = "zlab", seed: int = 0, block_rows: int | None = None
) -> Path:
    """A random one of the target in another directory: two layers with a window and one without, or all without;
    `block_rows` None: as many as its kind has."""
    read = json.loads((target / "config.json").read_text())
    text, of = read.get("text_config", read), ModelArchitecture.from_config(read)
    sizes: dict[str, Any] = {"hidden_size": text["hidden_size"], "vocab_size": text["vocab_size"]}
    changes: dict[str, Any] = {}
    if kind == "zlab":
        taps = {"mask_token_id": 4, "target_layer_ids": [0, of.num_hidden_layers // 2, of.num_hidden_layers - 2]}
        changes = sizes | {
            "num_target_layers": of.num_hidden_layers, "sliding_window": WINDOW, "dflash_config": taps,
        }  # fmt: skip
    else:
        layers = CONFIGS[kind]["transformer_layer_config"] | sizes
        if "sliding_window" in layers:
            layers |= {"sliding_window": WINDOW}
        changes = {"transformer_layer_config": layers, "aux_hidden_state_layer_ids": [1, 3, of.num_hidden_layers - 1]}
        if kind == "dflash2":
            changes["draft_vocab_size"] = text["vocab_size"]
    if block_rows is not None:
        changes |= {"block_size": block_rows}
    write_drafter(kind, directory, seed=seed, **changes)
    return directory


def geometry_beside(model: Gemma4ForCausalLM, network: DFlash) -> CacheGeometry:
    """Of a cache in the model's dtype with what the drafter keeps."""
    return cache_geometry(
        model.architecture, dtype=KVCacheDtype(str(model.dtype).removeprefix("torch.")),
        layout=KVCacheLayout.least(model.architecture), tensor_parallel_size=1, draft=draft_cache(network.architecture),
    )  # fmt: skip


class TurnByTurn:
    """Costs by which drafts are free and one drafter at a time, or none, takes no time either: a switch that changes
    its mind every step or every few."""

    def __init__(self, drafters: int, *, seed: int = 0) -> None:
        self._drafters, self._random = drafters, random.Random(seed)
        self._turn, self._left = 0, 0
        self.asked = [0] * drafters

    def seconds(self, decodes: int, most_drafts: int, *, context: float) -> Seconds:
        return np.full(most_drafts + 1, 1.0)

    def draft_seconds(self, drafter: int, requests: int, most: int, *, context: float) -> Seconds:
        if drafter == 0:
            self._left -= 1
            if self._left < 0:
                self._turn, self._left = (self._turn + 1) % (self._drafters + 1), self._random.randrange(3)
        return np.where(np.arange(most + 1) > 0, 0.0 if drafter == self._turn else 1e9, 0.0)

    def observe(self, steps: Sequence[TimedStep]) -> None:
        for step in steps:
            self.asked[step.asked.drafter] += step.asked.drafts > 0


def block_drafter(
    model: Gemma4ForCausalLM, directory: Path, *, num_tokens: int, slots: int, step_rows: int
) -> BlockDrafter:
    network = load_dflash(directory, model)
    return BlockDrafter(network, model, num_tokens=num_tokens, max_num_seqs=slots, step_rows=step_rows)


class DenseDrafts:
    """What the drafter in `directory` says behind a text of `target`, computed whole each time."""

    def __init__(self, target: Gemma4ForCausalLM, directory: Path, *, longest: int) -> None:
        self.network = load_dflash(directory, target)
        self.target = target
        self.taps = target.tap(self.network.architecture.taps, rows=longest)

    @torch.no_grad()
    def behind(self, tokens: Sequence[int], count: int) -> list[int]:
        """The last of the tokens is the anchor, which the target has not computed."""
        known, positions = torch.tensor(tokens[:-1], dtype=torch.int32), torch.arange(len(tokens) - 1)
        self.target(known, positions, DenseAttention(self.target.architecture))
        context = self.network.context_rows(self.network.context(self.taps.of(len(known))), positions)
        anchors = torch.tensor([len(known)], dtype=torch.int32)
        attention = DenseDraftAttention(self.network.architecture, [(k[None], v[None]) for k, v in context], anchors)
        drafted = self.network(torch.tensor(tokens[-1:], dtype=torch.int32), anchors, attention, asked=count)
        return drafted.tokens[0].tolist()
