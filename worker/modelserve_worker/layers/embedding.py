"""Token embeddings split over the vocabulary, the output head on the same split, and per-layer embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from modelserve.architecture import ModelArchitecture
from modelserve.weight_format import TextLinear, WeightFormat
from modelserve_worker.kernels.elementwise import ElementwiseDoors
from modelserve_worker.layers.linear import ReplicatedLinear
from modelserve_worker.layers.norm import RMSNorm
from modelserve_worker.layers.parallel import TensorParallel


class VocabParallelEmbedding(nn.Module):
    """Rows [vocab / size, width] of a table; lookups of other ranks' rows come through an all-reduce.

    Rows are multiplied by sqrt(`scale_of`), rounded to the table's dtype first, as Gemma was trained.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        *,
        scale_of: int,
        what: str,
        doors: ElementwiseDoors,
        parallel: TensorParallel,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.doors = doors
        self.parallel = parallel
        self.shard = parallel.shard(vocab_size, what=what)
        self.scale = torch.tensor(scale_of**0.5).to(dtype).item()
        self.weight = nn.Parameter(
            torch.empty((self.shard.size, width), device=device, dtype=dtype), requires_grad=False
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        """int32 or int64 [T] -> [T, width]. An id outside the vocabulary gives zeros."""
        # Ids of other ranks' rows lie outside this one's, and give zeros.
        local = input_ids - self.shard.start if self.shard.start else input_ids
        return self.parallel.all_reduce(self.doors.embed(local, self.weight, scale=self.scale))


class OutputHead(nn.Module):
    """Untied output projection, [vocab / size, hidden]; tied models use the embedding's weight instead."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, parallel: TensorParallel, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.shard = parallel.shard(vocab_size, what="vocab_size")
        self.weight = nn.Parameter(
            torch.empty((self.shard.size, hidden_size), device=device, dtype=dtype), requires_grad=False
        )


class PerLayerEmbedding(nn.Module):
    """What each layer of a PLE model adds about the token itself (as transformers 5.x computes it).

    ple = (RMS_w(W_proj x0 / sqrt(H)) + E_ple[id] sqrt(P)) / sqrt(2), with P = hidden_size_per_layer_input.
    The table is split over its vocabulary; the projection, a few tens of MB, is held whole.
    """

    def __init__(
        self,
        architecture: ModelArchitecture,
        *,
        doors: ElementwiseDoors,
        parallel: TensorParallel,
        weight_format: WeightFormat | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.doors = doors
        self.layers = architecture.num_hidden_layers
        self.width = architecture.hidden_size_per_layer_input
        self.projection_scale = architecture.hidden_size**-0.5
        self.table = VocabParallelEmbedding(
            architecture.vocab_size_per_layer_input,
            self.layers * self.width,
            scale_of=self.width,
            what="vocab_size_per_layer_input",
            doors=doors,
            parallel=parallel,
            device=device,
            dtype=dtype,
        )
        self.projection = ReplicatedLinear(
            TextLinear.MODEL_PROJECTION,
            architecture.hidden_size,
            self.layers * self.width,
            weight_format=weight_format,
            device=device,
            dtype=dtype,
        )
        self.norm = RMSNorm(self.width, eps=architecture.rms_norm_eps, device=device, dtype=dtype)

    def forward(self, input_ids: Tensor, embedded: Tensor) -> Tensor:
        """int32 or int64 [T] and scaled token embeddings [T, H] -> [T, layers, P]."""
        return self.doors.per_layer_inputs(
            self.projection(embedded),
            self.table(input_ids),
            self.norm.weight,
            projection_scale=self.projection_scale,
            eps=self.norm.eps,
        )


class PerLayerInput(nn.Module):
    """What a PLE layer adds last, before its norm: W_p(gelu(W_g x) * ple)."""

    def __init__(
        self,
        architecture: ModelArchitecture,
        *,
        doors: ElementwiseDoors,
        weight_format: WeightFormat | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.doors = doors
        hidden, width = architecture.hidden_size, architecture.hidden_size_per_layer_input
        self.gate = ReplicatedLinear(
            TextLinear.LAYER_INPUT_GATE, hidden, width, weight_format=weight_format, device=device, dtype=dtype
        )
        self.projection = ReplicatedLinear(
            TextLinear.LAYER_PROJECTION, width, hidden, weight_format=weight_format, device=device, dtype=dtype
        )
        self.norm = RMSNorm(hidden, eps=architecture.rms_norm_eps, device=device, dtype=dtype)

    def forward(self, x: Tensor, per_layer: Tensor) -> Tensor:
        """x [T, H], per_layer [T, P] -> [T, H], to be normed with `norm` and added to x."""
        added: Tensor = self.projection(self.doors.per_layer_gate(self.gate(x), per_layer))
        return added
