"""The Gemma 4 text decoder, every variant: dense, K = V on global layers, per-layer embeddings with KV sharing, MoE.

The model computes projections, norms and rotations of the step's tokens; what a token attends to is decided by the
AttentionBackend handed to `forward`. Rounding follows the reference implementation: norms in float32, cos and sin cast
to the activations' dtype, the embedding's scale rounded to the weights' dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from modelserve.architecture import LayerKind, ModelArchitecture
from modelserve.errors import InvalidInput
from modelserve.sizing.weights import tensor_parallel_problem
from modelserve_worker.layers.attention import Attention, AttentionBackend
from modelserve_worker.layers.embedding import OutputHead, PerLayerEmbedding, VocabParallelEmbedding
from modelserve_worker.layers.linear import ReplicatedLinear
from modelserve_worker.layers.mlp import GatedMLP
from modelserve_worker.layers.moe import Experts, Router
from modelserve_worker.layers.norm import RMSNorm
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.layers.rotary import RotaryEmbedding


class MixtureOfExperts(nn.Module):
    """The expert branch beside the dense MLP: both read the residual, each has its own norms."""

    def __init__(
        self, architecture: ModelArchitecture, *, parallel: TensorParallel, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        hidden, eps = architecture.hidden_size, architecture.rms_norm_eps
        self.router = Router(architecture, device=device, dtype=dtype)
        self.experts = Experts(architecture, parallel=parallel, device=device, dtype=dtype)
        self.pre_norm = RMSNorm(hidden, eps=eps, device=device, dtype=dtype)
        self.post_norm = RMSNorm(hidden, eps=eps, device=device, dtype=dtype)
        self.dense_post_norm = RMSNorm(hidden, eps=eps, device=device, dtype=dtype)

    def forward(self, residual: Tensor, dense: Tensor) -> Tensor:
        """residual and the dense MLP's output, both [T, H] -> their sum after the branch norms, [T, H]."""
        weights, experts = self.router(residual)
        routed: Tensor = self.post_norm(self.experts(self.pre_norm(residual), weights, experts))
        normed: Tensor = self.dense_post_norm(dense)
        return normed + routed


