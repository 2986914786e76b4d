"""Reading weights: several shards and several ranges of a shard at once, only the bytes that this rank keeps.

A region of a parameter is cut into pieces of a few MiB. Threads take them in turn, from all files side by side, and
read each with positioned reads, which hold no lock of the interpreter. On the CPU a piece whose bytes are those of the
parameter goes straight there; every other goes through a buffer, of which each thread has two. On a GPU these are
pinned, and a thread reads into one while the other's copy is on its way.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from modelserve.model.checkpoint_files import TensorEntry
from modelserve.sizing.host.weight_readers import STAGING_BYTES_PER_THREAD, WEIGHT_READERS
from modelserve_worker.models.weight_source import WeightSource
from modelserve_worker.weights.files import InvalidCheckpoint, stored_dtype
from modelserve_worker.weights.gguf_blocks import BLOCKS_BY_NAME, GROUP, BlockTargets, elements_in
from modelserve_worker.weights.progress import LoadProgress

BUFFERS = 2  # per thread: one is filled while the other is copied
PIECE_BYTES = STAGING_BYTES_PER_THREAD // BUFFERS
LEAST_RUN_BYTES = 1 << 12  # shorter runs are read together with what lies between them: a page is read anyway


@dataclass(frozen=True, slots=True)
class Piece:
    """Some equal runs of bytes in a file, and the elements of a parameter that they become.

    Run i is the `width` bytes at `start` + i * `stride`; `target` is [runs, elements of a run]. Runs of `blocks` become
    what these say, and `target` has the elements of it.
    """

    tensor: TensorEntry
    dtype: torch.dtype
    start: int
    width: int
    stride: int
    target: Tensor
    blocks: BlockTargets | None = None

    @property
    def size(self) -> int:
        """Bytes of the runs."""
        return self.target.shape[0] * self.width

    @property
    def spans(self) -> bool:
        """Whether the bytes between the runs are read too."""
        return self.width == self.stride or self.width < LEAST_RUN_BYTES

    @property
    def row_bytes(self) -> int:
        """Bytes of a run as it is read."""
        return self.stride if self.spans else self.width


def pieces_of(source: WeightSource, tensor: TensorEntry) -> Iterator[Piece]:
    """What this rank reads of one tensor, in file order. Raises InvalidCheckpoint for a dtype that is not loaded."""
    dtype, kind = stored_dtype(tensor, source.dtypes), BLOCKS_BY_NAME.get(tensor.dtype)
    entry, span = (dtype.itemsize, 1) if kind is None else (kind.bytes, kind.elements)  # what a read does not cut
    of_each = 1 if kind is None else elements_in(source.parameter)
    for region in source.regions:
        outer, inner = math.prod(source.shape[: region.dim]), math.prod(source.shape[region.dim + 1 :])
        length, begin = region.length * inner, region.source * inner
        skip = begin % span  # of a share that begins within a block
        rows = _rows(source.parameter, outer, region.target * inner // of_each, length // of_each)
        scales = None
        if source.scales is not None:
            scales = _rows(source.scales, outer, region.target * inner // GROUP, length // GROUP)
        width, stride = -(-(skip + length) // span), source.shape[region.dim] * inner // span
        if width == stride and length == width * span and rows.is_contiguous():  # one run
            rows, scales = rows.view(1, -1), None if scales is None else scales.view(1, -1)
            length, width, stride, outer = outer * length, outer * width, outer * stride, 1
        first = tensor.start + begin // span * entry
        for run, count, left, right in _blocks(outer, width, stride, entry):
            start = first + (run * stride + left) * entry
            step = stride if count > 1 else right - left
            low, high = max(0, left * span - skip), min(length, right * span - skip)
            target, blocks = rows[run : run + count, low // of_each : high // of_each], None
            if kind is not None:
                beside = None if scales is None else scales[run : run + count, low // GROUP : high // GROUP]
                blocks = BlockTargets(kind, target, beside, skip if left == 0 else 0)
            yield Piece(tensor, dtype, start, (right - left) * entry, step * entry, target, blocks)


def _rows(parameter: Tensor, outer: int, begin: int, length: int) -> Tensor:
    """[outer, length] of a parameter: from `begin` on of each."""
    return parameter.view(outer, -1).narrow(1, begin, length)


def _blocks(outer: int, width: int, stride: int, itemsize: int) -> Iterator[tuple[int, int, int, int]]:
    """(first run, runs, first element, last element of each) of blocks that fit in a buffer; sizes in elements."""
    row, most = stride if width * itemsize < LEAST_RUN_BYTES else width, PIECE_BYTES // itemsize
    if row <= most:
        step = most // row
        yield from ((begin, min(step, outer - begin), 0, width) for begin in range(0, outer, step))
        return
    for begin in range(outer):
        yield from ((begin, 1, left, min(left + most, width)) for left in range(0, width, most))


def read_weights(
    matched: Sequence[tuple[WeightSource, TensorEntry]], *, device: torch.device, progress: LoadProgress
) -> None:
    """Fill the parameters. Raises InvalidCheckpoint that names file, tensor and byte when one cannot be read.

    Staging takes WEIGHT_READERS * STAGING_BYTES_PER_THREAD bytes of host memory at most, all of it given back.
    """
    by_file: dict[Path, list[Piece]] = {}
    for source, tensor in matched:
        by_file.setdefault(tensor.file, []).extend(pieces_of(source, tensor))
    progress.expect(sum(piece.size for pieces in by_file.values() for piece in pieces))
    with ExitStack() as stack:
        descriptors = {}
        for file in by_file:
            descriptors[file] = stack.enter_context(file.open("rb", buffering=0)).fileno()
        readers = _Readers(_side_by_side(by_file.values()), descriptors, device, progress)
        with ThreadPoolExecutor(WEIGHT_READERS, thread_name_prefix="weights-reader") as pool:
            running = [pool.submit(readers.run) for _ in range(WEIGHT_READERS)]
        failed = [error for each in running if (error := each.exception()) is not None]
    if failed:
        raise failed[0]
    if device.type == "cuda":
        torch._C._host_emptyCache()  # torch would keep the pinned buffers


def _side_by_side(files: Iterable[list[Piece]]) -> Iterator[Piece]:
    """Pieces of all files in turn, each file's in its order."""
    rows = itertools.zip_longest(*files)
    return (piece for row in rows for piece in row if piece is not None)


