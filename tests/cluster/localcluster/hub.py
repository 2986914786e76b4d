"""A stand-in for the Hugging Face Hub that real clients talk to: repositories of folders, whose branches may move."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

_INFO = re.compile(r"/api/models/(?P<repository>[^/]+/[^/]+)/revision/(?P<revision>[^/?]+)")
_TREE = re.compile(r"/api/models/[^/]+/[^/]+/tree/(?P<revision>[^/?]+)")
_FILE = re.compile(r"/(?P<repository>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>[^/?]+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class Sent(NamedTuple):
    """One answered GET of a file."""

    commit: str
    name: str
    bytes: int
    whole: bool


@dataclass
class Hub:
    """`commits`: folder of each commit; `branches`: the commit that each stands for now. Every repository has them.

    `moves_to`: where a branch moves as soon as somebody has asked for its commit alone, not for a list of its files.
    """

    commits: dict[str, Path] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    url: str = ""
    ranges: bool = True  # whether parts of files are served, as some mirrors do not
    asked: list[str] = field(default_factory=list)  # revisions whose commit and files were asked for
    sent: list[Sent] = field(default_factory=list)
    moves_to: str | None = None
    token: str | None = None  # that every request must bring
    gated: bool = False  # whether the token, too, may not read the files
    damaged: dict[str, int] = field(default_factory=dict)  # how many more answers of a file have a byte that is wrong
    between: Callable[[str, int], None] | None = None  # called with a file's name and the bytes of an answer so far
    block_bytes: int = 1 << 16  # between two of these calls

    @property
    def bytes_sent(self) -> int:
        """Of files."""
        return sum(each.bytes for each in self.sent)

    def commits_sent(self, *, weights: bool = False) -> set[str]:
        """Commits whose files were downloaded; with `weights` those of which a whole weight file was."""
        return {each.commit for each in self.sent if not weights or (each.whole and each.name.endswith(".safetensors"))}

    def files(self, revision: str) -> dict[str, Path]:
        """Raises KeyError for a revision that is not there."""
        folder = self.commits[self.branches.get(revision, revision)]
        return {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}


@contextmanager
def hub(address: str = "127.0.0.1") -> Iterator[Hub]:
    """An empty Hub that listens there, on a free port, while the context lasts."""
    served = Hub()

    class Handler(_Handler):
        hub = served

    with ThreadingHTTPServer((address, 0), Handler) as server:
        served.url = f"http://{address}:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        if self.hub.token is not None and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            told = {"X-Error-Message": "Invalid credentials in Authorization header"}
            self._send(401, b"{}", told if "Authorization" in self.headers else {})
            return
        if self.hub.gated:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            return
        try:
            if (asked := _INFO.match(self.path)) is not None:
                self._info(asked["repository"], asked["revision"])
            elif (asked := _TREE.match(self.path)) is not None:
                self._tree(asked["revision"])
            elif (asked := _FILE.match(self.path)) is not None:
                self._file(asked["revision"], asked["name"])
            else:
                raise KeyError(self.path)
        except KeyError:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        except ConnectionError:  # who needs no more of a file hangs up
            self.close_connection = True

    def _info(self, repository: str, revision: str) -> None:
        files = self.hub.files(revision)
        self.hub.asked.append(revision)
        siblings = [_listed(name, path) for name, path in files.items()]
        known: dict[str, Any] = {"id": repository, "modelId": repository, "siblings": siblings, "private": False}
        known["sha"] = self.hub.branches.get(revision, revision)
        self._send(200, json.dumps(known).encode(), {"Content-Type": "application/json"})
        if self.hub.moves_to is not None and revision in self.hub.branches and "blobs=" not in self.path:
            self.hub.branches[revision] = self.hub.moves_to

    def _tree(self, revision: str) -> None:
        files = self.hub.files(revision).items()
        listed = [
            {"type": "file", "path": name, "size": path.stat().st_size, "oid": f"{revision}-{name}"}
            for name, path in files
        ]
        self._send(200, json.dumps(listed).encode(), {"Content-Type": "application/json"})

    def _file(self, revision: str, name: str) -> None:
        content = whole = self.hub.files(revision)[name].read_bytes()
        commit = self.hub.branches.get(revision, revision)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{commit}-{name}"', "Accept-Ranges": "bytes"}
        asked = _RANGE.fullmatch(self.headers.get("Range") or "")
        if self.hub.damaged.get(name, 0) and self.command == "GET":
            self.hub.damaged[name] -= 1
            content = bytes([content[0] ^ 1]) + content[1:]
        if asked is None or not self.hub.ranges:
            sent = self._send(200, content, headers, name)
        else:
            start, end = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
            where = {"Content-Range": f"bytes {start}-{end}/{len(content)}"}
            content = content[start : end + 1]
            sent = self._send(206, content, headers | where, name)
        if self.command == "GET":
            self.hub.sent.append(Sent(commit, name, sent, whole=sent == len(whole)))

    def _send(self, status: int, content: bytes, headers: dict[str, str], name: str = "") -> int:
        """`name`: of the file whose content it is. Bytes of the content that were sent before who asked was gone."""
        self.send_response(status)
        for header, value in headers.items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return 0
        sent = 0
        try:
            while sent < len(content):
                self.wfile.write(content[sent : sent + self.hub.block_bytes])
                sent = min(sent + self.hub.block_bytes, len(content))
                if name and self.hub.between is not None:
                    self.hub.between(name, sent)
        except ConnectionError:
            self.close_connection = True
        return sent

    def log_request(self, *answered: object) -> None:
        pass


def _listed(name: str, path: Path) -> dict[str, Any]:
    """As the Hub lists a file: weights are kept by Git LFS, the rest by Git."""
    content = path.read_bytes()
    told: dict[str, Any] = {"rfilename": name, "size": len(content)}
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    if not name.endswith((".safetensors", ".gguf")):
        return {**told, "blobId": blob}
    sha256 = hashlib.sha256(content).hexdigest()
    return {**told, "blobId": blob, "lfs": {"sha256": sha256, "size": len(content), "pointerSize": 134}}
