"""Each fault changes the engine's paged path exactly as it says: attention by the definition, damaged alike, agrees."""

from __future__ import annotations

import pytest
import torch
from dense_attention import DenseAttention, DerivedKeyAttention, dense_logits
from mutations import MUTATIONS, Mutation
from rendering import Rendered
from teacher_forcing import EngineLogits
from torch import Tensor
from untrained import SMALL, write_untrained

from modelserve.model.architecture import LayerKind
from modelserve_worker.layers import attention as attention_layer
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM

CPU = torch.device("cpu")
LENGTH, ANSWER, WINDOW, PAGE = 150, 40, SMALL["sliding_window"], 32
TOLERANCE = 1e-4


class EarlyDrop(DenseAttention):
    """Queries whose window begins inside a page see nothing of that page."""

    def attend_heads(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        if self.architecture.kind(layer) is LayerKind.GLOBAL:
            return super().attend_heads(layer, q, k, v)
        outputs = []
        for position in range(q.shape[0]):
            oldest = max(0, position - WINDOW + 1)
            self.window = position + 1 - -(-oldest // PAGE) * PAGE
            outputs.append(super().attend_heads(layer, q, k, v)[position])
        return torch.stack(outputs)


class WithoutNorm(DerivedKeyAttention):
    def k_norm_weight(self, layer: int) -> Tensor:
        return torch.ones_like(super().k_norm_weight(layer))


class AdjacentPairs(DerivedKeyAttention):
    """Undoes the right rotation of global queries and keys, and turns pairs (i, i + P) instead."""

    def attend_heads(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        return super().attend_heads(layer, self.turned(q) if self.is_global(layer) else q, k, v)

    def keys(self, layer: int, k: Tensor, v: Tensor) -> Tensor:
        right = super().keys(layer, k, v)
        return self.turned(right) if self.is_global(layer) else right

    def is_global(self, layer: int) -> bool:
        return self.architecture.kind(layer) is LayerKind.GLOBAL

    def turned(self, x: Tensor) -> Tensor:
        cos, sin = self.model.rope.cos_sin(LayerKind.GLOBAL, torch.arange(x.shape[0]))
        flat = attention_layer.rotate(x, cos, -sin)
        pairs = self.architecture.global_rotary_pairs
        out = flat.clone()
        for i in range(pairs):
            c, s = cos[:, None, i], sin[:, None, i]
            out[..., i] = flat[..., i] * c - flat[..., i + pairs] * s
            out[..., i + pairs] = flat[..., i + pairs] * c + flat[..., i] * s
        return out


def damaged_alike(mutation: Mutation, model: Gemma4ForCausalLM) -> DenseAttention:
    return {
        "window one row shorter": lambda: DenseAttention(model.architecture, window=WINDOW - 1),
        "window one row longer": lambda: DenseAttention(model.architecture, window=WINDOW + 1),
        "RoPE pairs (i, i + 64) on global layers": lambda: AdjacentPairs(model),
        "oldest sliding page dropped early": lambda: EarlyDrop(model.architecture),
        "global K from V without k_norm": lambda: WithoutNorm(model),
    }[mutation.name]()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineLogits:
    directory = tmp_path_factory.mktemp("keqv")
    write_untrained(directory, "gemma4-tiny-keqv")
    return EngineLogits(directory, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("chunk", [33, 512])
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_does_what_it_says_and_leaves_no_trace(mutation: Mutation, chunk: int, engine: EngineLogits) -> None:
    ids = torch.randint(3, 2048, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()
    asked = Rendered(tuple(ids), ((LENGTH - ANSWER, LENGTH),))
    engine.chunk = chunk
    with mutation.applied(engine.model):
        (damaged,) = engine([asked])
    (intact,) = engine([asked])
    rows = slice(LENGTH - ANSWER - 1, LENGTH - 1)
    expected = dense_logits(engine.model, ids, damaged_alike(mutation, engine.model))[rows]
    assert float((damaged - expected).abs().max()) <= TOLERANCE
    assert float((intact - dense_logits(engine.model, ids)[rows]).abs().max()) <= TOLERANCE
    assert float((damaged - intact).abs().max()) > 100 * TOLERANCE


def test_the_window_is_right_again_after_a_failure(engine: EngineLogits) -> None:
    with pytest.raises(KeyError), MUTATIONS[0].applied(engine.model):
        raise KeyError
    assert engine.model.architecture.sliding_window == WINDOW
