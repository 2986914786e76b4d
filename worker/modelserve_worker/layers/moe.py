"""Mixture of experts: a router that picks top-k experts per token, and experts split over their intermediate width."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from modelserve.architecture import ModelArchitecture
from modelserve.errors import InvalidInput
from modelserve.sizing.weights import EXPERT_WIDTH_MULTIPLE
from modelserve.weight_format import TextLinear, WeightFormat
from modelserve_worker.kernels.elementwise import ElementwiseDoors, rms_normalize
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.layers.stored_matrix import stored_matrix


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

    def forward(self, x: Tensor, num_rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[T, H] -> weights float32 [T, k] and expert indices int64 [T, k].

        Rows from `num_rows` (int32 [1], on the device) on only pad the step: they choose no expert, which is index E.
        """
        normed = rms_normalize(x, eps=self.eps) * self.scale.float() * self.root_scale
        probabilities = functional.linear(normed, self.weight.float()).softmax(dim=-1)
        weights, experts = probabilities.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights * self.per_expert_scale.float()[experts]
        if num_rows is not None:
            padding = torch.arange(x.shape[0], device=x.device) >= num_rows
            experts = experts.masked_fill(padding.unsqueeze(-1), self.weight.shape[0])
        return weights, experts


class Experts(nn.Module):
    """gate_up [E, 2 * width / size, H] (gate rows first) and down [E, H, width / size].

    Rows are sorted by expert and go through two grouped products. No shape depends on what was chosen, and no expert
    count leaves the device where PyTorch has a grouped product of its own (bfloat16 from compute capability 9.0): there
    a step can be captured, and wherever our own kernels multiply by quantised experts. Elsewhere PyTorch reads the
    counts on the host, expert by expert.
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
        self.parallel = parallel
        self.shard = parallel.shard(architecture.moe_intermediate_size, what="moe_intermediate_size")
        if architecture.hidden_size % EXPERT_WIDTH_MULTIPLE:
            raise InvalidInput(
                f"hidden_size {architecture.hidden_size} is not a multiple of {EXPERT_WIDTH_MULTIPLE}, as experts need"
            )
        experts, hidden = architecture.num_experts, architecture.hidden_size
        width = self.shard.size
        self.gate_up = stored_matrix(
            TextLinear.EXPERT_GATE_UP,
            [width, width],
            hidden,
            weight_format=weight_format,
            experts=experts,
            device=device,
            dtype=dtype,
        )
        self.down = stored_matrix(
            TextLinear.EXPERT_DOWN,
            [hidden],
            width,
            weight_format=weight_format,
            experts=experts,
            device=device,
            dtype=dtype,
        )
        self.register_buffer("indices", torch.arange(experts, device=device), persistent=False)
        self.indices: Tensor

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [T, H], weights float32 [T, k], experts int64 [T, k] -> [T, H]; zeros for rows that chose index E."""
        # Expert e owns sorted rows [ends[e-1], ends[e]): none when no token chose it. Rows of index E come last, in no
        # expert's share: what the grouped products leave there is undefined and must not reach the sum.
        chosen, order = experts.flatten().sort(stable=True)
        ends = torch.searchsorted(chosen, self.indices, right=True).to(torch.int32)
        rows = x[order // experts.shape[1]]
        inner = self.doors.gated_gelu(self.gate_up.grouped(rows, ends))
        expanded = self.down.grouped(inner, ends)
        weighted = torch.empty(expanded.shape, device=x.device, dtype=torch.float32)
        shares = expanded * weights.flatten()[order].unsqueeze(-1)
        weighted[order] = shares.masked_fill((chosen == len(self.indices)).unsqueeze(-1), 0.0)
        return self.parallel.all_reduce(weighted.view(*experts.shape, -1).sum(dim=1).to(x.dtype))
