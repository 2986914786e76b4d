"""INT8 weights as the kernels read them, and how loaded ones are brought into that order.

Loaded: elements [N, K] and one scale per row, or one per row and group of inputs. Ours: the pairs of FP8
(`fp8_linear`), of every 64 inputs element c beside element 32 + c, in rows of whole tiles of 128 inputs; scales of
groups lie by group, so that those of neighbouring rows are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from modelserve.sizing.weights.quantised_tiles import INT8_GROUPS, int8_inputs
from modelserve_worker.kernels.products.fp8_linear import REPACKED_ELEMENTS, paired


@dataclass(frozen=True, slots=True)
class Int8Pairs:
    """A matrix of N rows and K inputs; experts put a dimension E before all others.

    elements int8 [N, K rounded up to 128], zeros past the inputs. scales float32 [N] with `group` 0, or of groups of
    16, 32, 64 or 128 inputs, in the checkpoint's type, [K / group, N]. Element = stored * scale.
    """

    elements: Tensor
    scales: Tensor
    inputs: int
    group: int

    @property
    def rows(self) -> int:
        return self.elements.shape[-2]


def repack_int8(weight: Tensor, scale: Tensor, group: int, *, at_a_time: int = REPACKED_ELEMENTS) -> Int8Pairs:
    """Elements int8 [N, K] and their scales -> a matrix for the kernels.

    scale float32 [N, 1] with `group` 0, or of any type [N, K / group]. `weight` is given up: where K is a multiple of
    128 the result lies in its memory. The extra memory is of so many elements `at_a_time`: 64 MiB. Experts may be a
    dimension before the others. Raises ValueError for scales of another shape and groups that the kernels do not take.
    """
    *leading, rows, inputs = weight.shape
    if group and group not in INT8_GROUPS:
        raise ValueError(f"INT8 groups of {group} inputs: the kernels take {', '.join(map(str, INT8_GROUPS))}")
    if (group and inputs % group) or scale.shape != (*leading, rows, inputs // group if group else 1):
        spans = f" in groups of {group}" if group else ""
        raise ValueError(
            f"scales {list(scale.shape)} do not fit INT8 weights of {rows} rows and {inputs} inputs{spans}"
        )
    stored = int8_inputs(inputs)
    source = weight.view(-1, inputs)
    elements = (
        source if stored == inputs else torch.empty((len(source), stored), dtype=torch.int8, device=weight.device)
    )
    most = max(1, at_a_time // stored)
    for first in range(0, len(source), most):
        some = slice(first, first + most)
        elements[some] = paired(functional.pad(source[some], (0, stored - inputs)))
    scales = scale.mT.contiguous() if group else scale.squeeze(-1).contiguous()
    return Int8Pairs(elements.view(*leading, rows, stored), scales, inputs, group)
