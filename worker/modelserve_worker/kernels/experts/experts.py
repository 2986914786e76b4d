"""A mixture of experts around its grouped products: the interface, and the reference in plain PyTorch.

T rows (tokens) of width H, E experts, k of them chosen by each row. A *slot* is one choice: slot t k + j is row t's
j-th. Rounding is part of the contract: the router is float32 throughout, an expert's results are rounded to the dtype
of its inputs, their weighted sum is float32 and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from modelserve_worker.kernels.elementwise.elementwise import PlainElementwise, rms_normalize
from modelserve_worker.kernels.products.exact_products import PlainExactProducts
from modelserve_worker.kernels.products.row_blocks import grouped_product, plain_product

NO_EXPERT = 1 << 30  # the choice of a row that only pads a step: behind all experts when choices are sorted


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """p = softmax(logits), logits = weight (RMS(x) * scale / sqrt(H)).

    weight [E, H], scale [H] and per_expert_scale [E], all of one dtype; `top_k` experts are chosen.
    """

    weight: Tensor
    scale: Tensor
    per_expert_scale: Tensor
    top_k: int


class Choice(NamedTuple):
    """What each row chose: experts int32 [T, k], or NO_EXPERT, and their weights, float32 [T, k]."""

    weights: Tensor
    experts: Tensor


@dataclass(frozen=True, slots=True)
class Routed:
    """What experts take, normed [T, H], and which each row chose."""

    normed: Tensor
    choice: Choice


@dataclass(frozen=True, slots=True)
class AddedNorms:
    """Norm weights [H]: of a delta that is added to the residual, of the sum for the dense branch, and for experts."""

    delta: Tensor
    dense: Tensor
    experts: Tensor


@dataclass(frozen=True, slots=True)
class DealtRows:
    """Copies of rows, those of one expert beside one another: expert e has rows [ends[e - 1], ends[e]).

    rows [T k, H], undefined from the last end on; ends int32 [E]; places int32 [T, k]: the row of each slot, undefined
    for those that chose no expert.
    """

    rows: Tensor
    ends: Tensor
    places: Tensor


@dataclass(frozen=True, slots=True)
class Shares:
    """Results of experts that wait for their weighted sum: [T k, H], slot by slot, or with `places` where those say."""

    results: Tensor
    choice: Choice
    places: Tensor | None = None


@dataclass(frozen=True, slots=True)
class BranchNorms:
    """Norm weights [H] of the dense branch, of the experts' branch, and of the sum of both."""

    dense: Tensor
    routed: Tensor
    added: Tensor


@dataclass(frozen=True, slots=True)
class BranchMatrices:
    """Experts' gate_up [E, 2 I, H], gates first, and down [E, H, I]; the dense MLP's [2 D, H] and [H, D]."""

    gate_up: Tensor
    down: Tensor
    dense_gate_up: Tensor
    dense_down: Tensor


class ExpertBackend(Protocol):
    """What surrounds the products of a mixture of experts, and the products of few rows, on one kind of device."""

    def route(
        self, x: Tensor, router: RouterWeights, norm_weight: Tensor, *, eps: float, num_rows: Tensor | None
    ) -> Routed:
        """RMS_norm_weight(x), and what the rows of x [T, H] choose: the k largest logits, among equals the lower index.

        Weights are p over the sum of the row's k, times per_expert_scale. Rows from `num_rows` (int32 [1], on the
        device) on only pad the step and choose no expert.
        """
        ...

    def add_and_route(
        self,
        residual: Tensor,
        delta: Tensor,
        norms: AddedNorms,
        router: RouterWeights,
        *,
        eps: float,
        num_rows: Tensor | None,
    ) -> tuple[Tensor, Tensor, Routed]:
        """`ElementwiseBackend.residual_norm` for the dense branch, without a scalar, and `route` of the sum."""
        ...

    def chosen_products(self, x: Tensor, choice: Choice, gate_up: Any, down: Any) -> Tensor:
        """down_e (gelu(gate_e x) * up_e x) for each slot: x [T, H] -> [T k, H]; undefined where no expert was chosen.

        gate_up [E, 2 I, H], gates first, and down [E, H, I], all contiguous, or as kernels hold them that the table of
        kernels has for so many rows.
        """
        ...

    def deal(self, x: Tensor, choice: Choice, experts: int) -> DealtRows:
        """Copies of x [T, H] for grouped products. Nothing waits for the host, no shape depends on what was chosen."""
        ...

    def branch_products(self, x: Tensor, routed: Routed, matrices: BranchMatrices) -> tuple[Tensor, Shares]:
        """Both branches in the same launches: the dense MLP's output of x [T, H], and each slot's results."""
        ...

    def weighted_sum(self, shares: Shares) -> Tensor:
        """[T, H]: the sum of each row's results times their weights; zeros for a row that chose no expert."""
        ...

    def add_branches(
        self,
        residual: Tensor,
        dense: Tensor,
        routed: Shares | Tensor,
        norms: BranchNorms,
        *,
        scalar: Tensor | None,
        next_weight: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor | None]:
        """`ElementwiseBackend.residual_norm` of delta = RMS_dense(dense) + RMS_routed(sum), with norms.added.

        All [T, H] and contiguous; sum is `routed`, or its weighted sum. The caller gives `residual` up.
        """
        ...


