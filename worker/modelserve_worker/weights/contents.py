"""What tensors of a checkpoint must hold, tried once they are read: shapes, orders, zero points, and scales that are
numbers. What is wrong is refused by the tensor's name and the place in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from modelserve.model.checkpoint_files import TensorEntry
from modelserve_worker.models.weight_source import Region, WeightSource
from modelserve_worker.weights.files import InvalidCheckpoint
from modelserve_worker.weights.gguf_blocks import BLOCKS_BY_NAME, GROUP

CHECKED_BYTES = 1 << 22  # of a file that are in memory at a time
CHECKED_SCALES = 1 << 22  # at a time, in float32
LISTED = 4  # numbers that are repeated


def check_contents(matched: Sequence[tuple[WeightSource, TensorEntry]]) -> None:
    """Raise InvalidCheckpoint for the first tensor that does not hold what it must."""
    sound: dict[int, bool] = {}  # scales of all matrices or experts that are held together, by where they begin
    for source, tensor in matched:
        if source.values is not None:
            _check_values(source, source.values, tensor)
        if source.word is not None:
            _check_words(source.word, tensor)
        blocks = BLOCKS_BY_NAME.get(tensor.dtype)
        if source.scale is None and blocks is None:
            continue
        scales = source.parameter if source.scales is None else source.scales  # those of tables are in the elements
        whole = scales if scales._base is None else scales._base
        if (place := whole.data_ptr()) not in sound:
            sound[place] = not any(bool(bad.any()) for _, bad in _bad_scales(whole, unsigned=source.unsigned))
        for region in () if sound[place] else source.regions:
            counted = region
            if blocks is not None and source.scales is not None and region.dim == len(source.shape) - 1:
                counted = _in_groups(region)
            _check_scales(source, scales, counted, tensor)


def _check_values(source: WeightSource, values: Tensor, tensor: TensorEntry) -> None:
    """The shape of a packed matrix; the groups of its inputs in the order in which they lie."""
    held = source.parameter.cpu().long()
    if torch.equal(held, values):
        return
    if len(values) <= LISTED:
        raise InvalidCheckpoint(
            f"{tensor.file}: tensor {tensor.name!r} holds {held.tolist()}, config.json gives {values.tolist()}: the "
            "weights are of another model"
        )
    at = int((held != values).nonzero()[0])
    raise InvalidCheckpoint(
        f"{tensor.file}: tensor {tensor.name!r} holds {held[at]} at [{at}] where config.json, without desc_act, gives "
        f"{values[at]}: use a checkpoint without an activation order, or correct desc_act"
    )


def _check_words(word: int, tensor: TensorEntry) -> None:
    """Zero points that are the same everywhere, of a checkpoint that says it is symmetric."""
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        expected = word.to_bytes(4, "little") * (CHECKED_BYTES // 4)
        for start in range(tensor.start, tensor.end, CHECKED_BYTES):
            held = file.read(min(CHECKED_BYTES, tensor.end - start))
            if held == expected[: len(held)]:
                continue
            at = next(i for i in range(0, len(held), 4) if held[i : i + 4] != expected[:4])
            found = int.from_bytes(held[at : at + 4], "little")
            raise InvalidCheckpoint(
                f"{tensor.file}: tensor {tensor.name!r} holds the zero points {found:#010x} at word "
                f"{(start - tensor.start + at) // 4}, a symmetric checkpoint {word:#010x} everywhere: correct sym in "
                "its config.json"
            )


def _in_groups(region: Region) -> Region:
    """The same inputs, counted in groups that share a scale."""
    counted = (count // GROUP for count in (region.source, region.target, region.length))
    return Region(region.dim, *counted)


def _check_scales(source: WeightSource, scales: Tensor, region: Region, tensor: TensorEntry) -> None:
    """What this rank has read of scales: a number each, and where they are `unsigned`, not below zero."""
    held = scales.narrow(region.dim, region.target, region.length)
    for first, bad in _bad_scales(held, unsigned=source.unsigned):
        if not bool(bad.any()):
            continue
        place = bad.nonzero()[0].tolist()
        place[0] += first
        value = float(held[tuple(place)])
        place[region.dim] += region.source
        wanted = "numbers of 0 or more" if source.unsigned else "numbers"
        raise InvalidCheckpoint(
            f"{tensor.file}: tensor {tensor.name!r} holds {value} at {place}; scales are {wanted}: download it again, "
            "or use another checkpoint"
        )


def _bad_scales(held: Tensor, *, unsigned: bool) -> Iterator[tuple[int, Tensor]]:
    """Some of the first dimension at a time: where they begin, and which of them are wrong."""
    step = max(1, CHECKED_SCALES // max(1, held[0].numel()))
    for first in range(0, held.shape[0], step):
        values = held[first : first + step].float()
        bad = ~values.isfinite()
        yield first, bad | (values < 0) if unsigned else bad
