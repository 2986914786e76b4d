"""A device that executes scheduled batches literally, with a stamp in the place of every cache row.

Memory is an array of bytes, each holding the stamp of the row last written over it: (text up to its position, position,
layer). Requests may read each other's rows where their texts are the same, and nowhere else. What a draft that is wrong
and those behind it write is nobody's. The device knows pages from its own block tables alone, which it fills from the
updates that steps bring. Executing a step follows the rules of modelserve_worker.batch layer by layer, and asserts that
attention reads exactly the rows it is permitted to: those of its own text, position and producing layer, in the whole
window and nowhere else. Where a drafter has rows of its own, each step finds those that a draft would read behind it,
and a decode those that one would read before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
from stamped_host import StampedHost

from modelserve.model.architecture import LayerKind
from modelserve.sizing.draft_pages import DraftCache, DraftPages
from modelserve.sizing.pages import CacheGeometry, KVCacheDtype, KVCacheLayout, PageSpec
from modelserve_worker.batch import (
    IN_FLIGHT,
    AdmittedRequest,
    SampledTokens,
    ScheduledBatch,
    TableUpdates,
    draft_stored_from,
    spare_from,
    stored_from,
)

POSITION_BITS, LAYER_BITS = 16, 6
NONSENSE = -2  # what a request says after a failed step
FULL_DRAFTS, WINDOW_DRAFTS = 40, 52  # numbers of a drafter's layers in stamps


@dataclass(frozen=True)
class StampedModel:
    """Layers of a small hybrid model: `kinds[i]` is layer i's kind; the last `shared` layers own no cache."""

    kinds: tuple[LayerKind, ...]
    shared: int = 0

    def producer(self, layer: int) -> int:
        owners = len(self.kinds) - self.shared
        if layer < owners:
            return layer
        return max(i for i in range(owners) if self.kinds[i] is self.kinds[layer])

    def last_reader(self, producer: int) -> int:
        return max(layer for layer in range(len(self.kinds)) if self.producer(layer) == producer)

    def geometry(
        self,
        *,
        window: int,
        global_tokens: int,
        sliding_tokens: int,
        global_row: int,
        sliding_row: int,
        draft: DraftCache | None = None,
        drafts: int = 0,
        first_ring_entry: int = 0,
    ) -> CacheGeometry:
        """Pages of `..._tokens` rows of `..._row` bytes per layer, with what a drafter wants that proposes at most
        `drafts` tokens."""

        def page(kind: LayerKind, tokens: int, row: int) -> PageSpec:
            owners = range(len(self.kinds) - self.shared)
            return PageSpec(kind, tokens, tuple(i for i in owners if self.kinds[i] is kind), (), tokens * row)

        global_page, pages = page(LayerKind.GLOBAL, global_tokens, global_row), None
        if draft is not None:
            pages = DraftPages.of(
                draft, ranks=1, target_bytes=global_page.page_bytes, global_tokens=global_tokens,
                sliding_tokens=sliding_tokens, sliding_window=window, most_drafts=drafts,
                first_ring_entry=first_ring_entry, token_multiple=1,
            )  # fmt: skip
            global_page = replace(global_page, draft_bytes=pages.page_bytes - global_page.page_bytes)
        return CacheGeometry(
            global_page=global_page,
            sliding_page=page(LayerKind.SLIDING, sliding_tokens, sliding_row),
            window=window,
            dtype=KVCacheDtype.BFLOAT16,
            layout=KVCacheLayout.KV,
            draft=pages,
        )


@dataclass
class Slot:
    """A row of the device's per-request state."""

    request_id: str
    text: list[int]  # what its tokens up to each position are, as numbers of texts
    sampled: int  # tokens since its first admission
    next_position: int | None = None  # known from its first share on
    last_token: int = IN_FLIGHT
    drafts: list[int] = field(default_factory=list)  # what is proposed to follow the last token
    lost: bool = False  # a step failed under it: whatever it computes until it is given away is discarded


