"""Token embeddings split over the vocabulary, the output head on the same split, and per-layer embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.weight_format import TextLinear
from modelserve_worker.layers.linear import ReplicatedLinear
from modelserve_worker.layers.norm import RMSNorm
from modelserve_worker.layers.placement import Placement


class VocabParallelEmbedding(nn.Module):
    """Rows [vocab / size, width] of a table; lookups of other ranks' rows come through an all-reduce.

    Rows are multiplied by sqrt(`scale_of`), rounded to the table's dtype first, as Gemma was trained.
    """

    def __init__(self, vocab_size: int, width: int, placement: Placement, *, scale_of: int, what: str) -> None:
        super().__init__()
        self.elementwise = placement.operations.elementwise
        self.parallel = placement.parallel
        self.shard = self.parallel.shard(vocab_size, what=what)
        self.scale = torch.tensor(scale_of**0.5).to(placement.dtype).item()
        self.weight = placement.parameter(self.shard.size, width)

    def forward(self, input_ids: Tensor, *, scale: float | None = None) -> Tensor:
        """int32 or int64 [T] -> [T, width], times `scale` where one is given. An id outside the vocabulary gives
        zeros."""
        # Ids of other ranks' rows lie outside this one's, and give zeros.
        local = input_ids - self.shard.start if self.shard.start else input_ids
        scale = self.scale if scale is None else scale
        return self.parallel.all_reduce(self.elementwise.embed(local, self.weight, scale=scale))


class OutputHead(nn.Module):
    """Untied output projection, [vocab / size, hidden]; tied models use the embedding's weight instead."""

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        super().__init__()
        self.shard = placement.parallel.shard(vocab_size, what="vocab_size")
        self.weight = placement.parameter(self.shard.size, hidden_size)


class PerLayerEmbedding(nn.Module):
    """What each layer of a PLE model adds about the token itself (as transformers 5.x computes it).

    ple = (RMS_w(W_proj x0 / sqrt(H)) + E_ple[id] sqrt(P)) / sqrt(2), with P = hidden_size_per_layer_input.
    The table is split over its vocabulary; the projection, a few tens of MB, is held whole.
    """

    def __init__(self, architecture: ModelArchitecture, placement: Placement) -> None:
        super().__init__()
        self.elementwise = placement.operations.elementwise
        self.layers = architecture.num_hidden_layers
        self.width = architecture.hidden_size_per_layer_input
        self.projection_scale = architecture.hidden_size**-0.5
        self.table = VocabParallelEmbedding(
            architecture.vocab_size_per_layer_input, self.layers * self.width, placement, scale_of=self.width,
            what="vocab_size_per_layer_input",
        )  # fmt: skip
        self.projection = ReplicatedLinear(
            TextLinear.MODEL_PROJECTION, architecture.hidden_size, self.layers * self.width, placement
        )
        self.norm = RMSNorm(self.width, placement, eps=architecture.rms_norm_eps)

    def forward(self, input_ids: Tensor, embedded: Tensor) -> Tensor:
        """int32 or int64 [T] and scaled token embeddings [T, H] -> [T, layers, P]."""
        return self.elementwise.per_layer_inputs(
            self.projection(embedded),
            self.table(input_ids),
            self.norm.weight,
            projection_scale=self.projection_scale,
            eps=self.norm.eps,
        )
