"""The table of kernels: by operation, format and rows, what one rank of a worker launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final, Literal

from modelserve.model.architecture import LayerKind
from modelserve.model.weight_format import TextLinear
from modelserve.sizing.rank_settings import Profile

ANY_ROWS = None  # what a kernel's row in a registry takes where it takes any number of rows; 0: nothing of that shape
LIBRARY = "library"  # stands in a choice's kernels for one of PyTorch, cuBLAS or NCCL


def any_rows(taken: bool) -> int | None:
    """What a row takes that takes any number of rows, or nothing."""
    return ANY_ROWS if taken else 0


class Backend(StrEnum):
    """Whose kernels: PyTorch's on any device, Triton's, CUDA C++ for any GPU with bfloat16, CUDA C++ for Hopper."""

    PLAIN = "plain"
    TRITON = "triton"
    CUDA = "cuda"
    HOPPER = "hopper"


class Operation(StrEnum):
    """What a step computes, in its order."""

    TOKENS = "tokens"
    ROTATIONS = "rotations"
    EMBED = "embed"
    PER_LAYER_INPUTS = "per_layer_inputs"
    NORM = "norm"
    LINEAR = "linear"
    PREPARE = "prepare"
    CHUNK_ATTENTION = "chunk_attention"
    SPAN_ATTENTION = "span_attention"  # of chunks, in steps with rows that see what is behind them
    DECODE_ATTENTION = "decode_attention"  # of segments of one row
    VERIFY_ATTENTION = "verify_attention"  # of segments of several rows: decodes with drafts
    COMMIT = "commit"
    RESIDUAL_NORM = "residual_norm"
    GATED_GELU = "gated_gelu"
    ROUTE = "route"
    EXPERTS = "experts"
    GROUPED = "grouped_product"
    WEIGHTED_SUM = "weighted_sum"
    ADD_BRANCHES = "add_branches"
    PER_LAYER_GATE = "per_layer_gate"
    RANK_SUM = "rank_sum"
    SAMPLE = "sample"


HEAD: Final = "head"  # the product behind the last layer, which no format of text weights is of
Subject = TextLinear | LayerKind | Literal["head", ""]


@dataclass(frozen=True, slots=True)
class Ends:
    """What a product's kernel does with its sums before it stores them.

    `gated`: it can leave gelu(first half) * second half of the outputs, so that no kernel follows that makes it.
    `split`: it can leave float32 sums over parts of the inputs, for a reader that adds them. `beside`: it can
    leave room on multiprocessors for a kernel that starts while it runs, and finds all complete that came before.
    `tap`: it stores the sums a second time, for another reader.
    """

    gated: bool = False
    split: bool = False
    beside: bool = False
    tap: bool = False


NO_ENDS = Ends()


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Shape of one kernel on one kind of layer. `rows`: query rows of a block; `keys`: keys of a tile; `queries`: of a
    decode kernel's program, those that registers and shared memory hold at most. `exact`: as that profile has it, no
    warps or columns by the number of rows."""

    rows: int
    keys: int
    warps: int
    stages: int
    queries: int = 64
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernels of one operation for up to so many rows.

    `subject`: the linear layer or the kind of layer that it is of, and `shape` (outputs, inputs) a matrix's share on
    one rank. `kernels` are launched in this order by one call. `most_rows` None: any number; of decode attention it
    counts segments of one row, of experts tokens. `most_keys`: of sliding chunks and the windows before them together.
    `ends`: of a product. `settles`: whatever starts behind it finds all complete that came before it, and may read that
    before it waits. `fuses_norm`: a router adds to the residual and norms, so no kernel stands before it that does.
    `takes_dense`: experts' kernels multiply by the dense MLP's matrices, too. `launch`, `given` and `extra` of a
    product are its row's (`ProductKernel`), `launch` and `tile` of attention its own row's (`AttentionKernel`).
    """

    operation: Operation
    backend: Backend
    kernels: tuple[str, ...]
    subject: Subject = ""
    shape: tuple[int, int] = (0, 0)
    format: str = "bfloat16"
    most_rows: int | None = None
    most_keys: int | None = None
    shared_bytes: int | None = None  # dynamic shared memory of a thread block, at most; None: the compiler says
    workspace_bytes: int = 0  # once, shared with other operations that launch one after the other
    buffer: str = ""  # its name: choices that name the same one share it
    row_bytes: int = 0  # of workspace for each row
    ends: Ends = NO_ENDS
    settles: bool = False
    fuses_norm: bool = False
    takes_dense: bool = False
    launch: str = ""
    tile: AttentionTile | None = None
    given: tuple[str, ...] = ()
    extra: tuple[int, str] | None = None

    @property
    def launches(self) -> int:
        """Kernels of one call."""
        return len(self.kernels)

    def takes(self, rows: int) -> bool:
        return self.most_rows is None or rows <= self.most_rows

    def to_json(self) -> dict[str, str | int | list[str] | None]:
        """For /v1/plan: names in camel case, what does not apply left out."""
        shown: dict[str, str | int | list[str] | None] = {
            "operation": self.operation.value, "subject": str(self.subject),
            "shape": "x".join(map(str, self.shape)) if any(self.shape) else "", "format": self.format,
            "mostRows": self.most_rows, "mostKeys": self.most_keys, "backend": self.backend.value,
            "kernels": list(self.kernels), "launches": self.launches, "sharedBytes": self.shared_bytes,
            "workspaceBytes": self.workspace_bytes, "rowBytes": self.row_bytes,
        }  # fmt: skip
        return {name: value for name, value in shown.items() if value not in (None, "", 0)}

    def __str__(self) -> str:
        """One line of the log: `linear qkv 20480x5376 int4_g32, to 32 rows: linear_rows (hopper)`."""
        shape = "x".join(map(str, self.shape)) if any(self.shape) else ""
        of = " ".join(str(part) for part in (self.operation, self.subject, shape, self.format) if part)
        bounds = (self.most_rows, "rows"), (self.most_keys, "keys")
        limits = "".join(f", to {most} {what}" for most, what in bounds if most is not None)
        distinct = dict.fromkeys(self.kernels)
        counted = (f"{self.kernels.count(name)} {name}" if self.kernels.count(name) > 1 else name for name in distinct)
        return f"{of}{limits}: {' + '.join(counted)} ({self.backend})"


@dataclass(frozen=True)
class KernelTable:
    """All choices of one rank, made by `resolve`. Those of one operation and subject rise by rows; the last takes any.

    `capability`: 10 * major + minor, None of the CPU. `on_kernels`: kernels of ours compute the model; else every
    choice is plain.
    """

    capability: int | None
    profile: Profile
    on_kernels: bool
    choices: tuple[Choice, ...]

    @cached_property
    def _found(self) -> dict[tuple[Operation, Subject, tuple[int, int]], tuple[Choice, ...]]:
        found: dict[tuple[Operation, Subject, tuple[int, int]], tuple[Choice, ...]] = {}
        for choice in self.choices:
            key = choice.operation, choice.subject, choice.shape
            found[key] = (*found.get(key, ()), choice)
        return found

    def of(self, operation: Operation, subject: Subject = "", shape: tuple[int, int] = (0, 0)) -> tuple[Choice, ...]:
        """The choices of an operation, rising by rows. Raises KeyError for one that the model does not have."""
        return self._found[operation, subject, shape]

    def choose(
        self, operation: Operation, subject: Subject = "", shape: tuple[int, int] = (0, 0), *, rows: int = 1
    ) -> Choice:
        """Of so many rows. Raises KeyError as `of`."""
        return next(choice for choice in self.of(operation, subject, shape) if choice.takes(rows))

    @property
    def compute_capability(self) -> tuple[int, int]:
        """(major, minor); (0, 0) of the CPU."""
        return divmod(self.capability or 0, 10)

    @property
    def sums_through_peers(self) -> bool:
        """Whether ranks sum through each other's memory, on GPUs that reach it."""
        return any(choice.backend is Backend.CUDA for choice in self.choices)

    def kernels(self) -> frozenset[str]:
        """Names of all kernels of ours that the choices launch."""
        return frozenset(name for choice in self.choices for name in choice.kernels) - {LIBRARY}

    def lines(self) -> Iterator[str]:
        """The table for a log: a headline, then a line a choice."""
        gpu = "the CPU" if self.capability is None else f"compute capability {self.capability / 10}"
        yield f"profile {self.profile} on {gpu}: {len(self.choices)} choices, {len(self.kernels())} kernels"
        yield from map(str, self.choices)

    def to_json(self) -> dict[str, object]:
        """For /v1/plan."""
        return {
            "computeCapability": None if self.capability is None else f"{self.capability / 10}",
            "profile": self.profile,
            "choices": [choice.to_json() for choice in self.choices],
        }