class BlockTable:
    """Pages by [slot, entry]. What no update has named since the last loss points anywhere."""

    def __init__(self, slots: int, entries: int, pages: int) -> None:
        self.pages = np.zeros((slots, entries), dtype=np.int64)
        self.named = np.zeros((slots, entries), dtype=bool)
        self.capacity = pages

    def write(self, updates: TableUpdates) -> None:
        assert {updates.slots.dtype, updates.indices.dtype, updates.pages.dtype} == {np.dtype(np.int32)}
        cells = list(zip(updates.slots.tolist(), updates.indices.tolist(), strict=True))
        assert len(set(cells)) == len(cells), "an entry comes twice"
        self.pages[updates.slots, updates.indices] = updates.pages
        self.named[updates.slots, updates.indices] = True

    def lose(self, seed: int) -> None:
        self.named[:] = False
        self.pages[:] = np.random.default_rng(seed).integers(0, max(1, self.capacity), self.pages.shape)


class StampedDevice:
    """Memory of `pool_bytes` bytes, `slots` slots and requests of at most `longest` tokens.

    `token_at(request_id, position)` is the text that the requests have and will say; `whose(request_id)` names those
    whose texts are never the same. Shares of at most `commit_first`
    tokens write their sliding rows before they attend, as the rules allow up to commit_first_tokens(geometry). It
    proposes `drafts` tokens at a time, half of them right; with `when_asked` as many of them as a step asks for.

    Faults for mutation tests: `ignore_sharing` writes sliding rows after the producer's own attention, `window_error`
    widens the window that attention expects, `ring_error` the sliding block table, `skip_moves` does not copy moved
    pages, `skip_move_updates` does not write the table entries of pages that this step moved.
    """

    def __init__(
        self,
        model: StampedModel,
        geometry: CacheGeometry,
        pool_bytes: int,
        token_at: Callable[[str, int], int],
        *,
        slots: int,
        longest: int,
        whose: Callable[[str], str] = lambda _: "",
        commit_first: int = 0,
        drafts: int = 0,
        when_asked: bool = False,
        ignore_sharing: bool = False,
        window_error: int = 0,
        ring_error: int = 0,
        skip_moves: bool = False,
        skip_move_updates: bool = False,
    ) -> None:
        self.model = model
        self.geometry = geometry
        self.memory = np.full(pool_bytes, -1, dtype=np.int64)
        self.tables = {
            kind: BlockTable(slots, entries, pool_bytes // (geometry.page(kind).page_bytes or pool_bytes + 1))
            for kind, entries in (
                (LayerKind.GLOBAL, global_entries(geometry, longest)),
                (LayerKind.SLIDING, geometry.sliding_table_entries),
            )
        }
        self.token_at = token_at
        self.whose = whose
        self.longest = longest
        self.texts: dict[tuple[int | str, int], int] = {}  # numbers of texts, by the one before and its next token
        self.commit_first = commit_first
        self.drafts, self.when_asked = drafts, when_asked
        self.random = Random(0)
        self.accepted = 0  # drafts
        self.ignore_sharing = ignore_sharing
        self.skip_moves = skip_moves
        self.skip_move_updates = skip_move_updates
        self.window = geometry.window + window_error
        self.ring = max(1, geometry.sliding_table_entries + ring_error)
        self.slots: dict[int, Slot] = {}
        self.lost_steps: set[int] = set()
        self.rows_read = 0
        self.spare_rows = 0  # stored through spare slots
        self.reuses_in_place = 0  # rows that one step both read and wrote over
        self.host: StampedHost | None = None

    def lose(self, batch: ScheduledBatch, behind: Iterable[ScheduledBatch]) -> None:
        """The step failed before it did anything, and the tables with it; those `behind` run on what is left."""
        for admitted in batch.admitted:
            self.admit(admitted)
        for slot, _start, end, tokens, samples in self.shares(batch):
            self.advance(slot, end, tokens, samples)
            slot.lost = True
        for table in self.tables.values():
            table.lose(batch.step)
        self.lost_steps.update(step.step for step in behind)

    def execute(self, batch: ScheduledBatch) -> SampledTokens:
        for admitted in batch.admitted:
            self.admit(admitted)
        if self.host is not None:
            self.host.await_loads(batch.loads_awaited)
        for move in () if self.skip_moves else batch.page_moves:
            source, destination = self.page(move.kind, move.source), self.page(move.kind, move.destination)
            self.memory[destination] = self.memory[source].copy()
        if self.host is not None:
            self.host.launch(batch)
        self.write_tables(batch)
        steps = []
        spare = batch.spare_slots.tolist() or [-1] * batch.num_requests
        assert not set(spare) & {*batch.slots.tolist()}, "a spare slot is nobody's"
        for (slot, start, end, tokens, samples), row, spare_row in zip(
            self.shares(batch), batch.slots.tolist(), spare, strict=True
        ):
            slot.lost |= batch.step in self.lost_steps
            self.advance(slot, end, tokens, samples)
            right_end = end if slot.lost else slot.next_position
            steps.append(_Share(self, slot, row, start, end, spare_row, right_end))
        for step in steps:
            if step.end - step.start <= 1 + self.drafts:  # a chunk's pages are those that are needed behind it
                step.read_drafts(step.start)
        for layer, kind in enumerate(self.model.kinds):
            if kind is LayerKind.GLOBAL:
                self._global_layer(layer, steps)
            else:
                self._sliding_layer(layer, steps)
        for step in steps:
            step.write_drafts()
        for step in steps:
            step.read_drafts(step.right_end)
        drawing = [(step, samples) for step, samples in zip(steps, batch.drawn.tolist(), strict=True) if samples]
        sampled = [step.sample(samples) for step, samples in drawing]
        tokens = np.array([token for each in sampled for token in each], dtype=np.int32)
        if not self.drafts:
            return SampledTokens(batch.step, tokens, {})
        counts = np.array([len(each) for each in sampled], dtype=np.int32)
        asked = batch.asked.drafts if self.when_asked else self.drafts
        proposed = np.array([self.propose(step.slot, asked) for step, _ in drawing], dtype=np.int32)
        if not asked:
            return SampledTokens(batch.step, tokens, {}, counts)
        return SampledTokens(
            batch.step, tokens, {}, counts, proposed.reshape(len(counts), self.drafts), counts * 0 + asked
        )

    def propose(self, slot: Slot, count: int) -> list[int]:
        """What may follow its last token, `count` drafts and padding; a draft that is not a number is wrong."""
        known = slot.next_position + 1
        texts = [self.token_at(slot.request_id, known + ahead) for ahead in range(count)]
        slot.drafts = [text if text > 0 and self.random.random() < 0.6 else 0 for text in texts]
        return [*slot.drafts, *[0] * (self.drafts - count)]

    def admit(self, admitted: AdmittedRequest) -> None:
        """A slot is given away; the known tokens must be those of the request's text."""
        for position, token in enumerate(admitted.prompt_token_ids + admitted.output_token_ids):
            assert token == self.token_at(admitted.request_id, position), f"wrong known token at {position}"
        self.slots[admitted.slot] = Slot(
            admitted.request_id, self.text_of(admitted.request_id), len(admitted.output_token_ids)
        )

    def text_of(self, request_id: str) -> list[int]:
        text: list[int] = []
        before: int | str = self.whose(request_id)
        for position in range(self.longest):
            before = self.texts.setdefault((before, self.token_at(request_id, position)), len(self.texts))
            text.append(before)
        return text

    def write_tables(self, batch: ScheduledBatch) -> None:
        for kind, updates in (
            (LayerKind.GLOBAL, batch.global_updates),
            (LayerKind.SLIDING, batch.sliding_updates),
        ):
            if self.skip_move_updates:
                moved = [move.destination for move in batch.page_moves if move.kind is kind]
                kept = ~np.isin(updates.pages, moved)
                updates = TableUpdates(updates.slots[kept], updates.indices[kept], updates.pages[kept])
            self.tables[kind].write(updates)

    def shares(self, batch: ScheduledBatch) -> Iterable[tuple[Slot, int, int, list[int], int]]:
        """Slot, start, end, tokens and whether it samples, of each request of a well-formed step."""
        columns = (batch.slots, batch.starts, batch.lengths, batch.output_counts, batch.token_ids)
        assert {column.dtype for column in columns} == {np.dtype(np.int32)}
        lengths = batch.lengths.tolist()
        assert all(length >= 1 for length in lengths)
        assert sum(lengths) == batch.num_tokens
        few = 1 + self.drafts
        assert lengths == sorted(lengths, key=lambda length: length > few), "requests with few tokens come first"
        assert len(set(batch.slots.tolist())) == batch.num_requests, "one row per slot"
        first = 0
        for row, start, length, samples, outputs in zip(
            batch.slots.tolist(), batch.starts.tolist(), lengths, batch.drawn.tolist(), batch.output_counts.tolist(),
            strict=True,
        ):  # fmt: skip
            slot = self.slots[row]
            tokens = batch.token_ids[first : first + length].tolist()
            if tokens[0] == IN_FLIGHT and slot.next_position is not None and not slot.lost:
                assumed = start - slot.next_position  # drafts of the step before, which were wrong
                assert 0 <= assumed <= self.drafts, f"{slot.request_id} is at {slot.next_position}, not near {start}"
                start, outputs = start - assumed, outputs - assumed
            if not slot.lost:
                assert slot.next_position in (None, start), (
                    f"{slot.request_id} goes on at {start}, not {slot.next_position}"
                )
                assert slot.sampled == outputs, f"{slot.request_id} has {slot.sampled} tokens, not {outputs}"
            slot.next_position = start
            yield slot, start, start + length, tokens, samples
            first += length

    def advance(self, slot: Slot, end: int, tokens: list[int], samples: int) -> None:
        """Tokens fed must be those of the request's text, but for drafts: it goes on behind those that are right."""
        drafted = [token < IN_FLIGHT for token in tokens]
        known = [slot.last_token, *slot.drafts]
        tokens = [known[IN_FLIGHT - token] if token <= IN_FLIGHT and not slot.lost else token for token in tokens]
        start, right = slot.next_position, len(tokens)
        if not slot.lost:
            for position, token in enumerate(tokens, start):
                if token != self.token_at(slot.request_id, position):
                    assert drafted[position - start], f"wrong token at {position}"
                    right = position - start
                    break
        wrong = end - start - right
        self.accepted += sum(drafted) - wrong
        slot.next_position = end - wrong
        slot.sampled += samples - wrong if samples else 0

    def _global_layer(self, layer: int, steps: list[_Share]) -> None:
        producer = self.model.producer(layer)
        for step in steps:
            if producer == layer:
                step.write_global(layer)
        for step in steps:
            step.read_global(producer)

    def _sliding_layer(self, layer: int, steps: list[_Share]) -> None:
        producer = self.model.producer(layer)
        for step in steps:
            if step.commits_first and producer == layer:
                step.write_sliding(layer)
        for step in steps:
            step.read_sliding(producer)
        last = producer if self.ignore_sharing else self.model.last_reader(producer)
        for step in steps:
            if last == layer and not step.commits_first:
                step.write_sliding(producer)

    def page(self, kind: LayerKind, number: int) -> slice:
        size = self.geometry.page(kind).page_bytes
        start = number * size if kind is LayerKind.SLIDING else len(self.memory) - (number + 1) * size
        assert 0 <= number < len(self.memory) // size, f"{kind} page {number} is outside"
        return slice(start, start + size)


def global_entries(geometry: CacheGeometry, longest: int) -> int:
    """Of a slot's global table, a drafter's ring included."""
    ring = 0 if geometry.draft is None else geometry.draft.first_ring_entry + geometry.draft.ring_entries
    return max(geometry.global_pages(longest), ring)


class _Share:
    """One request's share of a step: byte addresses, in the first layer block, of the rows it reads and writes."""

    def __init__(
        self, device: StampedDevice, slot: Slot, row: int, start: int, end: int, spare: int, right_end: int
    ) -> None:
        self.device, self.slot, self.row = device, slot, row
        self.start, self.end, self.right_end = start, end, right_end
        geometry = device.geometry
        few = device.drafts > 0 and end - start <= 1 + device.drafts  # which are stored whole, before they attend
        self.few = few
        self.commits_first = few or end - start <= device.commit_first
        if geometry.global_page.layers:
            self.global_rows = self._addresses(LayerKind.GLOBAL, np.arange(end))
        if geometry.sliding_page.layers:
            self.old_positions = np.arange(max(0, start - device.window + 1), start)
            ends = np.array([end], dtype=np.int32)
            stored = start if few else max(start, int(stored_from(geometry, ends)[0]))
            self.kept_positions = np.arange(stored, end)
            self.sliding_old = self._addresses(LayerKind.SLIDING, self.old_positions)
            self.sliding_new = self._addresses(LayerKind.SLIDING, self.kept_positions)
            self.spare_positions = np.arange(
                max(start, int(spare_from(geometry, ends)[0])) if spare >= 0 else stored, stored
            )
            self.sliding_spare = self._addresses(LayerKind.SLIDING, self.spare_positions, row=spare)
            device.spare_rows += len(self.spare_positions)
            ring = geometry.sliding_table_entries * geometry.sliding_page.page_tokens
            oldest = max(0, start - geometry.window + 1)
            device.reuses_in_place += int((self.kept_positions - ring >= oldest).sum())

    def sample(self, drawn: int) -> list[int]:
        """The tokens that count, of those drawn of the last rows."""
        if self.slot.lost:
            self.slot.last_token = NONSENSE
            return [NONSENSE]
        positions = range(self.end - drawn + 1, self.right_end + 1)
        said = [self.device.token_at(self.slot.request_id, position) for position in positions]
        self.slot.last_token = said[-1]
        return said

    def write_global(self, layer: int) -> None:
        self._write(LayerKind.GLOBAL, layer, self.global_rows[self.start :], np.arange(self.start, self.end))

    def read_global(self, layer: int) -> None:
        self._read(LayerKind.GLOBAL, layer, self.global_rows[: self.right_end], np.arange(self.right_end))

    def write_sliding(self, layer: int) -> None:
        self._write(LayerKind.SLIDING, layer, self.sliding_new, self.kept_positions)
        self._write(LayerKind.SLIDING, layer, self.sliding_spare, self.spare_positions)

    def read_sliding(self, layer: int) -> None:
        self._read(LayerKind.SLIDING, layer, self.sliding_old, self.old_positions)

    def write_drafts(self) -> None:
        """Those of full layers all, those of window layers as far as the ring keeps them."""
        draft = self.device.geometry.draft
        if draft is None:
            return
        self._each_draft(self._write_at, self.start, self.end, full=True)
        stored = self.start if self.few else max(self.start, draft_stored_from(draft, self.end))
        self._each_draft(self._write_at, stored, self.end, full=False)

    def read_drafts(self, anchor: int) -> None:
        """What a draft reads whose anchor is there."""
        draft = self.device.geometry.draft
        if draft is not None and not self.slot.lost:
            self._each_draft(self._read_at, 0, anchor, full=True)
            self._each_draft(self._read_at, max(0, anchor - draft.window), anchor, full=False)

    def _each_draft(
        self, touch: Callable[[int, np.ndarray, np.ndarray], None], first: int, end: int, *, full: bool
    ) -> None:
        draft, spec, positions = self.device.geometry.draft, self.device.geometry.global_page, np.arange(first, end)
        assert draft is not None
        if full and draft.full_layers:
            rows = self._page_rows(positions // spec.page_tokens, positions % spec.page_tokens, draft.row_bytes)
            for layer in range(draft.full_layers):
                start = draft.full_offset_bytes + layer * draft.layer_bytes
                touch(FULL_DRAFTS + layer, rows + start, positions)
        elif not full and draft.window_layers:
            entries = draft.first_ring_entry + positions // draft.page_tokens % draft.ring_entries
            rows = self._page_rows(entries, positions % draft.page_tokens, draft.row_bytes)
            for layer in range(draft.window_layers):
                touch(WINDOW_DRAFTS + layer, rows + layer * draft.ring_layer_bytes, positions)

    def _page_rows(self, entries: np.ndarray, tokens: np.ndarray, size: int) -> np.ndarray:
        """Addresses [positions, row bytes] in the first layer block, by entries of the global table."""
        table, page_bytes = self.device.tables[LayerKind.GLOBAL], self.device.geometry.global_page.page_bytes
        if not self.slot.lost:
            assert table.named[self.row, entries].all(), "entries of a drafter that no update named"
        starts = len(self.device.memory) - (table.pages[self.row, entries] + 1) * page_bytes
        assert len(starts) == 0 or (starts.min() >= 0 and starts.max() + page_bytes <= len(self.device.memory))
        return (starts + tokens * size)[:, None] + np.arange(size)

    def _addresses(self, kind: LayerKind, positions: np.ndarray, *, row: int | None = None) -> np.ndarray:
        """Addresses [positions, row bytes], by the block table of its slot, or of another `row`."""
        row = self.row if row is None else row
        spec, table = self.device.geometry.page(kind), self.device.tables[kind]
        entries = positions // spec.page_tokens
        if kind is LayerKind.SLIDING:
            entries %= self.device.ring
        if not self.slot.lost:
            assert table.named[row, entries].all(), f"{kind} entries that no update named"
        pages = table.pages[row, entries]
        starts = pages * spec.page_bytes
        if kind is LayerKind.GLOBAL:
            starts = len(self.device.memory) - spec.page_bytes - starts
        assert len(starts) == 0 or (starts.min() >= 0 and starts.max() + spec.page_bytes <= len(self.device.memory))
        size = spec.layer_bytes // spec.page_tokens
        return (starts + positions % spec.page_tokens * size)[:, None] + np.arange(size)

    def _stamps(self, layer: int, positions: np.ndarray) -> np.ndarray:
        if self.slot.lost:
            return np.full((len(positions), 1), NONSENSE)
        texts = np.array(self.slot.text, dtype=np.int64)[positions]
        stamps = (texts << POSITION_BITS | positions) << LAYER_BITS | layer
        return np.where(positions < self.right_end, stamps, NONSENSE)[:, None]

    def _block(self, kind: LayerKind, layer: int) -> int:
        spec = self.device.geometry.page(kind)
        return spec.layers.index(layer) * spec.layer_bytes

    def _write(self, kind: LayerKind, layer: int, rows: np.ndarray, positions: np.ndarray) -> None:
        self._write_at(layer, rows + self._block(kind, layer), positions)

    def _write_at(self, layer: int, rows: np.ndarray, positions: np.ndarray) -> None:
        self.device.memory[rows] = self._stamps(layer, positions)

    def _read(self, kind: LayerKind, layer: int, rows: np.ndarray, positions: np.ndarray) -> None:
        if not self.slot.lost:
            self._read_at(layer, rows + self._block(kind, layer), positions)

    def _read_at(self, layer: int, rows: np.ndarray, positions: np.ndarray) -> None:
        found, wanted = self.device.memory[rows], self._stamps(layer, positions)
        assert (found == wanted).all(), f"layer {layer} of {self.slot.request_id} read rows that are not its own"
        self.device.rows_read += len(positions)
