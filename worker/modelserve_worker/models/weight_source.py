"""Which checkpoint tensors fill which part of a matrix, by the format that the matrix is stored in.

A rank's share of one checkpoint matrix [rows, columns] is a run of its rows or of its columns. Each tensor that stores
it has one entry for so many rows and so many columns: 1 x 8 for packed int4, 1 x group for its scales, 8 x group for
its zero points, 128 x 128 for scales of fp8 blocks. So its share is the same run, counted in entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from modelserve.model.weight_format import FP8_BLOCK
from modelserve_worker.layers.parallel import Shard
from modelserve_worker.layers.stored_matrix import PACKED, DenseMatrix, Fp8Matrix, Int4Matrix, StoredMatrix

FLOATS = ("BF16", "F16", "F32")
INT4_DEVIATION = 4.61  # of evenly drawn -8..7
FP8_DEVIATION = 64.0  # of random e4m3 elements: far from the largest, 448, and from the smallest


@dataclass(frozen=True, slots=True)
class Region:
    """`length` indices of dimension `dim`: from `source` in the checkpoint tensor to `target` in the parameter."""

    dim: int
    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class WeightSource:
    """One checkpoint tensor of `shape`, and the regions of it that this rank copies into `parameter`."""

    name: str
    shape: tuple[int, ...]
    parameter: Tensor
    regions: tuple[Region, ...]
    dtypes: tuple[str, ...] = FLOATS  # safetensors names of the dtypes that may be copied into the parameter
    scale: float | None = None  # of a quantised matrix's scales: what gives random elements a variance of 1 / inputs
    values: tuple[int, ...] | None = None  # what the tensor must hold


@dataclass(frozen=True, slots=True)
class MatrixShare:
    """This rank's share of one checkpoint matrix: runs of its rows, or a run of its columns, or all of it.

    The runs become the stacked matrices from `part` on. `expert` is which one, where experts have tensors of their own.
    """

    rows: tuple[Shard, ...]
    columns: Shard
    part: int = 0
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class MatrixNames:
    """Names of the tensors of one checkpoint matrix."""

    dense: str
    stem: str  # of those of a quantised format: stem + "packed", stem + "scale", ...

    @classmethod
    def of_module(cls, name: str) -> MatrixNames:
        return cls(f"{name}.weight", f"{name}.weight_")

    @classmethod
    def of_parameter(cls, name: str) -> MatrixNames:
        """Of experts that are one parameter of a module, which has no "weight" in its name."""
        return cls(name, f"{name}_")


def whole(size: int) -> Shard:
    return Shard(0, size, size)


def matrix_sources(matrix: StoredMatrix, names: MatrixNames, share: MatrixShare) -> Iterator[WeightSource]:
    """The tensors that a checkpoint must hold for one of the matrices stacked in `matrix`."""
    if isinstance(matrix, DenseMatrix):
        yield _cut(names.dense, matrix.weight, matrix, share)
    elif isinstance(matrix, Int4Matrix):
        yield from _int4_sources(matrix, names.stem, share)
    else:
        assert isinstance(matrix, Fp8Matrix)
        yield from _fp8_sources(matrix, names, share)


def _int4_sources(matrix: Int4Matrix, stem: str, share: MatrixShare) -> Iterator[WeightSource]:
    group, inputs = matrix.group_size, share.columns.total
    scale = inputs**-0.5 / INT4_DEVIATION
    yield _cut(f"{stem}packed", matrix.packed, matrix, share, columns=PACKED, dtypes=("I32",))
    yield _cut(f"{stem}scale", matrix.scale, matrix, share, columns=group, dtypes=("BF16",), scale=scale)
    if matrix.zero_point is not None:
        parameter = matrix.zero_point
        yield _cut(f"{stem}zero_point", parameter, matrix, share, rows=PACKED, columns=group, dtypes=("I32",))
    if matrix.group_index is not None:
        index = matrix.group_index[share.part]
        yield WeightSource(f"{stem}g_idx", (inputs,), index, (Region(0, 0, 0, inputs),), ("I32",))
    if matrix.experts and share.expert is None:
        return  # nobody publishes a shape beside tensors of three dimensions
    held, shape = torch.empty(2, dtype=torch.int64), (share.rows[0].total, inputs)
    yield WeightSource(f"{stem}shape", (2,), held, (Region(0, 0, 0, 2),), ("I64", "I32"), values=shape)


def _fp8_sources(matrix: Fp8Matrix, names: MatrixNames, share: MatrixShare) -> Iterator[WeightSource]:
    scale, name = share.columns.total**-0.5 / FP8_DEVIATION, f"{names.stem}scale"
    yield _cut(names.dense, matrix.weight, matrix, share, dtypes=("F8_E4M3",))
    if matrix.blocks:
        yield _cut(name, matrix.scale, matrix, share, rows=FP8_BLOCK, columns=FP8_BLOCK, scale=scale)
    elif matrix.tensor_scale is not None:
        parameter = matrix.tensor_scale[share.expert or 0, share.part : share.part + 1]
        yield WeightSource(name, (1,), parameter, (Region(0, 0, 0, 1),), scale=scale)
    else:
        yield _cut(name, matrix.scale, matrix, share, columns=share.columns.total, scale=scale)


def _cut(
    name: str,
    parameter: Tensor,
    matrix: StoredMatrix,
    share: MatrixShare,
    *,
    rows: int = 1,
    columns: int = 1,
    dtypes: tuple[str, ...] = FLOATS,
    scale: float | None = None,
) -> WeightSource:
    """The share of a tensor that has an entry for every `rows` x `columns` elements of the matrix."""
    experts = (matrix.experts,) if matrix.experts and share.expert is None else ()
    if share.expert is not None:
        parameter = parameter[share.expert]
    shape = (*experts, _entries(share.rows[0].total, rows), _entries(share.columns.total, columns))
    if share.columns.size < share.columns.total:
        first = share.columns.start // columns
        regions = [Region(len(experts) + 1, first, 0, _entries(share.columns.stop, columns) - first)]
    else:
        regions, target = [], sum(_entries(part, rows) for part in matrix.parts[: share.part])
        for run in share.rows:
            first = run.start // rows
            regions.append(Region(len(experts), first, target, _entries(run.stop, rows) - first))
            target += regions[-1].length
    return WeightSource(name, shape, parameter, tuple(regions), dtypes, scale)


def _entries(size: int, step: int) -> int:
    return -(-size // step)
