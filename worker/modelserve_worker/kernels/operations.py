"""The operations of one rank: what its table of kernels names, bound to its device.

A kernel's module is imported where a table names it, and nowhere else: Triton and the GPU's driver are on GPUs alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from modelserve.model.drafters.reading import DrafterArchitecture
from modelserve.model.weight_format import StoredType
from modelserve.sizing.backends.resolve import with_drafter
from modelserve.sizing.backends.table import Backend, Choice, KernelTable, Operation, Subject
from modelserve_worker.kernels.adapters.expert_terms import ExpertTerms, PlainExpertTerms
from modelserve_worker.kernels.adapters.terms import AdapterTerms, PlainTerms
from modelserve_worker.kernels.elementwise.elementwise import ElementwiseBackend, ExactElementwise, PlainElementwise
from modelserve_worker.kernels.experts.experts import ExactExperts, ExpertBackend, PlainExperts
from modelserve_worker.kernels.products.exact_products import PlainExactProducts
from modelserve_worker.kernels.products.linear_tiles import SharedBuffers, exact_tile
from modelserve_worker.kernels.products.row_blocks import PLAIN_PRODUCTS, ElementProducts
from modelserve_worker.kernels.sampling.prompt_lookup import LookupBackend, PlainLookup
from modelserve_worker.kernels.sampling.sampling import PlainSampling, SamplingBackend
from modelserve_worker.kernels.step_start import PlainStep, StepBackend

NO_KERNELS = KernelTable(capability=None, profile="fast", on_kernels=False, choices=())


@dataclass(frozen=True, slots=True)
class Product:
    """What multiplies by a matrix. `multiply` (x, held) -> x times the transposed matrix, None: by the matrix's
    elements, `MatrixProducts.elements`; it takes `gated` and `split` too, as `linear_rows_sm90` says, where the choice
    has such ends.

    Of experts (x, held, ends), grouped, of rows sorted by expert: rows [ends[e - 1], ends[e]) of x [R, K] times the
    matrix of expert e -> [R, N], ends int32 [E], which never leave the device. Rows from ends[E - 1] on are undefined;
    where the choice has that end it takes `gated`.
    """

    choice: Choice
    multiply: Callable[..., Tensor] | None


class MatrixProducts:
    """The products of one matrix, rising by the rows that they take; of a matrix on plain PyTorch there is none.
    `elements` multiply where a product does not, or there is none."""

    def __init__(self, products: tuple[Product, ...] = (), elements: ElementProducts = PLAIN_PRODUCTS) -> None:
        self._products = products
        self.elements = elements

    def of(self, rows: int) -> Product | None:
        return next((product for product in self._products if product.choice.takes(rows)), None)

    def dense(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, K] times the transposed weight [N, K], both in the compute dtype -> [T, N]."""
        product = self.of(x.shape[0])
        if product is None or product.multiply is None or not x.shape[0]:
            return self.elements.dense(x, weight)
        return product.multiply(x, weight)

    @property
    def on_kernels(self) -> bool:
        """Whether kernels multiply any number of rows, so that a quantised matrix may take the order of theirs."""
        return bool(self._products) and self._products[-1].multiply is not None