class _Readers:
    """What the threads of one load share."""

    def __init__(
        self, pieces: Iterator[Piece], descriptors: dict[Path, int], device: torch.device, progress: LoadProgress
    ) -> None:
        self._pieces = pieces
        self._descriptors = descriptors
        self._device = device
        self._progress = progress
        self._lock = threading.Lock()
        self._failed = False

    def run(self) -> None:
        """Read pieces until there are no more, or until a thread has failed."""
        try:
            staging = _Staging(self._device)
            while (piece := self._next()) is not None:
                self._take(piece, staging)
            staging.finish()
        except BaseException:
            self._failed = True
            raise

    def _take(self, piece: Piece, staging: _Staging) -> None:
        self._progress.reading(f"tensor {piece.tensor.name!r} of {piece.tensor.file}")
        try:
            if staging.needed(piece):
                staging.fill(piece, self._read)
            else:
                self._read(piece, piece.target[0])
        except OSError as error:
            raise InvalidCheckpoint(f"{piece.tensor.file}: {_what(piece)} cannot be read: {error.strerror}") from error
        self._progress.advance(piece.size)

    def _next(self) -> Piece | None:
        with self._lock:
            return None if self._failed else next(self._pieces, None)

    def _read(self, piece: Piece, into: Tensor) -> None:
        """The piece's runs, with what lies between them where it `spans`, back to back into `into` (contiguous)."""
        view = memoryview(into.view(torch.uint8).numpy().data).cast("B")
        descriptor, row = self._descriptors[piece.tensor.file], piece.row_bytes
        if piece.spans:
            last = piece.tensor.end - piece.start  # behind the last run may lie nothing more
            self._read_run(descriptor, piece, view[: min(len(view), last)], piece.start)
            return
        for run in range(len(view) // row):
            self._read_run(descriptor, piece, view[run * row : (run + 1) * row], piece.start + run * piece.stride)

    def _read_run(self, descriptor: int, piece: Piece, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done:]], offset + done)
            if not count:
                raise InvalidCheckpoint(
                    f"{piece.tensor.file} is cut short: {_what(piece)} cannot be read, since the file ends at byte "
                    f"{os.fstat(descriptor).st_size}: download it again"
                )
            done += count


def _what(piece: Piece) -> str:
    return f"tensor {piece.tensor.name!r} at byte {piece.start}"


class _Staging:
    """Two host buffers of one thread, and on a GPU the stream on which they are copied to the device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._buffers: list[Tensor] = []
        self._copied: list[torch.cuda.Event | None] = [None] * BUFFERS
        self._turn = 0
        self._stream: torch.cuda.Stream | None = None
        if self._on_gpu:
            torch.cuda.set_device(device)  # of this thread: pinned memory belongs to a device's context too
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.default_stream(device))

    def needed(self, piece: Piece) -> bool:
        """False where the file's bytes can be read straight into the parameter."""
        target = piece.target
        one_run = target.shape[0] == 1 and target.is_contiguous()
        return self._on_gpu or not one_run or piece.dtype != target.dtype or piece.blocks is not None

    def fill(self, piece: Piece, read: Callable[[Piece, Tensor], None]) -> None:
        """Read into the buffer whose turn it is, then start its copy into the parameter."""
        self._turn = (self._turn + 1) % BUFFERS
        if not self._buffers:
            self._buffers = [
                torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=self._on_gpu) for _ in range(BUFFERS)
            ]
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        runs, elements = piece.target.shape
        buffer = self._buffers[self._turn][: runs * piece.row_bytes]
        read(piece, buffer)
        rows = buffer.view(piece.dtype).view(runs, -1)
        if self._stream is None:
            if piece.blocks is not None:
                piece.blocks.store(rows[:, : piece.width])
            else:
                piece.target.copy_(rows[:, :elements])
            return
        with torch.cuda.stream(self._stream):
            if piece.blocks is not None:
                piece.blocks.store(rows.to(self._device, non_blocking=True)[:, : piece.width])
                self._record()
                return
            straight = piece.target.is_contiguous() and rows.shape[1] == elements and piece.dtype == piece.target.dtype
            # Whole rows go over; what is cut or converted is cut and converted on the device.
            source = rows if straight else rows.to(self._device, non_blocking=True)[:, :elements]
            piece.target.copy_(source, non_blocking=True)
            self._record()

    def _record(self) -> None:
        """Mark where the copy of the buffer whose turn it is ends."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._copied[self._turn] = event

    def finish(self) -> None:
        """Wait for the copies; a failed one is raised here."""
        if self._stream is not None:
            self._stream.synchronize()
