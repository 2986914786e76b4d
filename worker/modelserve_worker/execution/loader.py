"""Filling a model with weights: each rank streams its own share straight into the fused, sharded parameters."""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from modelserve.architecture import ModelArchitecture
from modelserve_worker.execution.weights import CheckpointFiles, CheckpointTensor, InvalidCheckpoint
from modelserve_worker.execution.weights_dummy import DummyWeights
from modelserve_worker.execution.weights_progress import LoadProgress, ProgressCallback
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.models.gemma4_checkpoint import (
    Region,
    WeightSource,
    text_name,
    unused_names,
    weight_sources,
)

COPY_BYTES = 1 << 26  # one copy; small enough that slow storage still shows progress, large enough to stream
LISTED = 3  # tensors named per kind of fault

logger = logging.getLogger(__name__)


def load_model(
    architecture: ModelArchitecture,
    directory: Path,
    *,
    parallel: TensorParallel,
    device: torch.device,
    dtype: torch.dtype,
    load_format: Literal["auto", "dummy"] = "auto",
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> Gemma4ForCausalLM:
    """Build this rank's model on `device` and fill it from `directory` ("auto") or with random weights ("dummy").

    Raises InvalidInput when the tensor-parallel size does not fit, InvalidCheckpoint for missing, unexpected, misshapen
    or unreadable tensors. 300 s without a byte end the process with reason LoadStalled.
    """
    if load_format == "dummy":
        return _dummy_model(architecture, parallel=parallel, device=device, dtype=dtype, seed=seed, progress=progress)
    with LoadProgress(callback=progress) as counted:
        files = CheckpointFiles(directory, opening=lambda file: counted.reading(f"the header of {file}"))
        model = Gemma4ForCausalLM(architecture, parallel=parallel, device=device, dtype=dtype)
        matched = _match(model, files)
        counted.expect(sum(_share_bytes(source, tensor.element_bytes) for source, tensor in matched))
        for source, tensor in matched:
            counted.reading(f"tensor {tensor.name!r} of {tensor.file}")
            _fill(source, partial(files.read, tensor), element_bytes=tensor.element_bytes, progress=counted)
    return model


def _dummy_model(
    architecture: ModelArchitecture,
    *,
    parallel: TensorParallel,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    progress: ProgressCallback | None,
) -> Gemma4ForCausalLM:
    model = Gemma4ForCausalLM(architecture, parallel=parallel, device=device, dtype=dtype)
    weights = DummyWeights(seed=seed, device=device, dtype=dtype)
    counted = LoadProgress(callback=progress)
    counted.expect(model.parameter_bytes())
    for source in weight_sources(model):
        _fill(source, partial(weights.read, source), element_bytes=dtype.itemsize, progress=counted)
    return model


class RowReader(Protocol):
    def __call__(self, *, start: int, count: int) -> Tensor:
        """Rows [start, start + count) of one tensor's first dimension."""
        ...


def _fill(source: WeightSource, read: RowReader, *, element_bytes: int, progress: LoadProgress) -> None:
    """Copy the source's regions into its parameter, a block of rows at a time, converting the dtype on the way."""
    row_bytes = math.prod(source.shape[1:]) * element_bytes
    step = max(1, COPY_BYTES // row_bytes)
    for region in source.regions:
        rows = region if region.dim == 0 else Region(0, 0, 0, source.shape[0])
        for offset in range(0, rows.length, step):
            count = min(step, rows.length - offset)
            block = read(start=rows.source + offset, count=count)
            target = source.parameter.narrow(0, rows.target + offset, count)
            if region.dim:
                block = block.narrow(region.dim, region.source, region.length)
                target = target.narrow(region.dim, region.target, region.length)
            target.copy_(block)
            progress.advance(block.numel() * element_bytes)


def _share_bytes(source: WeightSource, element_bytes: int) -> int:
    elements = math.prod(source.shape)
    return sum(elements // source.shape[region.dim] * region.length for region in source.regions) * element_bytes


def _match(model: Gemma4ForCausalLM, files: CheckpointFiles) -> list[tuple[WeightSource, CheckpointTensor]]:
    """Pair every tensor the model needs with the one in the files, in file order. Raises InvalidCheckpoint."""
    wanted = {source.name: source for source in weight_sources(model)}
    unused = unused_names(model)
    matched: dict[str, tuple[WeightSource, CheckpointTensor]] = {}
    present: set[str] = set()
    faults: list[str] = []
    skipped: list[CheckpointTensor] = []
    for tensor in files.tensors.values():
        name = text_name(tensor.name)
        present.add(name or tensor.name)
        if name is None or name in unused:
            skipped.append(tensor)
        elif name not in wanted:
            faults.append(f"unexpected tensor {tensor.name!r} in {tensor.file}")
        elif name in matched:
            faults.append(f"tensor {tensor.name!r} in {tensor.file} repeats {matched[name][1].name!r}")
        elif tensor.shape != wanted[name].shape:
            shapes = f"has shape {list(tensor.shape)}, expected {list(wanted[name].shape)}"
            faults.append(f"tensor {tensor.name!r} in {tensor.file} {shapes}")
        else:
            matched[name] = (wanted[name], tensor)
    faults += [f"tensor {name!r} is in no file" for name in wanted if name not in present]
    if faults:
        more = f"; and {len(faults) - LISTED} more" if len(faults) > LISTED else ""
        raise InvalidCheckpoint(
            f"checkpoint {files.directory} does not match its config.json: {'; '.join(faults[:LISTED])}{more}"
        )
    if skipped:
        names = ", ".join(sorted({".".join(tensor.name.split(".")[:2]) for tensor in skipped}))
        logger.info("skipped %d tensors that text generation does not use (%s)", len(skipped), names)
    return list(matched.values())
