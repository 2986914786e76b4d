"""Training batches: exercises rendered, packed into rows of one length, made by worker processes while the GPU trains.

A batch depends on (seed, phase, stream, number of workers) only, so a run can be repeated.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from decoder import IGNORED, Rows
from lessons import lesson, primer
from rendering import Rendered, Renderer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from word_tokenizer import build_word_tokenizer

from modelserve_tools.evaluation.exercise import Exercise
from modelserve_tools.evaluation.long_skills import ITEM_TOKENS, needle, recall
from modelserve_tools.evaluation.short_skills import SHORT_SKILLS

LEAST_LESSON = 64  # tokens; a shorter rest of a row is filled with short skills
PAD = 0


@dataclass(frozen=True)
class Stream:
    """Rows of `length` tokens, `rows` of them in a batch, with at most `answers` trained tokens each.

    `lessons` is the share of rows that are recall lessons of the row's length, `single` the share with recall and
    needle questions as the evaluation asks them, `primers` that of rows full of primers; the other rows are packed with
    short skills. `alike` is the share of documents whose keys are much alike. Primers have up to `items` items, and
    twice as many every `doubling` batches (0: always the same).
    """

    length: int
    rows: int
    answers: int
    lessons: float
    single: float = 0.0
    primers: float = 0.0
    items: int = 2
    doubling: int = 0
    alike: float = 1.0
    skills: Mapping[str, float] | None = None  # weights of the short skills; None: all alike

    def most_items(self, batch: int) -> int:
        return int(self.items * 2.0 ** (batch / self.doubling)) if self.doubling else self.items


class _Writer:
    """Makes the exercises of one worker."""

    def __init__(self, stream: Stream, *, variant: str, rng: random.Random) -> None:
        self._stream = stream
        self._rng = rng
        self._renderer = Renderer(build_word_tokenizer(), variant=variant)
        weights = stream.skills or dict.fromkeys(SHORT_SKILLS, 1.0)
        self._skills, self._weights = list(weights), list(weights.values())

    def row(self, *, batch: int) -> list[Rendered]:
        """Documents that fit into one row of batch number `batch`; the last one may be cut at the row's end."""
        stream, kind = self._stream, self._rng.random()
        documents: list[Rendered] = []
        room = stream.length
        if kind < stream.lessons:
            documents.append(self._lesson(room))
        elif kind < stream.lessons + stream.single:
            documents += self._questions(room)
        elif kind < stream.lessons + stream.single + stream.primers:
            documents += self._primers(room, most_items=stream.most_items(batch))
        room -= sum(len(document.token_ids) for document in documents)
        misses = 0
        while room > 0 and misses < 4:
            document = self._short()
            if len(document.token_ids) > room:
                misses += 1
                continue
            documents.append(document)
            room -= len(document.token_ids)
        return documents

    def _lesson(self, room: int) -> Rendered:
        return self._renderer.render(lesson(self._rng, words=room - 8, alike=self._alike()))

    def _questions(self, room: int) -> Iterator[Rendered]:
        """One question at nearly the row's length, or several at shorter, log-uniform distances."""
        while room > 2 * LEAST_LESSON:
            skill = self._rng.choice(("needle", "recall"))
            longest = room - LEAST_LESSON - min(room // 4, 500)
            distance = int(longest ** self._rng.uniform(0.4, 1.0))
            made = (
                recall(self._rng, distance, alike=self._alike()) if skill == "recall" else needle(self._rng, distance)
            )
            document = self._renderer.render(made)
            if len(document.token_ids) > room:
                return
            room -= len(document.token_ids)
            yield document

    def _primers(self, room: int, *, most_items: int) -> Iterator[Rendered]:
        while room > 2 * LEAST_LESSON:
            most = min(most_items, (room - LEAST_LESSON) // (2 * ITEM_TOKENS))
            items = self._rng.randint(1, most)
            words = items * ITEM_TOKENS + self._rng.randint(0, min(room // 2 - LEAST_LESSON // 2, 200))
            document = self._renderer.render(primer(self._rng, words=words, items=items, alike=self._alike()))
            room -= len(document.token_ids)
            yield document

    def _alike(self) -> bool:
        return self._rng.random() < self._stream.alike

    def _short(self) -> Rendered:
        skill = self._rng.choices(self._skills, self._weights)[0]
        exercise: Exercise = SHORT_SKILLS[skill](self._rng)
        return self._renderer.render(exercise)


def pack(documents_of_rows: list[list[Rendered]], *, length: int, answers: int) -> Rows:
    """Rows of `length` tokens. Answers beyond the row's end, or beyond `answers` per row, are not trained."""
    count = len(documents_of_rows)
    input_ids = torch.full((count, length), PAD)
    positions = torch.arange(length).expand(count, length).clone()
    documents = torch.full((count, length), -1)
    predict = torch.zeros((count, answers), dtype=torch.int64)
    labels = torch.full((count, answers), IGNORED)
    for row, rendered in enumerate(documents_of_rows):
        start, trained = 0, []
        for number, document in enumerate(rendered):
            ids = document.token_ids[: length - start]
            span = slice(start, start + len(ids))
            input_ids[row, span] = torch.tensor(ids)
            positions[row, span] = torch.arange(len(ids))
            documents[row, span] = number
            trained += [start + p for first, end in document.answers for p in range(first, min(end, len(ids)))]
            start += len(ids)
        places = torch.tensor(trained[:answers])
        predict[row, : len(places)] = places - 1
        labels[row, : len(places)] = input_ids[row, places]
    return Rows(input_ids, positions, documents, predict, labels)


def pack_final_answers(conversations: Sequence[Rendered], *, window: int) -> Rows:
    """A row for each, its final answer trained to the end. Rows are whole windows, as sliding layers take them."""
    finals = [Rendered(each.token_ids, each.answers[-1:]) for each in conversations]
    longest = max(len(final.token_ids) for final in finals)
    answers = max(end - start for final in finals for start, end in final.answers)
    return pack([[final] for final in finals], length=-(-longest // window) * window, answers=answers)


class _Batches(IterableDataset[Rows]):
    def __init__(self, stream: Stream, *, variant: str, seed: str) -> None:
        self._stream, self._variant, self._seed = stream, variant, seed

    def __iter__(self) -> Iterator[Rows]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        writer = _Writer(self._stream, variant=self._variant, rng=random.Random(f"{self._seed} worker {first}"))
        for batch in itertools.count(first, step):  # workers take turns
            rows = [writer.row(batch=batch) for _ in range(self._stream.rows)]
            yield pack(rows, length=self._stream.length, answers=self._stream.answers)


def batches(stream: Stream, *, variant: str, seed: str, workers: int) -> Iterator[Rows]:
    """Endless batches; `workers` processes make them (0: this one does)."""
    data = _Batches(stream, variant=variant, seed=f"training {seed}")
    loader: DataLoader[Rows] = DataLoader(
        data, batch_size=None, num_workers=workers, prefetch_factor=4 if workers else None
    )
    return iter(loader)
