"""A brute-force simulation of the paged cache, token by token. It imports nothing of what it checks.

A cache is described by plain numbers. Requests take pages when a token first needs one and, in sliding layers, give
pages back when no later token may read them; both kinds of page are bytes of one pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SimulatedKind:
    """One kind of layer on one rank: `planes` are the (columns, bytes of an element, bytes of a row's scale) kept."""

    layers: int
    heads: int
    planes: tuple[tuple[int, int, int], ...]
    page_tokens: int

    def page_bytes(self) -> int:
        """Every row of every plane of every layer is counted one by one; layer blocks end on 128 bytes."""
        total = 0
        for _ in range(self.layers):
            block = 0
            for columns, element, scale in self.planes:
                for _ in range(self.heads):
                    for _ in range(self.page_tokens):
                        block += columns * element + scale
            while block % 128:
                block += 1
            total += block
        return total


@dataclass
class SimulatedRequest:
    """Pages that one request holds, by their index in its sequence."""

    length: int = 0
    global_pages: set[int] = field(default_factory=set)
    sliding_pages: set[int] = field(default_factory=set)
    most_sliding: int = 0


class SimulatedPool:
    """Pool of bytes shared by both kinds."""

    def __init__(self, pool_bytes: int, full: SimulatedKind, sliding: SimulatedKind, window: int) -> None:
        self.free = pool_bytes
        self.full, self.sliding, self.window = full, sliding, window
        self.full_bytes, self.sliding_bytes = full.page_bytes(), sliding.page_bytes()
        self.requests: dict[int, SimulatedRequest] = {}

    def grow(self, name: int, length: int) -> bool:
        """Bring a request to `length` tokens, one by one; on the first page that does not fit it is taken out again.

        A new request's pages for its worst moment stay its own to the end: they are what admission commits.
        """
        request = self.requests.setdefault(name, SimulatedRequest())
        for token in range(request.length, length):
            if not self._write(request, token):
                self.finish(name)
                return False
        request.length = max(request.length, length)
        return True

    def finish(self, name: int) -> None:
        request = self.requests.pop(name)
        self.free += len(request.global_pages) * self.full_bytes + request.most_sliding * self.sliding_bytes

    def _write(self, request: SimulatedRequest, token: int) -> bool:
        if self.full.layers and token // self.full.page_tokens not in request.global_pages:
            if self.full_bytes > self.free:
                return False
            self.free -= self.full_bytes
            request.global_pages.add(token // self.full.page_tokens)
        if self.sliding.layers:
            # The query at `token` reads the window that ends with it; older pages are not needed any more.
            oldest = max(0, token - self.window + 1) // self.sliding.page_tokens
            request.sliding_pages = {page for page in request.sliding_pages if page >= oldest}
            request.sliding_pages.add(token // self.sliding.page_tokens)
            if len(request.sliding_pages) > request.most_sliding:
                if self.sliding_bytes > self.free:
                    return False
                self.free -= self.sliding_bytes
                request.most_sliding = len(request.sliding_pages)
        return True