class PlainExperts:
    """The operations in plain PyTorch, on any device: what the kernels are compared with, and what a CPU runs."""

    def __init__(self) -> None:
        self._elementwise = PlainElementwise()

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return plain_product(x, weight)

    def _sum(self, weighted: Tensor) -> Tensor:
        """[T, k, H] -> [T, H]."""
        return weighted.sum(dim=1)

    def route(
        self, x: Tensor, router: RouterWeights, norm_weight: Tensor, *, eps: float, num_rows: Tensor | None
    ) -> Routed:
        scaled = rms_normalize(x, eps=eps) * router.scale.float() * x.shape[1] ** -0.5
        logits = self._product(scaled, router.weight.float())
        # A stable sort, because topk says nothing about equals. The shares of the chosen are a softmax of their own.
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        weights, experts = ordered[:, : router.top_k].softmax(dim=-1), order[:, : router.top_k]
        weights = weights * router.per_expert_scale.float()[experts]
        if num_rows is not None:
            padding = torch.arange(x.shape[0], device=x.device) >= num_rows
            experts = experts.masked_fill(padding.unsqueeze(-1), NO_EXPERT)
        return Routed(self._elementwise.rms_norm(x, norm_weight, eps=eps), Choice(weights, experts.to(torch.int32)))

    def add_and_route(
        self,
        residual: Tensor,
        delta: Tensor,
        norms: AddedNorms,
        router: RouterWeights,
        *,
        eps: float,
        num_rows: Tensor | None,
    ) -> tuple[Tensor, Tensor, Routed]:
        summed, normed = self._elementwise.residual_norm(
            residual, delta, norms.delta, scalar=None, next_weight=norms.dense, eps=eps
        )
        assert normed is not None
        return summed, normed, self.route(summed, router, norms.experts, eps=eps, num_rows=num_rows)

    def chosen_products(self, x: Tensor, choice: Choice, gate_up: Tensor, down: Tensor) -> Tensor:
        experts = choice.experts.clamp(max=gate_up.shape[0] - 1).long()
        inner = torch.einsum("th,tkih->tki", x, gate_up[experts])
        gated = self._elementwise.gated_gelu(inner)
        return torch.einsum("tki,tkhi->tkh", gated, down[experts]).flatten(0, 1)

    def deal(self, x: Tensor, choice: Choice, experts: int) -> DealtRows:
        chosen, order = choice.experts.flatten().sort(stable=True)
        indices = torch.arange(experts, device=x.device, dtype=torch.int32)
        ends = torch.searchsorted(chosen, indices, right=True).to(torch.int32)
        places = torch.empty_like(order, dtype=torch.int32)
        places[order] = torch.arange(order.shape[0], device=x.device, dtype=torch.int32)
        return DealtRows(x[order // choice.experts.shape[1]], ends, places.view(choice.experts.shape))

    def branch_products(self, x: Tensor, routed: Routed, matrices: BranchMatrices) -> tuple[Tensor, Shares]:
        gated = self._elementwise.gated_gelu
        dealt = self.deal(routed.normed, routed.choice, len(matrices.gate_up))
        inner = gated(grouped_product(dealt.rows, matrices.gate_up, dealt.ends))
        results = grouped_product(inner, matrices.down, dealt.ends)
        dense = self._product(gated(self._product(x, matrices.dense_gate_up)), matrices.dense_down)
        return dense, Shares(results, routed.choice, dealt.places)

    def weighted_sum(self, shares: Shares) -> Tensor:
        weights, experts = shares.choice.weights, shares.choice.experts
        results = shares.results if shares.places is None else shares.results[shares.places.flatten()]
        # What products leave in rows of no expert is undefined and must not reach the sum.
        nothing = (experts == NO_EXPERT).unsqueeze(-1)
        weighted = (results.view(*weights.shape, -1) * weights.unsqueeze(-1)).masked_fill(nothing, 0.0)
        return self._sum(weighted).to(results.dtype)

    def add_branches(
        self,
        residual: Tensor,
        dense: Tensor,
        routed: Shares | Tensor,
        norms: BranchNorms,
        *,
        scalar: Tensor | None,
        next_weight: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor | None]:
        summed = self.weighted_sum(routed) if isinstance(routed, Shares) else routed
        norm = self._elementwise.rms_norm
        delta = norm(dense, norms.dense, eps=eps) + norm(summed, norms.routed, eps=eps)
        return self._elementwise.residual_norm(
            residual, delta, norms.added, scalar=scalar, next_weight=next_weight, eps=eps
        )


class ExactExperts(PlainExperts):
    """With the same bits for a row whatever rows lie beside it."""

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return PlainExactProducts().dense(x, weight)

    def _sum(self, weighted: Tensor) -> Tensor:
        total = weighted[:, 0]
        for slot in range(1, weighted.shape[1]):  # in this order, however many rows there are
            total = total + weighted[:, slot]
        return total