class Operations:
    """Backends of elementwise arithmetic, of adapters' terms, of a step's ends, of sampling, of prompt
    lookup and of experts, and products by matrices."""

    def __init__(self, table: KernelTable, device: torch.device) -> None:
        self.table = table
        self._device = device
        self.shared = SharedBuffers(device)

    def drafting(self, drafter: DrafterArchitecture, *, ranks: int) -> Operations:
        """With the products of a drafter on the same device, which share what these share."""
        drafting = Operations(with_drafter(self.table, drafter, ranks=ranks), self._device)
        drafting.shared = self.shared
        return drafting

    @property
    def exact(self) -> bool:
        """Whether a row has the same bits whatever rows lie beside it."""
        return self.table.profile == "exact"

    @cached_property
    def elements(self) -> ElementProducts:
        """Products by the elements of matrices that no kernel of a format multiplies by."""
        if not self.table.on_kernels:
            return PlainExactProducts() if self.exact else PLAIN_PRODUCTS
        of_experts = (each for each in self.table.choices if each.operation is Operation.GROUPED)
        grouped = any(each.backend is Backend.TRITON and not each.launch for each in of_experts)
        if not self.exact and not grouped:
            return PLAIN_PRODUCTS
        from modelserve_worker.kernels.products.exact_products_triton import TritonExactProducts, TritonGroupedProducts

        return TritonExactProducts() if self.exact else TritonGroupedProducts()

    @cached_property
    def elementwise(self) -> ElementwiseBackend:
        if not self._in_triton(Operation.RESIDUAL_NORM):
            return ExactElementwise() if self.exact else PlainElementwise()
        from modelserve_worker.kernels.elementwise.elementwise_triton import TritonElementwise

        return TritonElementwise(exact=self.exact)

    @cached_property
    def adapter_terms(self) -> AdapterTerms:
        if not self.table.on_kernels:
            return PlainTerms(exact=self.exact)
        from modelserve_worker.kernels.adapters.terms_triton import TritonTerms

        return TritonTerms(exact=self.exact)

    @cached_property
    def expert_terms(self) -> ExpertTerms:
        """Of adapters of experts."""
        if not self.table.on_kernels:
            return PlainExpertTerms(exact=self.exact)
        from modelserve_worker.kernels.adapters.expert_terms_triton import TritonExpertTerms

        return TritonExpertTerms()

    @cached_property
    def step(self) -> StepBackend:
        if not self._in_triton(Operation.TOKENS):
            return PlainStep()
        from modelserve_worker.kernels.step_start_triton import TritonStep

        return TritonStep()

    @cached_property
    def sampling(self) -> SamplingBackend:
        if not self._in_triton(Operation.SAMPLE):
            return PlainSampling()
        from modelserve_worker.kernels.sampling.sampling_triton import TritonSampling

        return TritonSampling()

    @cached_property
    def lookup(self) -> LookupBackend:
        """Of requests' own tokens: kernels where those of a step's tokens are."""
        if not self._in_triton(Operation.TOKENS):
            return PlainLookup()
        from modelserve_worker.kernels.sampling.prompt_lookup_triton import TritonLookup

        return TritonLookup()

    @cached_property
    def experts(self) -> ExpertBackend:
        if not self._in_triton(Operation.ROUTE):
            return ExactExperts() if self.exact else PlainExperts()
        from modelserve_worker.kernels.experts.experts_triton import TritonExperts

        few = (each for each in self.table.of(Operation.EXPERTS) if not each.takes_dense)
        streamed = (each.most_rows or 0 for each in few if each.backend is Backend.HOPPER)
        return TritonExperts(self._device, exact=self.exact, streamed_rows=max(streamed, default=0))

    @cached_property
    def few_expert_rows(self) -> int:
        """Rows up to which experts multiply without their rows being dealt out; 0: never."""
        choices = self._of_experts()
        return max((each.most_rows or 0 for each in choices if not each.takes_dense), default=0)

    @cached_property
    def branch_rows(self) -> int:
        """Rows up to which the dense MLP is multiplied beside experts that rows are dealt to; 0: never."""
        return max((each.most_rows or 0 for each in self._of_experts() if each.takes_dense), default=0)

    def _of_experts(self) -> tuple[Choice, ...]:
        return self.table.of(Operation.EXPERTS) if self.table.on_kernels else ()

    def products(
        self, subject: Subject, shape: tuple[int, int], stored: StoredType, *, grouped: bool = False
    ) -> MatrixProducts:
        """By the matrix of a linear layer, `shape` (outputs, inputs) on this rank, stored as `stored`; `grouped`: by
        those of experts. Raises KeyError for one that the table's model does not have."""
        if not self.table.on_kernels:
            return MatrixProducts(elements=self.elements)
        choices = self.table.of(Operation.GROUPED if grouped else Operation.LINEAR, subject, shape)
        return MatrixProducts(tuple(Product(each, self._multiplies(each, stored)) for each in choices), self.elements)

    def _in_triton(self, operation: Operation) -> bool:
        return self.table.on_kernels and self.table.choose(operation).backend is Backend.TRITON

    def _multiplies(self, choice: Choice, stored: StoredType) -> Callable[..., Tensor] | None:
        """The launch that the choice names, with what its row is given; None: products by elements."""
        if not choice.launch:
            return None
        module, function = choice.launch.split(":")
        launch: Callable[..., Tensor] = getattr(import_module(module), function)
        given = {name: self._given(name, choice, stored) for name in choice.given}
        return partial(launch, **given) if given else launch

    def _given(self, name: str, choice: Choice, stored: StoredType) -> Any:
        """What a row's launch is given by this name (`registry.Argument`)."""
        if name == "tile":
            assert self.table.capability is not None
            return exact_tile(stored, capability=self.table.capability)
        return {"capability": self.table.capability, "settles": choice.settles, "shared": self.shared}[name]


PLAIN = Operations(NO_KERNELS, torch.device("cpu"))
"""PyTorch's on any device: what a CPU runs, and what kernels are compared with."""
PLAIN_EXACT = Operations(replace(NO_KERNELS, profile="exact"), torch.device("cpu"))
"""Likewise, of profile exact."""
