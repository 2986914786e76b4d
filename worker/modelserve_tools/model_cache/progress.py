"""How far a download is, and the small server that tells the operator while it runs."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from modelserve.caches.reports import PROGRESS_PATH, CacheProgress

WINDOW_S = 30.0  # of the rate: long enough to be steady, short enough to show that it stopped


class Progress:
    """Counts bytes of several threads. Bytes that were there before count as there, and not in the rate."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock, self._clock = threading.Lock(), clock
        self._total = self._there = self._fetched = 0
        self._moments: deque[tuple[float, int]] = deque([(clock(), 0)])  # when, bytes fetched by then
        self.commit = ""

    def expect(self, commit: str, total: int) -> None:
        """What is to be there in the end: bytes of all files of a commit."""
        with self._lock:
            self.commit, self._total = commit, total

    def found(self, count: int) -> None:
        """Bytes that an earlier try has left; negative: they turned out to be wrong."""
        with self._lock:
            self._there += count

    def fetched(self, count: int) -> None:
        """Bytes that arrived just now."""
        with self._lock:
            self._there += count
            self._fetched += count
            now = self._clock()
            if now - self._moments[-1][0] >= 1.0:
                self._moments.append((now, self._fetched))
            while len(self._moments) > 1 and now - self._moments[1][0] >= WINDOW_S:
                self._moments.popleft()

    @property
    def bytes_fetched(self) -> int:
        """Over the network, those included that were thrown away."""
        return self._fetched

    def told(self) -> CacheProgress:
        """Where it stands; the rate is that of the last half minute."""
        with self._lock:
            since, before = self._moments[0]
            seconds = max(self._clock() - since, 1e-3)
            rate = int((self._fetched - before) / seconds)
            left = max(self._total - self._there, 0)
            return CacheProgress(
                commit=self.commit,
                bytes=self._there,
                total_bytes=self._total,
                bytes_per_second=rate,
                seconds_left=-(-left // rate) if rate else None,
            )


@contextmanager
def told_on(port: int, progress: Progress) -> Iterator[int]:
    """Answer GET PROGRESS_PATH on a port (0: any) of every address while the context lasts; yields the port."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 5.0

        def do_GET(self) -> None:
            found = self.path == PROGRESS_PATH
            content = progress.told().model_dump_json(by_alias=True).encode() if found else b"{}"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *words: object) -> None:  # noqa: A002 - the base class's name
            """The operator asks every few seconds."""

    with ThreadingHTTPServer(("", port), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()
