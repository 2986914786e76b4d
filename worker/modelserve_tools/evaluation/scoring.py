"""Texts of a reference, scored by two endpoints: what is asked, of which text, and what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from modelserve.quality.divergence import TokenDivergence, token_divergence
from modelserve_tools.evaluation.cells import Cell
from modelserve_tools.evaluation.client import ContextTooLong, EndpointError, EndpointGone, chat_body
from modelserve_tools.evaluation.measurement import ExerciseSource
from modelserve_tools.evaluation.reference import ReferenceText
from modelserve_tools.evaluation.scores import NoScores, ScoringEndpoint

MOST_SCORED_TOKENS = 8192
"""Texts that are longer are not scored: an answer has some 1,000 bytes a token. Exercises still ask at any length."""


class TokenizersDiffer(Exception):  # noqa: N818 - reads as the reason it states
    """The same messages are other tokens to the two endpoints, so that what they say of tokens cannot be compared."""


@dataclass
class CellScores:
    """Of one cell's texts: the divergence of each token of answers and of prompts, and why texts are missing."""

    cell: Cell
    texts: int = 0
    answers: list[TokenDivergence] = field(default_factory=list)
    prompts: list[TokenDivergence] = field(default_factory=list)
    left: str | None = None
    errors: int = 0
    first_error: str | None = None

    def add(self, found: Sequence[TokenDivergence], *, prompt_tokens: int) -> None:
        """A text's tokens but its first. A cell that was left while it was on its way takes none."""
        if self.left is None:
            self.prompts += found[: prompt_tokens - 1]
            self.answers += found[prompt_tokens - 1 :]
            self.texts += 1

    def leave(self, reason: str) -> None:
        """Drop the whole cell: those of its texts that fit are the shorter ones, no sample of it."""
        self.left = reason
        self.texts, self.errors, self.first_error = 0, 0, None
        self.answers.clear()
        self.prompts.clear()

    def failed(self, error: str) -> None:
        if self.left is None:
            self.errors += 1
            self.first_error = self.first_error or error


class ReferenceSpeaker:
    """Makes the texts: prompts as the reference spells them, its greedy answers, and its scores of both."""

    def __init__(self, endpoint: ScoringEndpoint, *, exercise_of: ExerciseSource, thinking_tokens: int) -> None:
        self._endpoint = endpoint
        self._exercise_of = exercise_of
        self._thinking_tokens = thinking_tokens

    async def text(self, cell: Cell, index: int) -> ReferenceText:
        """Raises EndpointError and its kinds, ContextTooLong also above MOST_SCORED_TOKENS."""
        try:
            exercise = self._exercise_of(cell, index)
        except ValueError as error:  # the skill cannot bridge this distance
            raise ContextTooLong(str(error)) from error
        prompt = await self._endpoint.tokens(exercise)
        max_tokens = chat_body(exercise, model="", thinking_tokens=self._thinking_tokens)["max_tokens"]
        require_scorable(len(prompt))
        answer = await self._endpoint.answer(prompt, max_tokens=max_tokens)
        tokens = (*prompt, *answer)
        require_scorable(len(tokens))
        rows = await self._endpoint.scores(tokens)
        return ReferenceText(
            skill=cell.skill, distance=cell.distance, index=index, prompt=prompt, answer=answer,
            rows=tuple(dict(row) for row in rows),
        )  # fmt: skip


class Comparer:
    """Scores texts of a reference by the served endpoint."""

    def __init__(self, endpoint: ScoringEndpoint, *, exercise_of: ExerciseSource) -> None:
        self._endpoint = endpoint
        self._exercise_of = exercise_of

    async def compare(self, text: ReferenceText, scores: CellScores) -> None:
        """Adds the text's tokens. Raises EndpointError and its kinds, and TokenizersDiffer."""
        await self._require_same_prompt(text)
        tokens = (*text.prompt, *text.answer)
        rows = await self._endpoint.scores(tokens)
        found = [token_divergence(*each) for each in zip(tokens[1:], text.rows, rows, strict=True)]
        scores.add(found, prompt_tokens=len(text.prompt))

    async def _require_same_prompt(self, text: ReferenceText) -> None:
        served = await self._endpoint.tokens(self._exercise_of(Cell(text.skill, text.distance, 1), text.index))
        if served == text.prompt:
            return
        pairs = zip(text.prompt, served, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text.prompt), len(served)))
        ours, theirs = (str(ids[place]) if place < len(ids) else "the end" for ids in (text.prompt, served))
        raise TokenizersDiffer(
            f"tokenizers or chat templates differ: exercise {text.index} of {text.skill} is {len(text.prompt)} tokens "
            f"to the reference and {len(served)} to the served endpoint, from place {place} on ({ours}, {theirs}); "
            "compare checkpoints with the same tokenizer.json and chat template"
        )


def require_scorable(tokens: int) -> None:
    """Raises ContextTooLong."""
    if tokens > MOST_SCORED_TOKENS:
        raise ContextTooLong(f"{tokens} tokens are more than the {MOST_SCORED_TOKENS} that a scored text may have")


Job = tuple[CellScores, Callable[[], Awaitable[ReferenceText]]]
Take = Callable[[ReferenceText, CellScores], Awaitable[None]]


def asked(cells: Sequence[CellScores], speaker: ReferenceSpeaker) -> Iterator[Job]:
    """The texts of all cells, each asked for when its turn comes."""
    for scores in cells:
        for index in range(scores.cell.n):
            yield scores, partial(speaker.text, scores.cell, index)


def recorded(texts: Iterator[ReferenceText], cells: list[CellScores]) -> Iterator[Job]:
    """A recording's texts; their cells are appended to `cells` as they are met."""
    by_cell: dict[tuple[str, int | None], CellScores] = {}
    for text in texts:
        key = text.skill, text.distance
        if key not in by_cell:
            by_cell[key] = CellScores(Cell(*key, n=1))
            cells.append(by_cell[key])

        async def given(text: ReferenceText = text) -> ReferenceText:
            return text

        yield by_cell[key], given


async def for_each_text(
    jobs: Iterator[Job],
    take: Take,
    *,
    concurrency: int,
    on_progress: Callable[[int], None],
) -> None:
    """`take` every text, `concurrency` at a time.

    A text that fails is counted with its cell; one that is too long ends its cell. Raises what holds for every text:
    NoScores, EndpointGone, TokenizersDiffer, and what reading a recording raises.
    """
    done = 0

    async def worker() -> None:
        nonlocal done
        for scores, text in jobs:
            if scores.left is None:
                try:
                    await take(await text(), scores)
                except ContextTooLong as error:
                    scores.leave(str(error))
                except (NoScores, EndpointGone):
                    raise
                except EndpointError as error:
                    scores.failed(str(error))
            done += 1
            on_progress(done)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker())
    except ExceptionGroup as failures:  # each holds for every text: the first says it
        raise failures.exceptions[0] from None
