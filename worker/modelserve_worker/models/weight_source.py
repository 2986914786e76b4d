"""Which checkpoint tensors fill which part of a matrix, by the format that the matrix is stored in.

A rank's share of one checkpoint matrix [rows, columns] is a run of its rows or of its columns. Each tensor that stores
it has one entry for so many rows and so many columns: 1 x 8 for packed int4, 1 x group for its scales, 8 x group for
its zero points, 128 x 128 for scales of fp8 blocks. So its share is the same run, counted in entries. GPTQ and AWQ have
columns before rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modelserve.model.weight_format import FP8_BLOCK, NVFP4_GROUP, Layout, ScaleType
from modelserve_worker.layers.parallel import Shard
from modelserve_worker.layers.stored.fp8 import Fp8Matrix
from modelserve_worker.layers.stored.int4 import Int4Matrix
from modelserve_worker.layers.stored.int4_layouts import PACKED
from modelserve_worker.layers.stored.int8 import PACKED_LAYOUTS, WORD, Int8Matrix
from modelserve_worker.layers.stored.matrix import DenseMatrix, StoredMatrix
from modelserve_worker.layers.stored.nvfp4 import Nvfp4Matrix

FLOATS = ("BF16", "F16", "F32")
INT4_BLOCKS = ("Q4_0",)  # GGUF's names of what becomes INT4, and INT8
INT8_BLOCKS = ("Q4_0", "Q5_0", "Q8_0", "Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
TABLES = (*FLOATS, *INT8_BLOCKS)  # of embeddings: blocks become floats
INT4_DEVIATION = 4.61  # of evenly drawn -8..7
INT8_DEVIATION = 73.9  # of evenly drawn -128..127
NVFP4_DEVIATION = 2.93  # of evenly drawn e2m1
FP8_DEVIATION = 64.0  # of random e4m3 elements, and about what NVFP4's scales are: far from the largest, 448
_SCALE_DTYPES = {ScaleType.BFLOAT16: "BF16", ScaleType.FLOAT16: "F16", ScaleType.FLOAT32: "F32"}
_GPTQ = (Layout.GPTQ, Layout.GPTQ_V2)
_ZERO_WORDS = {  # of symmetric matrices, which have the zero points of others all the same
    Layout.GPTQ: 0x77777777,
    Layout.GPTQ_V2: 0x88888888,
    Layout.AWQ: 0x88888888,
}
_ZERO_WORDS_INT8 = {Layout.GPTQ: 0x7F7F7F7F, Layout.GPTQ_V2: 0x80808080}


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
    unsigned: bool = False  # scales that may not be negative
    values: Tensor | None = None  # int64: what the tensor must hold
    word: int | None = None  # what each uint32 of the tensor must be, none of which is kept
    optional: bool = False  # what some tools write, and others that write the same layout do not
    scales: Tensor | None = None  # the parameter for scales that lie among the elements, in a GGUF file's blocks


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
    module: str  # of those of GPTQ and AWQ: module + "qweight", ...

    @classmethod
    def of_module(cls, name: str) -> MatrixNames:
        return cls(f"{name}.weight", f"{name}.weight_", f"{name}.")

    @classmethod
    def of_parameter(cls, name: str) -> MatrixNames:
        """Of experts that are one parameter of a module, which has no "weight" in its name."""
        return cls(name, f"{name}_", f"{name}.")


def whole_tensor(name: str, parameter: Tensor, *, dtypes: tuple[str, ...] = FLOATS) -> Iterator[WeightSource]:
    """One that every rank holds whole."""
    size = parameter.shape[0]
    yield WeightSource(name, tuple(parameter.shape), parameter, (Region(0, 0, 0, size),), dtypes)


def whole(size: int) -> Shard:
    return Shard(0, size, size)


def is_fused(matrix: StoredMatrix) -> bool:
    """Whether a checkpoint may hold all experts of the matrix in one tensor of each kind. Not in FP8: blocks of gate
    and up together would cross from one into the other."""
    if isinstance(matrix, Int4Matrix | Int8Matrix):
        fused = Layout.GGUF, *((Layout.COMPRESSED_TENSORS,) if isinstance(matrix, Int4Matrix) else ())
        return matrix.layout in fused
    return isinstance(matrix, DenseMatrix)


def matrix_sources(matrix: StoredMatrix, names: MatrixNames, share: MatrixShare) -> Iterator[WeightSource]:
    """The tensors that a checkpoint must hold for one of the matrices stacked in `matrix`."""
    if isinstance(matrix, DenseMatrix):
        yield _cut(names.dense, matrix.weight, matrix, share)
    elif isinstance(matrix, Int4Matrix | Int8Matrix) and matrix.layout is Layout.GGUF:
        yield _block_source(matrix, names, share)
    elif isinstance(matrix, Int4Matrix):
        of_layout = _int4_sources if matrix.layout is Layout.COMPRESSED_TENSORS else _turned_int4_sources
        yield from of_layout(matrix, names, share)
    elif isinstance(matrix, Int8Matrix):
        yield from _int8_sources(matrix, names, share)
    elif isinstance(matrix, Nvfp4Matrix):
        yield from _nvfp4_sources(matrix, names, share)
    else:
        assert isinstance(matrix, Fp8Matrix)
        yield from _fp8_sources(matrix, names, share)


def _int4_sources(matrix: Int4Matrix, names: MatrixNames, share: MatrixShare) -> Iterator[WeightSource]:
    stem, group, inputs = names.stem, matrix.group_size, share.columns.total
    scale, dtypes = inputs**-0.5 / INT4_DEVIATION, (_SCALE_DTYPES[matrix.scale_type],)
    yield _cut(f"{stem}packed", matrix.packed, matrix, share, columns=PACKED, dtypes=("I32",))
    yield _cut(f"{stem}scale", matrix.scale, matrix, share, columns=group, dtypes=dtypes, scale=scale)
    if matrix.zero_point is not None:
        parameter = matrix.zero_point
        yield _cut(f"{stem}zero_point", parameter, matrix, share, rows=PACKED, columns=group, dtypes=("I32",))
    if matrix.group_index is not None:
        index = matrix.group_index[share.part]
        yield WeightSource(f"{stem}g_idx", (inputs,), index, (Region(0, 0, 0, inputs),), ("I32",))
    if not matrix.experts or share.expert is not None:  # nobody publishes a shape beside tensors of three dimensions
        yield _stated_shape(stem, share)


def _block_source(matrix: Int4Matrix | Int8Matrix, names: MatrixNames, share: MatrixShare) -> WeightSource:
    """GGUF's: one tensor of blocks that hold both."""
    elements, kinds = (matrix.packed, INT4_BLOCKS) if isinstance(matrix, Int4Matrix) else (matrix.weight, INT8_BLOCKS)
    whole = _cut(names.dense, elements, matrix, share, dtypes=kinds)
    scales = matrix.scale if share.expert is None else matrix.scale[share.expert]
    return replace(whole, scales=scales)


