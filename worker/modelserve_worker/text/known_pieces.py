"""Token ids of texts that were encoded before, since chats and agents send their histories again.

A piece is the text between two control tokens, which a tokenizer encodes by itself: its ids depend on nothing else, so
those of an earlier request are those of this one. A turn of a history is such a piece, as the rest of it is.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict

LEAST_CHARACTERS = 64  # what is shorter is encoded as fast as it is looked up
_ENTRY_BYTES = 400  # of the objects around a text and its ids


class KnownPieces:
    """At most `most_bytes` of texts and ids, those that were asked for last. Any thread may call it.

    Nobody finds what was encoded for another namespace: who is answered sooner would know what others have sent.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._ids: OrderedDict[tuple[str, str], array[int]] = OrderedDict()  # by namespace and text, the oldest first
        self._lock = threading.Lock()
        self.bytes = 0

    def find(self, namespace: str, text: str) -> array[int] | None:
        """The ids of `text`, which nobody may change; None where they are not known."""
        if len(text) < LEAST_CHARACTERS:
            return None
        with self._lock:
            ids = self._ids.get((namespace, text))
            if ids is not None:
                self._ids.move_to_end((namespace, text))
            return ids

    def keep(self, namespace: str, text: str, ids: array[int]) -> None:
        """Remember them, in place of what has not been asked for the longest; not what would take a quarter of all."""
        size = self._bytes(namespace, text, ids)
        if len(text) < LEAST_CHARACTERS or 4 * size > self._most_bytes:
            return
        with self._lock:
            if (namespace, text) in self._ids:
                return
            self._ids[namespace, text] = ids
            self.bytes += size
            while self.bytes > self._most_bytes:
                (whose, old), dropped = self._ids.popitem(last=False)
                self.bytes -= self._bytes(whose, old, dropped)

    @staticmethod
    def _bytes(namespace: str, text: str, ids: array[int]) -> int:
        return _ENTRY_BYTES + len(namespace) + sys.getsizeof(text) + sys.getsizeof(ids)
