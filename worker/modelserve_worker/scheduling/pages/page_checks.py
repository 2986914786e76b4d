"""Cached pages that a request without numbers has read: whether they have rows that are not finite.

The device is asked with the next step and answers with its result. Rows that one keeps are never written again, so a
page that was found sound needs no more suspicion: it is looked at again after each such request, as something else may
have damaged it, and is of use meanwhile. Before it was looked at for the first time it is not: nobody resumes there.
So whoever makes numbers go wrong at will costs others a step or two of hits behind a page, once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from modelserve_worker.batch import PageCheck
from modelserve_worker.scheduling.pages.arena import Page


class PageChecks:
    """One thread calls it."""

    def __init__(self) -> None:
        self.suspects: set[Page] = set()  # not to be read until the device has answered
        self._due: dict[Page, int] = {}  # first rows of each to look at
        self._sent: dict[int, dict[Page, int]] = {}  # by step

    @property
    def due(self) -> bool:
        """Whether there is something to ask."""
        return bool(self._due)

    def ask(self, rows: Mapping[Page, int]) -> None:
        """Look at the first rows of these pages, as many as are given, those that somebody keeps."""
        for page, count in rows.items():
            if page.keepers and not any(count <= sent.get(page, 0) for sent in self._sent.values()):
                self._due[page] = max(count, self._due.get(page, 0))
                if count > page.sound_rows:
                    self.suspects.add(page)

    def take(self, step: int) -> tuple[PageCheck, ...]:
        """What goes out with a step, by the numbers that pages have now."""
        if not self._due:
            return ()
        there = {page: rows for page, rows in self._due.items() if page.keepers}
        self.suspects.difference_update(self._due.keys() - there.keys())
        self._due, self._sent[step] = {}, there
        return tuple(PageCheck(page.kind, page.number, rows) for page, rows in there.items())

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
                page.sound_rows = max(page.sound_rows, rows)
        self.suspects -= sent.keys() - self._due.keys()
        return found

    def failed(self, step: int) -> None:
        """The step failed: ask again."""
        for page, rows in self._sent.pop(step, {}).items():
            self._due[page] = max(rows, self._due.get(page, 0))

    def clear(self) -> None:
        """Nobody keeps any of them."""
        self.suspects.clear()
        self._due.clear()
        self._sent.clear()