def _turned_int4_sources(matrix: Int4Matrix, names: MatrixNames, share: MatrixShare) -> Iterator[WeightSource]:
    """GPTQ's and AWQ's."""
    module, group, inputs = names.module, matrix.group_size, share.columns.total
    scale, dtypes = inputs**-0.5 / INT4_DEVIATION, (_SCALE_DTYPES[matrix.scale_type],)
    rows, columns = (PACKED, 1) if matrix.layout is Layout.AWQ else (1, PACKED)
    yield _cut(
        f"{module}qweight", matrix.packed, matrix, share, rows=rows, columns=columns, dtypes=("I32",), turned=True
    )
    yield _cut(f"{module}scales", matrix.scale, matrix, share, columns=group, dtypes=dtypes, scale=scale, turned=True)
    if matrix.zero_point is not None:
        yield _cut(
            f"{module}qzeros", matrix.zero_point, matrix, share,
            rows=PACKED, columns=group, dtypes=("I32",), turned=True,
        )  # fmt: skip
    else:
        yield _constant(f"{module}qzeros", share, (PACKED, group), _ZERO_WORDS[matrix.layout])
    if matrix.layout in _GPTQ:
        index = None if matrix.group_index is None else matrix.group_index[share.part]
        yield _group_index(module, inputs, group, index)


def _int8_sources(matrix: Int8Matrix, names: MatrixNames, share: MatrixShare) -> Iterator[WeightSource]:
    inputs = share.columns.total
    group, scale = matrix.group_size or inputs, inputs**-0.5 / INT8_DEVIATION
    dtypes = FLOATS if matrix.group_size is None else (_SCALE_DTYPES[matrix.scale_type],)
    if matrix.layout in _GPTQ:
        module = names.module
        yield _cut(f"{module}qweight", matrix.weight, matrix, share, columns=WORD, dtypes=("I32",), turned=True)
        yield _cut(
            f"{module}scales", matrix.scale, matrix, share, columns=group, dtypes=dtypes, scale=scale, turned=True
        )
        yield _constant(f"{module}qzeros", share, (WORD, group), _ZERO_WORDS_INT8[matrix.layout])
        yield _group_index(module, inputs, group, None)
        return
    if matrix.layout in PACKED_LAYOUTS:
        yield _cut(f"{names.stem}packed", matrix.weight, matrix, share, columns=WORD, dtypes=("I32",))
        yield _stated_shape(names.stem, share)
    else:
        yield _cut(names.dense, matrix.weight, matrix, share, dtypes=("I8",))
    yield _cut(f"{names.stem}scale", matrix.scale, matrix, share, columns=group, dtypes=dtypes, scale=scale)


