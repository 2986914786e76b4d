"""Grammars that no finite text matches, or only one that no answer has room for, and repetitions of nothing.

Such a grammar compiles; its answers go on until they are cut or too complex to follow.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import count

from modelserve_worker.grammar.lark_rules import Part, UnreadableRulesError, read_rules

MAX_SHORTEST_TEXT = 1 << 20  # characters; four for each token of the longest context
MOST_EMPTY_REPETITIONS = 16  # of what may be empty: each is one more way to read the same text
_START = "start"


def endless_rules(source: str) -> str | None:
    """Why no answer can be whole under these rules, or what in them has no bound; None where nothing is found.

    What is found is certain. Rules that cannot be read here are not judged.
    """
    try:
        rules = read_rules(source)
    except UnreadableRulesError:
        return None
    if _START not in rules:
        return None
    shortest = _shortest_texts(rules, unknown=0)
    names = _reached(rules)
    for name in names:
        length = shortest.get(rules[name], math.inf)
        if math.isinf(length):
            circle = _circle(name, rules, shortest)
            way = ", which needs ".join(f"{each!r:.80}" for each in [*circle[1:4], circle[0]])
            return (
                f"no finite text matches rule {circle[0]!r:.80}: it needs {way}, and so on without end. Give it an end"
            )
        if length > MAX_SHORTEST_TEXT:
            return (
                f"the shortest text of rule {name!r:.80} has {length} characters; the limit is {MAX_SHORTEST_TEXT}. "
                "Let it be shorter"
            )
    longest_guess = _shortest_texts(rules, unknown=1)  # what is empty even so is certainly empty
    for name in names:
        for part in _parts(rules[name]):
            most = math.inf if part.most is None else part.most
            bounded = part.kind == "repeat" and MOST_EMPTY_REPETITIONS < most < math.inf
            if bounded and longest_guess.get(part.parts[0]) == 0:
                return (
                    f"rule {name!r:.80} repeats up to {part.most} times what may be empty; the limit is "
                    f"{MOST_EMPTY_REPETITIONS}. Repeat what has at least one character"
                )
    return None


def _shortest_texts(rules: Mapping[str, Part], *, unknown: int) -> dict[Part, int]:
    """The fewest characters of a text of each part; parts without a text are left out.

    `unknown` is what a regular expression or token counts for. Parts are settled in the order of their lengths
    (Knuth's generalisation of Dijkstra's algorithm, 1977), each edge once.
    """
    users: dict[Part, list[Part]] = defaultdict(list)
    missing: dict[Part, int] = {}
    heap: list[tuple[int, int, Part]] = []
    order = count()

    def offer(part: Part, length: int) -> None:
        heapq.heappush(heap, (length, next(order), part))

    for body in rules.values():
        for part in _parts(body):
            if part.kind == "rule":
                if part.name in rules:
                    users[rules[part.name]].append(part)
                else:
                    offer(part, unknown)  # imported
            for inner in part.parts:
                users[inner].append(part)
            missing[part] = len(part.parts)
            if part.kind in ("text", "unknown"):
                offer(part, part.length if part.kind == "text" else unknown)
            elif (part.kind == "repeat" and part.least == 0) or (part.kind == "sequence" and not part.parts):
                offer(part, 0)
    sums: dict[Part, int] = defaultdict(int)
    settled: dict[Part, int] = {}
    while heap:
        length, _, part = heapq.heappop(heap)
        if part in settled:
            continue
        settled[part] = length
        for user in users[part]:
            missing[user] -= 1
            sums[user] += length
            if user.kind in ("rule", "choice"):
                offer(user, length)
            elif user.kind == "repeat":
                offer(user, length * user.least)
            elif missing[user] == 0:
                offer(user, sums[user])
    return settled


def _circle(name: str, rules: Mapping[str, Part], shortest: Mapping[Part, int]) -> list[str]:
    """The rules of a circle that `name` leads into, each needing the next one and the last the first."""
    passed: list[str] = []
    while name not in passed:
        passed.append(name)
        part = rules[name]
        while part.kind != "rule":
            part = next(inner for inner in part.parts if inner not in shortest)
        name = part.name
    return passed[passed.index(name) :]


def _reached(rules: Mapping[str, Part]) -> list[str]:
    names, pending = [_START], [_START]
    seen = {_START}
    while pending:
        for part in _parts(rules[pending.pop()]):
            if part.kind == "rule" and part.name in rules and part.name not in seen:
                seen.add(part.name)
                names.append(part.name)
                pending.append(part.name)
    return names


def _parts(body: Part) -> Iterator[Part]:
    pending = [body]
    while pending:
        part = pending.pop()
        yield part
        pending += part.parts
