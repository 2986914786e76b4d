"""What a row of the registry of products says: which matrices a kernel takes, what it needs, and where its launch is.

`modelserve.sizing.backends.products` lists the rows. The tables of kernels, a worker's launches, the workspace that is
planned and the expected times of products all follow from them: a new product is a row there and its kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from modelserve.model.weight_format import MatrixFormat, StoredType, TextLinear, WeightFormat
from modelserve.sizing.backends.table import ANY_ROWS, HEAD, LIBRARY, NO_ENDS, Backend, Choice, Ends, Operation
from modelserve.sizing.rank_settings import Profile
from modelserve.sizing.weights.quantised_tiles import fp8_inputs

Argument = Literal["capability", "settles", "shared", "tile"]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix [outputs, inputs] of one rank that rows are to be multiplied by, how it is stored, and on which GPU.

    `linear` None: the output head. `experts` 0: a dense one, else how many lie behind one another. `capability` is
    10 * major + minor, None on a device without kernels. `plain_kernels`: those of PyTorch's that make its elements.
    `settles`: whatever starts behind the product may read, before it waits, what came before it.
    """

    linear: TextLinear | None
    outputs: int
    inputs: int
    weight_format: WeightFormat | None
    capability: int | None
    profile: Profile = "fast"
    experts: int = 0
    plain_kernels: int = 0
    settles: bool = False

    @property
    def stored(self) -> StoredType:
        """Of this matrix, which may be dense in a quantised checkpoint."""
        return StoredType.BFLOAT16 if self.weight_format is None else self.weight_format.of(self.linear)

    @property
    def quantised(self) -> MatrixFormat | None:
        """Its format, None of a dense matrix."""
        found = None if self.weight_format is None else self.weight_format.matrix(self.linear)
        return found if found is not None and found.quantised else None

    @property
    def exact(self) -> bool:
        """Whether kernels are to give a row the same bits whatever rows lie beside it."""
        return self.capability is not None and self.profile == "exact"

    @property
    def row_bytes(self) -> int:
        """Bytes that a row of inputs has while it is multiplied: in the order of the matrix's columns, or in e4m3 with
        its scale."""
        if self.capability is None or self.quantised is None:
            return 0
        if self.quantised.fp8_activations:
            return fp8_inputs(self.inputs) + 4
        return 2 * self.inputs if self.quantised.activation_order else 0

    @property
    def ordering(self) -> tuple[str, ...]:
        """The kernel that puts inputs in the order of the matrix's columns, where these have one of their own."""
        return (LIBRARY,) if self.quantised is not None and self.quantised.activation_order else ()


@dataclass(frozen=True, slots=True)
class ProductKernel:
    """One row: a kernel that multiplies.

    `takes` (matrix) -> the most rows that it multiplies, ANY_ROWS, or 0 for a matrix that it does not take. `launch`:
    "module:function" that a worker calls (x, matrix as kernels hold it; of experts also where their rows end), with
    what `given` names: its GPU's capability, whether the product settles, buffers that products share, the tile of
    profile exact. "": PyTorch's product, or the profile's own, multiplies by the elements. `kernels` (matrix) -> all
    that one call launches, left out: the one of the row's name. `ends`: what the kernel does with sums besides storing
    them. `buffer` (matrix) -> name and bytes of memory that all calls share, and take by that name.
    `extra`: what a product of so many rows or more takes beside reading and multiplying, by the name of the rate
    (`planning.speed.engine_rates.EngineRates`).
    """

    name: str
    backend: Backend
    takes: Callable[[Matrix], int | None]
    launch: str = ""
    given: tuple[Argument, ...] = ()
    operation: Operation = Operation.LINEAR
    kernels: Callable[[Matrix], tuple[str, ...]] | None = None
    ends: Ends = NO_ENDS
    shared_bytes: int | None = None
    buffer: Callable[[Matrix], tuple[str, int]] | None = None
    extra: tuple[int, str] | None = None

    def choice(self, matrix: Matrix, most_rows: int | None) -> Choice:
        """The row as a choice of a table, for up to so many rows of this matrix."""
        buffer, workspace_bytes = ("", 0) if self.buffer is None else self.buffer(matrix)
        return Choice(
            self.operation,
            self.backend,
            (*matrix.ordering, self.name) if self.kernels is None else self.kernels(matrix),
            subject=HEAD if matrix.linear is None else matrix.linear,
            shape=(matrix.outputs, matrix.inputs),
            format=str(matrix.quantised or matrix.stored),
            most_rows=most_rows,
            shared_bytes=self.shared_bytes,
            workspace_bytes=workspace_bytes,
            buffer=buffer,
            row_bytes=matrix.row_bytes,
            ends=self.ends,
            settles=matrix.settles and "settles" in self.given,
            launch=self.launch,
            given=self.given,
            extra=self.extra,
        )


def choices_of(matrix: Matrix, rows: Iterable[ProductKernel]) -> Iterator[Choice]:
    """Those of `rows`, in their order, that take the matrix, up to the first that takes any number of rows."""
    operation = Operation.GROUPED if matrix.experts else Operation.LINEAR
    for row in rows:
        if row.operation is not operation or (most := row.takes(matrix)) == 0:
            continue
        yield row.choice(matrix, most)
        if most is ANY_ROWS:
            return