class PerLayerInput(nn.Module):
    """A PLE layer's last step: x + RMS_w(W_p(gelu(W_g x) * ple))."""

    def __init__(self, architecture: ModelArchitecture, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, width = architecture.hidden_size, architecture.hidden_size_per_layer_input
        self.gate = ReplicatedLinear(hidden, width, device=device, dtype=dtype)
        self.projection = ReplicatedLinear(width, hidden, device=device, dtype=dtype)
        self.norm = RMSNorm(hidden, eps=architecture.rms_norm_eps, device=device, dtype=dtype)

    def forward(self, x: Tensor, per_layer: Tensor) -> Tensor:
        """x [T, H], per_layer [T, P] -> [T, H]."""
        added: Tensor = self.norm(self.projection(functional.gelu(self.gate(x), approximate="tanh") * per_layer))
        return x + added


class DecoderLayer(nn.Module):
    """Attention, feed-forward, the per-layer input where the model has one, then the layer's scalar."""

    def __init__(
        self,
        architecture: ModelArchitecture,
        *,
        layer: int,
        parallel: TensorParallel,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.kind = architecture.kind(layer)
        hidden, eps = architecture.hidden_size, architecture.rms_norm_eps
        self.attention = Attention(architecture, layer=layer, parallel=parallel, device=device, dtype=dtype)
        width = architecture.layer_intermediate_size(layer)
        self.mlp = GatedMLP(hidden, width, parallel=parallel, device=device, dtype=dtype)
        self.input_norm = RMSNorm(hidden, eps=eps, device=device, dtype=dtype)
        self.post_attention_norm = RMSNorm(hidden, eps=eps, device=device, dtype=dtype)
        self.pre_feedforward_norm = RMSNorm(hidden, eps=eps, device=device, dtype=dtype)
        self.post_feedforward_norm = RMSNorm(hidden, eps=eps, device=device, dtype=dtype)
        self.moe = (
            MixtureOfExperts(architecture, parallel=parallel, device=device, dtype=dtype)
            if architecture.num_experts
            else None
        )
        self.per_layer_input = (
            PerLayerInput(architecture, device=device, dtype=dtype)
            if architecture.hidden_size_per_layer_input
            else None
        )
        self.scalar = nn.Parameter(torch.empty(1, device=device, dtype=dtype), requires_grad=False)

    def forward(
        self, x: Tensor, *, rotation: tuple[Tensor, Tensor], per_layer: Tensor | None, attention: AttentionBackend
    ) -> Tensor:
        """x [T, H]; per_layer [T, P] on PLE models. Returns [T, H]."""
        x = x + self.post_attention_norm(self.attention(self.input_norm(x), rotation, attention))
        fed = self.mlp(self.pre_feedforward_norm(x))
        if self.moe is not None:
            fed = self.moe(x, fed)
        x = x + self.post_feedforward_norm(fed)
        if self.per_layer_input is not None:
            x = self.per_layer_input(x, per_layer)
        return x * self.scalar


class Gemma4ForCausalLM(nn.Module):
    """One rank's share of the decoder. Parameters are allocated, not initialised: a loader fills them.

    Raises InvalidInput when the tensor-parallel size does not fit the geometry.
    """

    def __init__(
        self,
        architecture: ModelArchitecture,
        *,
        parallel: TensorParallel,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        if problem := tensor_parallel_problem(architecture, parallel.size):
            raise InvalidInput(problem, field="tensorParallelSize")
        vocab, hidden = architecture.vocab_size, architecture.hidden_size
        if architecture.hidden_size_per_layer_input and architecture.vocab_size_per_layer_input < vocab:
            raise InvalidInput(
                f"vocab_size_per_layer_input {architecture.vocab_size_per_layer_input} is below vocab_size {vocab}: "
                "some tokens would have no per-layer embedding"
            )
        self.architecture = architecture
        self.parallel = parallel
        self.dtype = dtype
        self.rope = RotaryEmbedding(architecture, device=device)
        self.embedding = VocabParallelEmbedding(
            vocab, hidden, scale_of=hidden, what="vocab_size", parallel=parallel, device=device, dtype=dtype
        )
        self.per_layer_embedding = (
            PerLayerEmbedding(architecture, parallel=parallel, device=device, dtype=dtype)
            if architecture.hidden_size_per_layer_input
            else None
        )
        self.layers = nn.ModuleList(
            DecoderLayer(architecture, layer=layer, parallel=parallel, device=device, dtype=dtype)
            for layer in range(architecture.num_hidden_layers)
        )
        self.norm = RMSNorm(hidden, eps=architecture.rms_norm_eps, device=device, dtype=dtype)
        self.head = (
            None
            if architecture.tie_word_embeddings
            else OutputHead(vocab, hidden, parallel=parallel, device=device, dtype=dtype)
        )

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """input_ids and positions int64 [T], requests back to back -> hidden [T, H] after the final norm."""
        x = self.embedding(input_ids)
        per_layer = None if self.per_layer_embedding is None else self.per_layer_embedding(input_ids, x)
        rotations = {kind: self._rotation(kind, positions) for kind in LayerKind}
        for index, layer in enumerate(self.decoder_layers()):
            x = layer(
                x,
                rotation=rotations[layer.kind],
                per_layer=None if per_layer is None else per_layer[:, index],
                attention=attention,
            )
        normed: Tensor = self.norm(x)
        return normed

    @torch.no_grad()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] after the final norm -> float32 [N, vocab], softcapped (c * tanh(z / c)), on every rank."""
        weight = self.embedding.weight if self.head is None else self.head.weight
        logits = self.parallel.all_gather(functional.linear(hidden, weight)).float()
        cap = self.architecture.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def k_norm_weight(self, layer: int) -> Tensor:
        """Weight [D] that normed the keys which `layer` reads (its producer's, on a KV-shared layer)."""
        norm = self.decoder_layer(self.architecture.producer(layer)).attention.k_norm
        assert norm is not None  # a producer owns its cache
        return norm.weight

    def decoder_layer(self, layer: int) -> DecoderLayer:
        module = self.layers[layer]
        assert isinstance(module, DecoderLayer)
        return module

    def decoder_layers(self) -> list[DecoderLayer]:
        return [self.decoder_layer(layer) for layer in range(len(self.layers))]

    def parameter_bytes(self) -> int:
        """Bytes of this rank's weights."""
        return sum(p.numel() * p.element_size() for p in self.parameters())

    def _rotation(self, kind: LayerKind, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.rope.cos_sin(kind, positions)
        return cos.to(self.dtype), sin.to(self.dtype)
