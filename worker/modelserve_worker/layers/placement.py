"""Where and how a rank holds the layers of a model: what each of them is made with."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from modelserve.model.weight_format import WeightFormat
from modelserve_worker.kernels.operations import PLAIN, Operations
from modelserve_worker.layers.adapter_rows import AdapterRows
from modelserve_worker.layers.parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class Placement:
    """On `device`, computed in `dtype`. `weight_format` None is an unquantised checkpoint; `operations` are the kernels
    of a table for the model on that device, or plain PyTorch's on any."""

    device: torch.device
    dtype: torch.dtype
    parallel: TensorParallel = field(default_factory=TensorParallel)
    weight_format: WeightFormat | None = None
    operations: Operations = PLAIN
    adapter_rows: AdapterRows = field(default_factory=AdapterRows)

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Allocated, not initialised: a loader fills it. In the placement's dtype unless another is given."""
        return nn.Parameter(torch.empty(shape, device=self.device, dtype=dtype or self.dtype), requires_grad=False)
