"""Random weights of a model's own shapes, generated on its device: for benchmarks and tests without a checkpoint.

Scales keep activations and attention scores of ordinary size, so that a run does the work of a real one:
matrices are N(0, 1 / fan-in), the products q.k of normed heads have variance 1 (q_norm * k_norm ~ 1 / sqrt(d)), every
other norm weight and scalar is 1 +- 0.1. Quantised matrices have even nibbles or bytes, or normal e4m3 elements, and
scales that give them the same variance. Values depend on (seed, tensor name, row) alone, so every tensor-parallel size
gets shares of the same tensors.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from modelserve_worker.models.weight_source import FP8_DEVIATION, WeightSource
from modelserve_worker.weights.files import DTYPES

BLOCK_ELEMENTS = 1 << 25
SPREAD = 0.1
BOUND = 8.0  # of what goes into a linear that has bounds, and comes out: far out, as trained ones are
_BOUNDS = tuple(f".{side}_{end}" for side in ("input", "output") for end in ("min", "max"))


class DummyWeights:
    """Reader of tensors that do not exist anywhere."""

    def __init__(
        self, *, seed: int, device: torch.device, dtype: torch.dtype, block_elements: int = BLOCK_ELEMENTS
    ) -> None:
        self.seed = seed
        self._block_elements = block_elements
        self.dtype = dtype
        self.generator = torch.Generator(device=device)

    def fill(self, source: WeightSource) -> int:
        """Fill this rank's share of one tensor, a block of rows at a time; returns its bytes."""
        if source.name.endswith("g_idx") or source.word is not None:
            return 0  # in order, as it is made; or not kept
        if source.values is not None:
            source.parameter.copy_(source.values)
            return 0
        done, step = 0, max(1, self._block_elements // math.prod(source.shape[1:]))
        for region in source.regions:
            begin, length = (region.source, region.length) if region.dim == 0 else (0, source.shape[0])
            for offset in range(0, length, step):
                count = min(step, length - offset)
                block = self.read(source, start=begin + offset, count=count)
                target = source.parameter.narrow(0, offset + (0 if region.dim else region.target), count)
                if region.dim:
                    block = block.narrow(region.dim, region.source, region.length)
                    target = target.narrow(region.dim, region.target, region.length)
                target.copy_(block)
                done += block.nbytes
        return done

    def read(self, source: WeightSource, *, start: int, count: int) -> Tensor:
        """Rows [start, start + count) of the first dimension, on the device, in the model's dtype."""
        columns = math.prod(source.shape[1:])
        block_rows = max(1, self._block_elements // columns)
        first, last = start // block_rows, (start + count - 1) // block_rows
        blocks = [self._block(source, block, min(block_rows, source.shape[0])) for block in range(first, last + 1)]
        rows = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        return rows.narrow(0, start - first * block_rows, count)

    def _words(self, source: WeightSource, shape: tuple[int, ...]) -> Tensor:
        """Eight random nibbles, or four bytes, in each; zero points are 7 or 8."""
        device, limits = self.generator.device, (-(1 << 31), 1 << 31)
        words = torch.randint(*limits, shape, generator=self.generator, device=device, dtype=torch.int64)
        if source.name.endswith(("zero_point", "qzeros")):
            words = 0x77777777 + (words & 0x11111111)
        return words.to(torch.int32)

    def _octets(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(0, 256, shape, generator=self.generator, device=self.generator.device, dtype=torch.uint8)

    def _block(self, source: WeightSource, block: int, rows: int) -> Tensor:
        self.generator.manual_seed(zlib.crc32(f"{self.seed}/{source.name}/{block}".encode()))
        shape = (rows, *source.shape[1:])
        if source.dtypes == ("I32",):
            return self._words(source, shape)
        if source.dtypes in (("U8",), ("I8",)):
            return self._octets(shape).view(DTYPES[source.dtypes[0]])
        noise = torch.randn(shape, generator=self.generator, device=self.generator.device, dtype=self.dtype)
        if source.scale is not None:
            return noise.mul_(SPREAD).add_(1.0).mul_(source.scale)
        if source.dtypes == ("F8_E4M3",):
            return noise.mul_(FP8_DEVIATION).to(torch.float8_e4m3fn)
        if source.name.endswith(_BOUNDS):
            return noise.fill_(-BOUND if source.name.endswith("_min") else BOUND)
        if len(source.shape) > 1:
            return noise.mul_(source.shape[-1] ** -0.5)
        noise.mul_(SPREAD).add_(1.0)
        if source.name.endswith((".q_norm.weight", ".k_norm.weight")):
            noise.mul_(source.shape[0] ** -0.25)
        return noise
