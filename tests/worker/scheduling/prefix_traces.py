"""Named traces of prompts and answers, for what a prefix cache finds of them, and an oracle with unlimited memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from prefix_sessions import Sessions

from modelserve.sizing.pages import CacheGeometry

Tokens = list[int]


@dataclass
class Turn:
    """A prompt, its answer, and where the prompt's histories part."""

    prompt: Tokens
    answer: Tokens
    checkpoints: tuple[int, ...] = ()


class Words:
    """Fresh tokens. Answers, each token of which is a step, have a share `answers` of the length that is asked for."""

    def __init__(self, seed: int, answers: float) -> None:
        self.random = random.Random(seed)
        self._answers = answers

    def said(self, count: int) -> Tokens:
        return self(max(2, int(count * self._answers)))

    def __call__(self, count: int) -> Tokens:
        return self.random.choices(range(10, 250_000), k=count)


def chat(words: Words, *, system: Tokens, first: int, turn: int, answer: int, turns: int) -> Iterator[Turn]:
    history = system + words(first)
    for _ in range(turns):
        said = words.said(answer)
        yield Turn(history, said, (len(system),) if system else ())
        history = history + said + words(turn)


def agent(words: Words, *, system: Tokens, turns: int, calls: int) -> Iterator[Turn]:
    """Each question is answered after some calls, with thoughts that leave the history when the next one is asked."""
    history = system + words(300)
    for _ in range(turns):
        kept, prompt = history, history
        for _ in range(calls):
            thought, call, result = words.said(400), words.said(60), words(900)
            yield Turn(prompt, thought + call, (len(system), len(history)))
            kept, prompt = kept + call + result, prompt + thought + call + result
        said = words.said(300)
        yield Turn(prompt, said, (len(system), len(history)))
        history = kept + said + words(200)


def branching(words: Words, *, system: Tokens, context: int, branches: int) -> Iterator[Turn]:
    """A plan is made, then so many sub-tasks go on from it, each with one answer, and what they said is summed up."""
    history = system + words(context)
    plan = words.said(600)
    yield Turn(history, plan, (len(system),))
    answers: Tokens = []
    for _ in range(branches):
        said = words.said(400)
        yield Turn(history + plan + words(150), said, (len(system),))
        answers += said
    yield Turn(history + plan + answers, words.said(300), (len(system),))


def edited(words: Words, *, first: int, answer: int, turns: int) -> Iterator[Turn]:
    """A chat whose user asks for another answer, and writes the end of a question anew, before going on."""
    history = words(first)
    for _ in range(turns):
        said = words.said(answer)
        yield Turn(history, words.said(answer))
        yield Turn(history, words.said(answer))
        history = history[:-11] + words(20)
        yield Turn(history, said)
        history = history + said + words(200)


def questions(words: Words, documents: Sequence[Tokens], *, asked: int) -> Iterator[Turn]:
    """Of anybody about any document, some of which are asked about more often than others."""
    weights = [1 / (rank + 1) for rank in range(len(documents))]
    for _ in range(asked):
        (document,) = words.random.choices(documents, weights)
        yield Turn(document + words(100), words.said(200))


def interleaved(sessions: Iterator[Iterator[Turn]], *, at_once: int, seed: int) -> Iterator[Turn]:
    """Any of `at_once` sessions goes on; where one ends, the next one begins."""
    order = random.Random(seed)
    going = [session for _, session in zip(range(at_once), sessions, strict=False)]
    while going:
        place = order.randrange(len(going))
        turn = next(going[place], None)
        if turn is not None:
            yield turn
        elif (later := next(sessions, None)) is not None:
            going[place] = later
        else:
            going.pop(place)


def chats(*, sessions: int = 40, at_once: int = 40, turns: int = 6, answers: float = 1) -> Iterator[Turn]:
    words = Words(1, answers)
    system = words(1500)
    made = (chat(words, system=system, first=300, turn=200, answer=300, turns=turns) for _ in range(sessions))
    return interleaved(made, at_once=at_once, seed=1)


def agents(*, sessions: int = 10, answers: float = 1) -> Iterator[Turn]:
    words = Words(2, answers)
    system = words(6000)
    made = (agent(words, system=system, turns=3, calls=4) for _ in range(sessions))
    return interleaved(made, at_once=sessions, seed=2)


def siblings(*, prompts: int = 100, answers: float = 1) -> Iterator[Turn]:
    words = Words(3, answers)
    system = words(3000)
    made = (chat(words, system=system, first=500, turn=0, answer=200, turns=1) for _ in range(prompts))
    return interleaved(made, at_once=prompts, seed=3)


def long_sessions(*, sessions: int = 4, turns: int = 5, first: int = 65_000, answers: float = 1) -> Iterator[Turn]:
    words = Words(4, answers)
    made = (chat(words, system=[], first=first, turn=512, answer=150, turns=turns) for _ in range(sessions))
    return interleaved(made, at_once=sessions, seed=4)


def documents(*, texts: int = 12, length: int = 20_000, asked: int = 80, answers: float = 1) -> Iterator[Turn]:
    words = Words(5, answers)
    return questions(words, [words(length) for _ in range(texts)], asked=asked)


def branches(*, sessions: int = 12, answers: float = 1) -> Iterator[Turn]:
    words = Words(6, answers)
    system = words(4000)
    made = (branching(words, system=system, context=3000, branches=6) for _ in range(sessions))
    return interleaved(made, at_once=max(1, sessions // 2), seed=6)


def edits(*, sessions: int = 10, answers: float = 1) -> Iterator[Turn]:
    words = Words(7, answers)
    made = (edited(words, first=2500, answer=300, turns=4) for _ in range(sessions))
    return interleaved(made, at_once=sessions, seed=7)


TRACES: dict[str, Callable[..., Iterator[Turn]]] = {
    "chats": chats, "agents": agents, "siblings": siblings, "long": long_sessions, "documents": documents,
    "branches": branches, "edits": edits,
}  # fmt: skip


def found(trace: Iterator[Turn], geometry: CacheGeometry, pool_bytes: int, *, skip: int = 0) -> tuple[int, int]:
    """Prompt tokens, and those that were found, behind the first `skip` requests; each runs after the other."""
    sessions = Sessions(geometry, chunk=8192, longest=80_000, pool_bytes=pool_bytes, slots=4, stamped=False)
    tokens = hits = 0
    for number, turn in enumerate(trace):
        cached = sessions.ask(turn.prompt, turn.answer, checkpoints=turn.checkpoints)
        if number >= skip:
            tokens, hits = tokens + len(turn.prompt), hits + cached
    return tokens, hits


def known(trace: Iterator[Turn]) -> tuple[int, int]:
    """The same of an oracle that forgets nothing: what a prompt has in common with any request before it, of whose
    answers the last token has no rows. One token at least is computed."""
    texts: list[np.ndarray] = []
    tokens = hits = 0
    for turn in trace:
        prompt = np.array(turn.prompt)
        hits += max((_same(prompt[:-1], text) for text in texts), default=0)
        tokens += len(prompt)
        texts.append(np.array(turn.prompt + turn.answer[:-1]))
    return tokens, hits


def _same(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length
