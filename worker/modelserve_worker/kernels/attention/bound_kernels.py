"""Attention of the layers of one kind on a GPU: what the table of kernels chose, bound to its launches.

Which kernel runs is decided there and nowhere else: here the first choice that takes a step's segments is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Self

from torch import Tensor

from modelserve.model.architecture import LayerKind
from modelserve.sizing.backends.attention import PAIRS, AttentionShape
from modelserve.sizing.backends.attention_kernels import Attended, attention_choices
from modelserve.sizing.backends.table import AttentionTile, Choice, KernelTable, Operation
from modelserve_worker.kernels.attention.arguments import LayerPages
from modelserve_worker.kernels.attention.paged_layout import LayerRows
from modelserve_worker.kernels.step import Step


@dataclass(frozen=True, slots=True)
class _Bound:
    choice: Choice
    launch: Callable[..., Any]

    @property
    def tile(self) -> AttentionTile:
        assert self.choice.tile is not None
        return self.choice.tile


class AttentionKernels:
    """Decodes and chunks of layers that are alike. Arguments by name are those of `triton_launches`'s launches, but
    for the tile, which is the choice's."""

    def __init__(self, choices: Iterable[Choice]) -> None:
        self.choices = tuple(choices)
        self._bound: dict[Operation, tuple[_Bound, ...]] = {}
        for choice in self.choices:
            module, function = choice.launch.split(":")
            bound = _Bound(choice, getattr(import_module(module), function))
            self._bound[choice.operation] = (*self._bound.get(choice.operation, ()), bound)

    @classmethod
    def of(cls, table: KernelTable, kind: LayerKind) -> Self:
        """Of a model's layers of a kind."""
        return cls(each for each in table.choices if each.subject is kind and each.tile is not None)

    @classmethod
    def over(cls, rows: LayerRows, *, capability: int, query_heads: int, pairs: int = PAIRS) -> Self:
        """Of other queries over layers of this layout, such as an assistant's: of profile fast whatever the model's,
        since what it proposes is verified. Raises UnknownGenerationError where GPUs of that capability are not known.
        """
        turned = 0 if rows.window else pairs
        shape = AttentionShape(rows.heads, query_heads, rows.width, rows.window, rows.dtype, rows.v_only, turned)
        asked = Attended(shape, capability)
        return cls(choice for operation in Operation for choice in attention_choices(operation, asked))

    @property
    def decode_keys(self) -> int:
        """Keys of a tile of decodes, which tables of rotations are made for."""
        (keys,) = {
            bound.tile.keys
            for operation in (Operation.DECODE_ATTENTION, Operation.VERIFY_ATTENTION)
            for bound in self._bound[operation]
        }
        return keys

    @property
    def chunk_rows(self) -> int:
        """Query rows of a block of chunks, which steps are described in."""
        chunks = (*self._bound[Operation.CHUNK_ATTENTION], *self._bound.get(Operation.SPAN_ATTENTION, ()))
        (rows,) = {bound.tile.rows for bound in chunks}
        return rows

    def decode(self, q: Tensor, output: Tensor, step: Step, *, beside: bool = False, **layer: Any) -> None:
        """Rows of the few-row segments of q [T, Hq, D] over pages -> the same rows of `output`."""
        assert step.decode is not None
        few = step.decode.most_rows == 1
        choices = self._bound[Operation.DECODE_ATTENTION if few else Operation.VERIFY_ATTENTION]
        bound = next(each for each in choices if each.choice.takes(step.decode.slots.numel()))
        bound.launch(q, output, step, tile=bound.tile, beside=beside, **layer)

    def chunk(
        self, q: Tensor, output: Tensor, step: Step, *, pages: LayerPages, scratch: Tensor | None, **layer: Any
    ) -> bool:
        """Rows of all chunks of q [T, Hq, D] -> the same rows of `output`. Returns whether attention of the step's
        decodes may run beside the last of the kernels. Steps with `last_keys` have kernels of their own in sliding
        layers."""
        assert step.chunks is not None
        rows = pages.rows
        spans = step.last_keys is not None and bool(rows.window)
        choices = self._bound[Operation.SPAN_ATTENTION if spans else Operation.CHUNK_ATTENTION]
        room = _room(scratch, rows)
        keys = step.chunks.window_keys(q.shape[0], rows.window)
        bound = next(each for each in choices if each.choice.most_keys is None or keys <= room)
        beside: bool = bound.launch(q, output, step, tile=bound.tile, pages=pages, scratch=scratch, **layer)
        return beside


def _room(scratch: Tensor | None, rows: LayerRows) -> int:
    """Keys whose K and V a step may decode into the scratch, which is for the context that is served; the table's
    `most_keys` is that of the longest."""
    return 0 if scratch is None else scratch.numel() // (2 * rows.heads * rows.width)