def _nvfp4_sources(matrix: Nvfp4Matrix, names: MatrixNames, share: MatrixShare) -> Iterator[WeightSource]:
    assert matrix.global_scale is not None
    parameter = matrix.global_scale[share.expert or 0, share.part : share.part + 1]
    by_modelopt, stem = matrix.layout is Layout.MODELOPT, names.stem
    scale = share.columns.total**-0.5 / NVFP4_DEVIATION / FP8_DEVIATION
    packed = names.dense if by_modelopt else f"{stem}packed"
    yield _cut(packed, matrix.packed, matrix, share, columns=2, dtypes=("U8",))
    yield _cut(
        f"{stem}scale", matrix.scale, matrix, share,
        columns=NVFP4_GROUP, dtypes=("F8_E4M3",), scale=FP8_DEVIATION, unsigned=True,
    )  # fmt: skip
    name, scale = (f"{stem}scale_2", scale) if by_modelopt else (f"{stem}global_scale", 1 / scale)
    yield WeightSource(name, (1,), parameter, (Region(0, 0, 0, 1),), scale=scale, unsigned=True)


def _fp8_sources(matrix: Fp8Matrix, names: MatrixNames, share: MatrixShare) -> Iterator[WeightSource]:
    scale, name = share.columns.total**-0.5 / FP8_DEVIATION, f"{names.stem}scale"
    yield _cut(names.dense, matrix.weight, matrix, share, dtypes=("F8_E4M3",))
    if matrix.layout is Layout.BLOCK_FP8:
        name += "_inv"
    if matrix.blocks:
        yield _cut(name, matrix.scale, matrix, share, rows=FP8_BLOCK, columns=FP8_BLOCK, scale=scale)
    elif matrix.tensor_scale is not None:
        parameter = matrix.tensor_scale[share.expert or 0, share.part : share.part + 1]
        yield WeightSource(name, (1,), parameter, (Region(0, 0, 0, 1),), scale=scale)
    else:
        yield _cut(name, matrix.scale, matrix, share, columns=share.columns.total, scale=scale)


def _stated_shape(stem: str, share: MatrixShare) -> WeightSource:
    held = torch.empty(2, dtype=torch.int64)
    values = torch.tensor([share.rows[0].total, share.columns.total])
    return WeightSource(f"{stem}shape", (2,), held, (Region(0, 0, 0, 2),), ("I64", "I32"), values=values)


def _group_index(module: str, inputs: int, group: int, index: Tensor | None) -> WeightSource:
    """GPTQ's, which AutoRound leaves out; without an activation order it must be that of inputs as they lie."""
    held = torch.empty(inputs, dtype=torch.int32) if index is None else index
    values, regions = (torch.arange(inputs) // group if index is None else None), (Region(0, 0, 0, inputs),)
    return WeightSource(
        f"{module}g_idx", (inputs,), held, regions, ("I32", "I64"), values=values, optional=index is None
    )


def _constant(name: str, share: MatrixShare, entries: tuple[int, int], word: int) -> WeightSource:
    """Zero points of a symmetric matrix."""
    rows, columns = (_entries(share.rows[0].total, entries[0]), _entries(share.columns.total, entries[1]))
    return WeightSource(name, (columns, rows), torch.empty(0), (), ("I32",), word=word)


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
    unsigned: bool = False,
    turned: bool = False,
) -> WeightSource:
    """The share of a tensor that has an entry for every `rows` x `columns` elements of the matrix; `turned`: with
    columns before rows, as the parameter has them."""
    experts = (matrix.experts,) if matrix.experts and share.expert is None else ()
    if share.expert is not None:
        parameter = parameter[share.expert]
    entries = _entries(share.rows[0].total, rows), _entries(share.columns.total, columns)
    shape = (*experts, *(reversed(entries) if turned else entries))
    if share.columns.size < share.columns.total:
        first = share.columns.start // columns
        regions = [Region(len(experts) + (not turned), first, 0, _entries(share.columns.stop, columns) - first)]
    else:
        regions, target = [], sum(_entries(part, rows) for part in matrix.parts[: share.part])
        for run in share.rows:
            first = run.start // rows
            regions.append(Region(len(experts) + turned, first, target, _entries(run.stop, rows) - first))
            target += regions[-1].length
    return WeightSource(name, shape, parameter, tuple(regions), dtypes, scale, unsigned)


def _entries(size: int, step: int) -> int:
    return -(-size // step)
