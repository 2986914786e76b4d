"""Mixture of experts: a router that picks top-k experts per token, and experts split over their intermediate width."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from modelserve.architecture import ModelArchitecture
from modelserve.errors import InvalidInput
from modelserve.sizing.weights import EXPERT_WIDTH_MULTIPLE
from modelserve_worker.layers.mlp import gated_gelu
from modelserve_worker.layers.norm import rms_normalize
from modelserve_worker.layers.parallel import TensorParallel


class Router(nn.Module):
    """p = softmax(W (RMS(x) * scale / sqrt(H))); the top k, renormalised to sum 1, times per_expert_scale.

    Everything is float32: a rounded logit would pick other experts than the weights mean.
    """

    def __init__(self, architecture: ModelArchitecture, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = architecture.rms_norm_eps
        self.top_k = architecture.top_k_experts
        self.root_scale = architecture.hidden_size**-0.5
        experts, hidden = architecture.num_experts, architecture.hidden_size
        self.weight = nn.Parameter(torch.empty((experts, hidden), device=device, dtype=dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(hidden, device=device, dtype=dtype), requires_grad=False)
        self.per_expert_scale = nn.Parameter(torch.empty(experts, device=device, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] -> weights float32 [T, k] and expert indices int64 [T, k]."""
        normed = rms_normalize(x, eps=self.eps) * self.scale.float() * self.root_scale
        probabilities = functional.linear(normed, self.weight.float()).softmax(dim=-1)
        weights, experts = probabilities.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights * self.per_expert_scale.float()[experts], experts


class Experts(nn.Module):
    """gate_up [E, 2 * width / size, H] (gate rows first) and down [E, H, width / size].

    Rows are sorted by expert and go through two grouped products; no expert count leaves the device.
    """

    def __init__(
        self, architecture: ModelArchitecture, *, parallel: TensorParallel, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.shard = parallel.shard(architecture.moe_intermediate_size, what="moe_intermediate_size")
        if architecture.hidden_size % EXPERT_WIDTH_MULTIPLE:
            raise InvalidInput(
                f"hidden_size {architecture.hidden_size} is not a multiple of {EXPERT_WIDTH_MULTIPLE}, as experts need"
            )
        experts, hidden = architecture.num_experts, architecture.hidden_size
        self.gate_up = nn.Parameter(
            torch.empty((experts, 2 * self.shard.size, hidden), device=device, dtype=dtype), requires_grad=False
        )
        self.down = nn.Parameter(
            torch.empty((experts, hidden, self.shard.size), device=device, dtype=dtype), requires_grad=False
        )
        self.register_buffer("indices", torch.arange(experts, device=device), persistent=False)
        self.indices: Tensor

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [T, H], weights float32 [T, k], experts int64 [T, k] -> [T, H]."""
        # Expert e owns sorted rows [ends[e-1], ends[e]): none when no token chose it.
        chosen, order = experts.flatten().sort(stable=True)
        ends = torch.searchsorted(chosen, self.indices, right=True).to(torch.int32)
        rows = x[order // experts.shape[1]]
        gate, up = functional.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        expanded = functional.grouped_mm(gated_gelu(gate, up), self.down.transpose(1, 2), offs=ends)
        weighted = torch.empty(expanded.shape, device=x.device, dtype=torch.float32)
        weighted[order] = expanded * weights.flatten()[order].unsqueeze(-1)
        return self.parallel.all_reduce(weighted.view(*experts.shape, -1).sum(dim=1).to(x.dtype))
