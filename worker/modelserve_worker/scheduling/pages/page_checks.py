"""Cached pages that a request without numbers has read: whether they have rows that are not finite.

The device is asked with the next step and answers with its result. Rows that one keeps are never written again, so a
page that was found sound needs no more suspicion: it is looked at again after each such request, as something else may
have damaged it, and is of use meanwhile. Before it was looked at for the first time it is not: nobody resumes there.
So whoever makes numbers go wrong at will costs others a step or two of hits behind a page, once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from modelserve_worker.batch import NOT_IN_A_RING, PageCheck
from modelserve_worker.scheduling.pages.arena import Page


class CheckedRows(NamedTuple):
    """Rows of a page, [first, end) of those from its first one on. Of a page in a drafter's ring, which has
    `ring_tokens`: those of these positions that have their place in it (draft_ring.py), of two rounds at most."""

    first: int
    end: int
    ring_tokens: int = 0

    def are_in(self, others: tuple[int, int] | None) -> bool:
        return others is not None and others[0] <= self.first and self.end <= others[1]

    def and_those(self, others: tuple[int, int] | None) -> CheckedRows:
        if others is None:
            return self
        return self._replace(first=min(self.first, others[0]), end=max(self.end, others[1]))

    def check(self, page: Page) -> PageCheck:
        """By the number that the page has now."""
        size = self.ring_tokens
        if not size:
            return PageCheck(page.kind, page.number, self.end, NOT_IN_A_RING)
        begun = self.first % size
        rounds = self.first // size != (self.end - 1) // size
        rows = size - begun + (self.end - 1) % size + 1 if rounds else self.end - self.first
        return PageCheck(page.kind, page.number, min(size, rows), begun)


class PageChecks:
    """One thread calls it."""

    def __init__(self) -> None:
        self.suspects: set[Page] = set()  # not to be read until the device has answered
        self._due: dict[Page, CheckedRows] = {}  # rows of each to look at
        self._sent: dict[int, dict[Page, CheckedRows]] = {}  # by step

    @property
    def due(self) -> bool:
        """Whether there is something to ask."""
        return bool(self._due)

    def ask(self, rows: Mapping[Page, CheckedRows]) -> None:
        """Look at these rows of pages, of those that somebody keeps."""
        for page, asked in rows.items():
            if page.keepers and not any(asked.are_in(_span(sent.get(page))) for sent in self._sent.values()):
                self._due[page] = asked.and_those(_span(self._due.get(page)))
                if not asked.are_in(page.sound):
                    self.suspects.add(page)

    def take(self, step: int) -> tuple[PageCheck, ...]:
        """What goes out with a step, by the numbers that pages have now."""
        if not self._due:
            return ()
        there = {page: rows for page, rows in self._due.items() if page.keepers}
        self.suspects.difference_update(self._due.keys() - there.keys())
        self._due, self._sent[step] = {}, there
        return tuple(rows.check(page) for page, rows in there.items())

    def answered(self, step: int, unsound: Collection[int]) -> set[Page] | None:
        """The device has looked, and found rows that are no numbers in those of the step's pages: these. None where it
        was not asked."""
        sent = self._sent.pop(step, None)
        if sent is None:
            return None
        found = set()
        for index, (page, rows) in enumerate(sent.items()):
            if index in unsound:
                found.add(page)
            else:
                page.sound = rows.and_those(page.sound)[:2]
        self.suspects -= sent.keys() - self._due.keys()
        return found

    def failed(self, step: int) -> None:
        """The step failed: ask again."""
        for page, rows in self._sent.pop(step, {}).items():
            self._due[page] = rows.and_those(_span(self._due.get(page)))

    def clear(self) -> None:
        """Nobody keeps any of them."""
        self.suspects.clear()
        self._due.clear()
        self._sent.clear()


def _span(rows: CheckedRows | None) -> tuple[int, int] | None:
    return None if rows is None else rows[:2]
