"""Mixture of experts: a router that picks top-k experts per token, and experts split over their intermediate width."""

from __future__ import annotations

from torch import Tensor, nn

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.weight_format import TextLinear
from modelserve_worker.kernels.experts.experts import (
    AddedNorms,
    BranchMatrices,
    BranchNorms,
    Choice,
    Routed,
    RouterWeights,
    Shares,
)
from modelserve_worker.layers.mlp import GatedMLP
from modelserve_worker.layers.norm import RMSNorm
from modelserve_worker.layers.placement import Placement
from modelserve_worker.layers.stored.matrix import DenseMatrix
from modelserve_worker.layers.stored.stored_matrix import stored_matrix


class Router(nn.Module):
    """p = softmax(W (RMS(x) * scale / sqrt(H))); the top k, renormalised to sum 1, times per_expert_scale.

    Everything is float32: a rounded logit would pick other experts than the weights mean.
    """

    def __init__(self, architecture: ModelArchitecture, placement: Placement) -> None:
        super().__init__()
        self.backend = placement.operations.experts
        self.eps = architecture.rms_norm_eps
        self.top_k = architecture.top_k_experts
        experts, hidden = architecture.num_experts, architecture.hidden_size
        self.weight = placement.parameter(experts, hidden)
        self.scale = placement.parameter(hidden)
        self.per_expert_scale = placement.parameter(experts)

    @property
    def weights(self) -> RouterWeights:
        return RouterWeights(self.weight, self.scale, self.per_expert_scale, self.top_k)

    def forward(self, x: Tensor, norm: RMSNorm, num_rows: Tensor | None = None) -> Routed:
        """[T, H] -> its `norm`, which experts take, and what each row chooses.

        Rows from `num_rows` (int32 [1], on the device) on only pad the step: they choose no expert.
        """
        return self.backend.route(x, self.weights, norm.weight, eps=self.eps, num_rows=num_rows)


class Experts(nn.Module):
    """gate_up [E, 2 * width / size, H] (gate rows first) and down [E, H, width / size].

    Few rows find their experts' matrices by themselves where the device has kernels for that, and none of them has an
    adapter of experts. Otherwise rows are sorted by expert and go through two grouped products. No shape depends on
    what was chosen, and on a GPU no expert count leaves the device, so that a step can be captured. A CPU reads the
    counts, expert by expert.
    """

    def __init__(self, architecture: ModelArchitecture, placement: Placement) -> None:
        super().__init__()
        operations = placement.operations
        self.backend, self.elementwise = operations.experts, operations.elementwise
        self.few_rows, self.branch_rows = operations.few_expert_rows, operations.branch_rows
        self.parallel, self.adapter_rows = placement.parallel, placement.adapter_rows
        self.shard = self.parallel.shard(architecture.moe_intermediate_size, what="moe_intermediate_size")
        experts, hidden = architecture.num_experts, architecture.hidden_size
        width = self.shard.size
        self.gate_up = stored_matrix(TextLinear.EXPERT_GATE_UP, [width, width], hidden, placement, experts=experts)
        self.down = stored_matrix(TextLinear.EXPERT_DOWN, [hidden], width, placement, experts=experts)

    def forward(self, x: Tensor, choice: Choice) -> Shares | Tensor:
        """x [T, H] -> each slot's results, or on several ranks their weighted sum [T, H]."""
        shares = self._shares(x, choice)
        if self.parallel.size == 1:
            return shares
        return self.parallel.all_reduce(self.backend.weighted_sum(shares))

    def beside(self, x: Tensor, routed: Routed, mlp: GatedMLP) -> tuple[Tensor, Shares]:
        """`mlp` of x [T, H] and each slot's results, of as many rows as `takes_mlp` says."""
        matrices = [self.gate_up, self.down, mlp.gate_up.matrix, mlp.down.matrix]
        assert all(isinstance(each, DenseMatrix) for each in matrices)
        return self.backend.branch_products(x, routed, BranchMatrices(*(each.dense() for each in matrices)))

    def takes_mlp(self, rows: int) -> bool:
        return self.few_rows < rows <= self.branch_rows and self.adapter_rows.current is None

    def _shares(self, x: Tensor, choice: Choice) -> Shares:
        gate_up, down = self.gate_up, self.down
        term = gate_up.expert_term or down.expert_term
        if x.shape[0] <= self.few_rows and (term is None or self.adapter_rows.current is None):
            return Shares(self.backend.chosen_products(x, choice, gate_up.held(), down.held()), choice)
        dealt = self.backend.deal(x, choice, gate_up.experts)
        adapted = None if term is None else term.blocks(choice.experts, dealt.places)
        inner = gate_up.grouped_gated(dealt.rows, dealt.ends, self.elementwise, adapted)
        ends, places = dealt.ends, dealt.places
        del dealt  # its rows are as large as what comes now
        return Shares(down.grouped(inner, ends, adapted), choice, places)


class MixtureOfExperts(nn.Module):
    """The expert branch beside the dense MLP: both read the residual, each has its own norms.

    `route` comes before the dense MLP's products, which need nothing of it: of few rows their matrices stream
    meanwhile, and those of the experts that it chose while the MLP ends. Of more rows, on one rank, the MLP's products
    and the experts' are the same launches, where the device has kernels for that.
    """

    def __init__(self, architecture: ModelArchitecture, placement: Placement) -> None:
        super().__init__()
        self.backend = placement.operations.experts
        self.parallel = placement.parallel
        hidden, eps = architecture.hidden_size, architecture.rms_norm_eps
        self.router = Router(architecture, placement)
        self.experts = Experts(architecture, placement)
        self.pre_norm = RMSNorm(hidden, placement, eps=eps)
        self.post_norm = RMSNorm(hidden, placement, eps=eps)
        self.dense_post_norm = RMSNorm(hidden, placement, eps=eps)

    def route(self, residual: Tensor, num_rows: Tensor | None) -> Routed:
        """Of residual [T, H] what its experts take, and which they are."""
        routed: Routed = self.router(residual, self.pre_norm, num_rows)
        return routed

    def add_and_route(
        self, residual: Tensor, delta: Tensor, delta_norm: RMSNorm, dense_norm: RMSNorm, num_rows: Tensor | None
    ) -> tuple[Tensor, Tensor, Routed]:
        """residual + `delta_norm`(delta), the sum's `dense_norm` and its `route`. One rank's, delta may be in parts."""
        norms = AddedNorms(delta_norm.weight, dense_norm.weight, self.pre_norm.weight)
        weights, eps = self.router.weights, self.router.eps
        return self.backend.add_and_route(residual, delta, norms, weights, eps=eps, num_rows=num_rows)

    def forward(
        self,
        residual: Tensor,
        normed: Tensor,
        routed: Routed,
        mlp: GatedMLP,
        *,
        added_norm: RMSNorm,
        scalar: Tensor | None,
        next_weight: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """`ElementwiseBackend.residual_norm` of the sum of both branches; residual and what `mlp` takes, normed, are
        [T, H], and routed is the residual's `route`."""
        results: Shares | Tensor
        if self.experts.takes_mlp(len(residual)):
            dense, results = self.experts.beside(normed, routed, mlp)
        else:
            dense, _ = mlp(normed)
            dense = self.parallel.all_reduce(dense)
            results = self.experts(routed.normed, routed.choice)
        norms = BranchNorms(self.dense_post_norm.weight, self.post_norm.weight, added_norm.weight)
        return self.backend.add_branches(
            residual,
            dense,
            results,
            norms,
            scalar=scalar,
            next_weight=next_weight,
            eps=added_norm.eps,
        )
