"""A block of each drafter of the DFlash family is that of the reference, and each way to get it subtly wrong shows.

No answer changes where a drafter is wrong, only how many drafts are right: so what such mistakes change is held here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch
from dflash_drafters import (
    CONFIGS,
    HIDDEN,
    KINDS,
    TARGET_LAYERS,
    VOCAB,
    WINDOW,
    DenseDraftAttention,
    target_architecture,
    write_drafter,
)
from dflash_reference import Block, Reference
from safetensors.torch import load_file
from torch import Tensor

from modelserve.model.drafters.dflash import DFlashArchitecture
from modelserve_worker.layers.placement import Placement
from modelserve_worker.models.dflash import DFlash
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.weights.loader import load_dflash, load_model

TOLERANCE = 1e-4
ANCHORS = ((17, 3), (200, WINDOW), (5, 2 * WINDOW + 1))  # (token, position): before, at and behind a whole window


@dataclass
class Pair:
    target: Gemma4ForCausalLM
    drafter: DFlash
    reference: Reference
    hidden_states: list[Tensor]

    def with_changes(self, **changes: object) -> DFlash:
        """The same weights read as another geometry says."""
        changed = self.drafter.architecture.model_copy(update=changes)
        drafter = DFlash(changed, self.target)
        drafter.load_state_dict(self.drafter.state_dict(), strict=False)
        return drafter

    def attention(self, drafter: DFlash) -> DenseDraftAttention:
        """Over the context of every slot, which is the same longest one, of which each sees what is before it."""
        tapped = torch.cat([self.hidden_states[tap + 1] for tap in drafter.architecture.taps], dim=-1)
        rows = drafter.context_rows(drafter.context(tapped), torch.arange(len(tapped)))
        dense = [tuple(each.expand(len(ANCHORS), *each.shape) for each in pair) for pair in rows]
        return DenseDraftAttention(drafter.architecture, dense, torch.tensor([position for _, position in ANCHORS]))

    def rows(self, drafter: DFlash) -> Tensor:
        return drafter.rows(*_anchors(), self.attention(drafter))

    @cached_property
    def blocks(self) -> list[Block]:
        return [
            self.reference.block([state[:position] for state in self.hidden_states], token, position)
            for token, position in ANCHORS
        ]


def _anchors() -> tuple[Tensor, Tensor]:
    tokens, positions = zip(*ANCHORS, strict=True)
    return torch.tensor(tokens, dtype=torch.int32), torch.tensor(positions, dtype=torch.int32)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}
    placement = Placement(torch.device("cpu"), torch.float32)
    target = load_model(target_architecture(), Path(), placement, load_format="dummy", seed=1)

    def pair(kind: str) -> Pair:
        if kind not in made:
            directory = tmp_path_factory.mktemp(kind)
            config = write_drafter(kind, directory, seed=7)
            generator = torch.Generator().manual_seed(3)
            states = [torch.randn(2 * WINDOW + 1, HIDDEN, generator=generator) for _ in range(TARGET_LAYERS + 1)]
            tensors, table = load_file(directory / "model.safetensors"), target.embedding.weight
            made[kind] = Pair(target, load_dflash(directory, target), Reference(config, tensors, table, table), states)
        return made[kind]

    return pair


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_that_of_the_reference(kind: str, pairs: Callable[[str], Pair]) -> None:
    pair = pairs(kind)
    drafted = pair.drafter(*_anchors(), pair.attention(pair.drafter))
    rows = pair.rows(pair.drafter)
    for slot, block in enumerate(pair.blocks):
        assert torch.allclose(rows[slot], block.rows, atol=TOLERANCE, rtol=0)
        assert drafted.tokens[slot].tolist() == block.tokens
        if block.confidence is None:
            assert drafted.confidence is None
        else:
            assert drafted.confidence is not None
            assert drafted.confidence[slot].tolist() == pytest.approx(block.confidence, abs=TOLERANCE)
    assert drafted.tokens.dtype == torch.int32
    assert drafted.tokens.shape == (len(ANCHORS), pair.drafter.architecture.num_drafts)


@pytest.mark.parametrize("kind", KINDS)
def test_context_is_that_of_the_reference(kind: str, pairs: Callable[[str], Pair]) -> None:
    """Of some tokens as of all: a step projects the rows that it has."""
    pair = pairs(kind)
    drafter, positions = pair.drafter, torch.arange(4, 9)
    states = [state[4:9] for state in pair.hidden_states]
    tapped = torch.cat([states[tap + 1] for tap in drafter.architecture.taps], dim=-1)
    c, expected = drafter.context(tapped), pair.reference.context(states)
    assert torch.allclose(c, expected, atol=TOLERANCE, rtol=0)
    for layer, (k, v) in enumerate(drafter.context_rows(c, positions.int())):
        for mine, theirs in zip((k, v), pair.reference.keys_values(layer, expected, positions), strict=True):
            assert torch.allclose(mine, theirs, atol=TOLERANCE, rtol=0)


def _turned(a: DFlashArchitecture, by: int) -> tuple[int, ...]:
    return tuple((tap + by) % TARGET_LAYERS for tap in a.taps)


ROW_TRAPS: dict[str, Callable[[DFlashArchitecture], dict[str, object]]] = {
    "tap one layer later": lambda a: {"taps": _turned(a, 1)},
    "tap one layer earlier": lambda a: {"taps": _turned(a, -1)},
    "embedding scaled the other way": lambda a: {"embedding_scale": 1.0 if a.scaled_embedding else HIDDEN**0.5},
    "scores scaled the other way": lambda a: {"attention_scale": a.head_dim**-0.5 if a.attention_scale == 1 else 1.0},
    "rotated by another base": lambda a: {"rope_theta": 10_000.0 if a.rope_theta > 10_000 else 1_000_000.0},
    "rotated in part, or in full": lambda a: {
        "rotary_pairs": a.head_dim // 2 if 2 * a.rotary_pairs < a.head_dim else a.head_dim // 8
    },
    "blocks causal or not": lambda a: {"causal": tuple(not each for each in a.causal)},
    "another mask": lambda a: {"mask_token_id": a.mask_token_id + 1},
    "another activation": lambda a: {"hidden_act": "silu" if a.hidden_act != "silu" else "gelu_pytorch_tanh"},
    "another epsilon": lambda a: {"rms_norm_eps": 1e-2},
}


@pytest.mark.parametrize("trap", ROW_TRAPS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_setting_read_wrongly_shows(kind: str, trap: str, pairs: Callable[[str], Pair]) -> None:
    pair = pairs(kind)
    rows = pair.rows(pair.with_changes(**ROW_TRAPS[trap](pair.drafter.architecture)))
    for slot, block in enumerate(pair.blocks):
        assert float((rows[slot] - block.rows).abs().max()) > 20 * TOLERANCE, slot


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("dflash", "deepspec")])
@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1, None])
def test_a_window_that_begins_elsewhere_shows(kind: str, window: int | None, pairs: Callable[[str], Pair]) -> None:
    """Where the context is longer than it; a drafter without windows ignores none."""
    pair = pairs(kind)
    windows = tuple(each and window for each in pair.drafter.architecture.layer_windows)
    rows, expected = pair.rows(pair.with_changes(layer_windows=windows)), [block.rows for block in pair.blocks]
    assert float((rows[2] - expected[2]).abs().max()) > 20 * TOLERANCE
    assert torch.allclose(rows[0], expected[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_read_from_the_other_anchor_slot_say_other_tokens(kind: str, pairs: Callable[[str], Pair]) -> None:
    pair = pairs(kind)
    changed = pair.with_changes(sample_from_anchor=not pair.drafter.architecture.sample_from_anchor)
    drafted = changed(*_anchors(), pair.attention(changed)).tokens
    assert drafted.shape[1] == changed.architecture.num_drafts != pair.drafter.architecture.num_drafts
    shared = min(changed.architecture.num_drafts, pair.drafter.architecture.num_drafts)
    assert any(drafted[slot].tolist()[:shared] != block.tokens[:shared] for slot, block in enumerate(pair.blocks))


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_an_own_head_names_tokens_of_the_target(kind: str, pairs: Callable[[str], Pair]) -> None:
    """d2t is how far behind its own number a token of the target lies, not that token."""
    pair = pairs(kind)
    head = pair.drafter.head
    assert head.tokens is not None
    right = head.tokens.clone()
    try:
        for wrong in (torch.arange(len(right)), right - torch.arange(len(right))):
            head.tokens.copy_(wrong)
            drafted = pair.drafter(*_anchors(), pair.attention(pair.drafter)).tokens
            assert all(drafted[slot].tolist() != block.tokens for slot, block in enumerate(pair.blocks))
    finally:
        head.tokens.copy_(right)
    assert int(right.max()) < VOCAB


@pytest.mark.parametrize(("kind", "left_out"), [
    ("dspark", "added"), ("deepspec", "added"), ("deepspec", "softcap"), ("dflash2", "candidates")
])  # fmt: skip
def test_a_walk_without_its_parts_shows(kind: str, left_out: str, pairs: Callable[[str], Pair]) -> None:
    """What the token before adds, the cap on what it is added to, or the scores of candidates."""
    pair = pairs(kind)
    changed = pair.with_changes(**{"softcap": None} if left_out == "softcap" else {})
    if changed.markov is not None and left_out == "added":
        changed.markov.added.weight.zero_()
    if changed.selector is not None:
        changed.selector.candidates.zero_()
    drafted = changed(*_anchors(), pair.attention(changed)).tokens
    assert any(drafted[slot].tolist() != block.tokens for slot, block in enumerate(pair.blocks))


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_tokens_are_the_first_ones(kind: str, pairs: Callable[[str], Pair]) -> None:
    pair = pairs(kind)
    whole = pair.drafter(*_anchors(), pair.attention(pair.drafter)).tokens
    for asked in range(1, CONFIGS[kind]["block_size"] - 1):
        assert torch.equal(
            pair.drafter(*_anchors(), pair.attention(pair.drafter), asked=asked).tokens, whole[:, :asked]
        )
