"""Filling a model with weights: each rank reads its own share into the fused, sharded parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from modelserve.errors import InvalidInput
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.audio import AudioArchitecture
from modelserve.model.checkpoint_files import TensorEntry
from modelserve.model.drafters.dflash import DFlashArchitecture
from modelserve.model.gguf import tensor_names
from modelserve.model.images import ImageArchitecture
from modelserve.model.media_files import AUDIO_PREFIXES, IMAGE_PREFIXES, is_quantised
from modelserve.model.weight_format import Layout
from modelserve_worker.layers.placement import Placement
from modelserve_worker.layers.stored.int4 import Int4Matrix
from modelserve_worker.layers.stored.int8 import Int8Matrix
from modelserve_worker.models.assistant_checkpoint import ORDERING, assistant_sources, unused_assistant_names
from modelserve_worker.models.dflash import DFlash
from modelserve_worker.models.dflash_checkpoint import TOKEN_MAP, dflash_sources, unused_dflash_names
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.models.gemma4_assistant import Gemma4Assistant
from modelserve_worker.models.gemma4_checkpoint import (
    UNUSED_ENDINGS,
    media_name,
    names_experts_apart,
    text_name,
    unused_names,
    weight_sources,
)
from modelserve_worker.models.weight_source import WeightSource
from modelserve_worker.weights.checkpoint_config import read_assistant, read_drafter, read_unused_parts
from modelserve_worker.weights.contents import check_contents
from modelserve_worker.weights.dummy import DummyWeights
from modelserve_worker.weights.files import CheckpointFiles, InvalidCheckpoint
from modelserve_worker.weights.progress import LoadProgress, ProgressCallback
from modelserve_worker.weights.reading import read_weights

LISTED = 3  # tensors named per kind of fault

logger = logging.getLogger(__name__)


def load_model(
    architecture: ModelArchitecture,
    directory: Path,
    placement: Placement,
    *,
    images: ImageArchitecture | None = None,
    audio: AudioArchitecture | None = None,
    load_format: Literal["auto", "dummy"] = "auto",
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> Gemma4ForCausalLM:
    """Build this rank's model and fill it from `directory` ("auto") or with random weights ("dummy"). Tensors by which
    it takes `images` and `audio` are read with them alone.

    Raises InvalidInput when the tensor-parallel size does not fit, InvalidCheckpoint for missing, unexpected, misshapen
    or unreadable tensors. 300 s without a byte end the process with reason LoadStalled.
    """
    model = Gemma4ForCausalLM(architecture, placement, images=images, audio=audio)
    with LoadProgress(callback=progress) as counted:
        if load_format == "dummy":
            counted.expect(model.parameter_bytes())
            for _, matrix in model.stored_matrices():
                if isinstance(matrix, Int4Matrix | Int8Matrix) and matrix.layout is Layout.GGUF:
                    matrix.layout = Layout.COMPRESSED_TENSORS  # elements and scales are made apart
            _make_up(weight_sources(model), placement, seed=seed, progress=counted)
        else:
            stored = placement.weight_format
            for unused in () if stored is None else read_unused_parts(directory, stored):
                logger.info("%s: %s", directory, unused)
            files = CheckpointFiles.scan(directory, opening=lambda file: counted.reading(f"the header of {file}"))
            sources = weight_sources(model, experts_apart=names_experts_apart(files.tensors))
            named = partial(media_name, images=images is not None, audio=audio is not None)
            _read(sources, files, unused=unused_names(model), device=placement.device, progress=counted, named=named)
    for name, matrix in model.stored_matrices():
        try:
            matrix.loaded()
        except ValueError as error:
            raise InvalidCheckpoint(f"checkpoint {directory}: {name}: {error}") from error
    return model


def load_assistant(
    directory: Path,
    target: Gemma4ForCausalLM,
    *,
    load_format: Literal["auto", "dummy"] = "auto",
    seed: int = 0,
) -> Gemma4Assistant:
    """The drafter in `directory` beside `target`, in its dtype and on its device, filled as a model is.

    Raises InvalidInput where it is the assistant of another model, and what `load_model` raises.
    """
    computed = str(target.dtype).removeprefix("torch.")
    architecture = read_assistant(directory).model_copy(update={"dtype": computed})
    assistant, placement = Gemma4Assistant(architecture, target), target.placement
    sources = list(assistant_sources(assistant))
    with LoadProgress() as counted:
        if load_format == "dummy":
            counted.expect(assistant.parameter_bytes())
            if assistant.centroids is not None:
                tokens = assistant.centroids.ordering
                tokens.copy_(torch.arange(len(tokens), dtype=tokens.dtype, device=placement.device))
            sources = [source for source in sources if source.name != ORDERING]
            _make_up(sources, placement, seed=seed, progress=counted)
        else:
            files = CheckpointFiles.scan(directory, opening=lambda file: counted.reading(f"the header of {file}"))
            _read(sources, files, unused=unused_assistant_names(assistant), device=placement.device, progress=counted)
    for layer in assistant.decoder_layers():
        for matrix in (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down):
            matrix.matrix.loaded()
    if assistant.centroids is not None:
        _check_ordering(assistant.centroids.ordering, directory)
    return assistant


def load_dflash(
    directory: Path,
    target: Gemma4ForCausalLM,
    *,
    load_format: Literal["auto", "dummy"] = "auto",
    seed: int = 0,
) -> DFlash:
    """The drafter of the DFlash family in `directory` beside `target`, as `load_assistant` loads an assistant.

    Raises InvalidInput where it is the drafter of another model, and what `load_model` raises.
    """
    computed = str(target.dtype).removeprefix("torch.")
    read = read_drafter(directory)
    if not isinstance(read, DFlashArchitecture):
        raise InvalidInput(f"{directory} holds an MTP assistant, not a drafter of the DFlash family", field="drafter")
    drafter, placement = DFlash(read.model_copy(update={"dtype": computed}), target), target.placement
    sources, tokens = list(dflash_sources(drafter)), drafter.head.tokens
    with LoadProgress() as counted:
        if load_format == "dummy":
            counted.expect(drafter.parameter_bytes())
            _make_up((source for source in sources if source.name != TOKEN_MAP), placement, seed=seed, progress=counted)
            if tokens is not None:
                tokens.zero_()
        else:
            files = CheckpointFiles.scan(directory, opening=lambda file: counted.reading(f"the header of {file}"))
            _read(sources, files, unused=unused_dflash_names(drafter), device=placement.device, progress=counted)
    if tokens is not None:
        _map_tokens(tokens, directory, vocabulary=read.vocab_size)
    return drafter


def _map_tokens(offsets: Tensor, directory: Path, *, vocabulary: int) -> None:
    """What a file says of each token of an own head is how far behind it the target's lies: make it that token, in
    place. On a GPU an index outside an array ends the process."""
    offsets += torch.arange(len(offsets), dtype=offsets.dtype, device=offsets.device)
    inside, ordered = bool(((offsets >= 0) & (offsets < vocabulary)).all()), offsets.sort().values
    if not inside or bool((ordered[1:] == ordered[:-1]).any()):
        raise InvalidCheckpoint(
            f"checkpoint {directory}: tensor {TOKEN_MAP!r} does not name {len(offsets)} different tokens of "
            f"{vocabulary}"
        )


def _check_ordering(ordering: Tensor, directory: Path) -> None:
    """On a GPU an index outside an array ends the process."""
    expected = torch.arange(len(ordering), dtype=ordering.dtype, device=ordering.device)
    if not torch.equal(ordering.sort().values, expected):
        raise InvalidCheckpoint(f"checkpoint {directory}: tensor {ORDERING!r} does not name every token once")


def _make_up(sources: Iterable[WeightSource], placement: Placement, *, seed: int, progress: LoadProgress) -> None:
    weights = DummyWeights(seed=seed, device=placement.device, dtype=placement.dtype)
    for source in sources:
        progress.advance(weights.fill(source))


def _read(
    sources: Iterable[WeightSource], files: CheckpointFiles, *, unused: frozenset[str], device: torch.device,
    progress: LoadProgress, named: Callable[[str], str | None] = text_name,
) -> None:  # fmt: skip
    matched = _match(sources, files, unused=unused, named=named)
    read_weights(matched, device=device, progress=progress)
    check_contents(matched)


def _match(
    sources: Iterable[WeightSource],
    files: CheckpointFiles,
    *,
    unused: frozenset[str],
    named: Callable[[str], str | None],
) -> list[tuple[WeightSource, TensorEntry]]:
    """Pair every tensor the model needs with the one in the files, in file order. Raises InvalidCheckpoint."""
    wanted = {source.name: source for source in sources}
    matched: dict[str, tuple[WeightSource, TensorEntry]] = {}
    present: set[str] = set()
    faults: list[str] = []
    skipped: list[TensorEntry] = []
    named = tensor_names.text_name if files.gguf else named
    for tensor in files.tensors.values():
        name = named(tensor.name)
        present.add(name or tensor.name)
        if name is None or name in unused or name.endswith(UNUSED_ENDINGS):
            skipped.append(tensor)
        elif tensor.name.startswith((*IMAGE_PREFIXES, *AUDIO_PREFIXES)) and is_quantised(tensor):
            faults.append(
                f"tensor {tensor.name!r} in {tensor.file} ({tensor.dtype}) is quantised, and what makes rows of images "
                "and sounds is read in floats alone: use a checkpoint that keeps it so, or serve text alone"
            )
        elif name not in wanted:
            faults.append(f"unexpected tensor {tensor.name!r} in {tensor.file}")
        elif name in matched:
            faults.append(f"tensor {tensor.name!r} in {tensor.file} repeats {matched[name][1].name!r}")
        elif not _same_shape(tensor.shape, wanted[name].shape):
            shapes = f"has shape {list(tensor.shape)}, expected {list(wanted[name].shape)}"
            faults.append(f"tensor {tensor.name!r} in {tensor.file} {shapes}")
        else:
            matched[name] = (wanted[name], tensor)
    absent = (name for name, source in wanted.items() if name not in present and not source.optional)
    faults += [f"tensor {name!r} is in no file" for name in absent]
    if faults:
        more = f"; and {len(faults) - LISTED} more" if len(faults) > LISTED else ""
        raise InvalidCheckpoint(
            f"checkpoint {files.directory} does not match its config.json: {'; '.join(faults[:LISTED])}{more}"
        )
    if skipped:
        names = ", ".join(sorted({".".join(tensor.name.split(".")[:2]) for tensor in skipped}))
        logger.info("skipped %d tensors that text generation does not use (%s)", len(skipped), names)
    return list(matched.values())


def _same_shape(held: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """But for dimensions of one at the end: tools write a number as [] or [1], one for each row as [N] or [N, 1]."""
    while held[-1:] == (1,):
        held = held[:-1]
    while wanted[-1:] == (1,):
        wanted = wanted[:-1]
    return held == wanted
