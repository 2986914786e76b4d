"""Where a request ends, nobody may see differently from this server: what could be read in two ways is not answered."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from modelserve_worker.server.http.message_framing import StrictReceiveBuffer

SECOND = "GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"  # what a smuggler hides behind the first request
TEXT = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 2})
JSON = "Content-Type: application/json\r\n"
ROUTES = {
    "POST /v1/completions": JSON,
    "GET /health": "",
    "POST /v1/completions without a type": "",
    "GET /nowhere": "",
}
# Headers, the body behind them, and what the refusal names.
AMBIGUOUS = {
    "a length and a coding": ("Content-Length: 6\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\nX", "Transfer-Encoding"),
    "a coding and a length": ("transfer-encoding: chunked\r\ncontent-length: 6\r\n", "0\r\n\r\nX", "Transfer-Encoding"),
    "two lengths": ("Content-Length: 2\r\nContent-Length: 9\r\n", "{}", "Content-Length"),
    "the same length twice": ("Content-Length: 2\r\nContent-Length: 2\r\n", "{}", "Content-Length"),
    "a list of lengths": ("Content-Length: 2, 2\r\n", "{}", "Content-Length"),
    "a signed length": ("Content-Length: +2\r\n", "{}", "Content-Length"),
    "a negative length": ("Content-Length: -2\r\n", "{}", "Content-Length"),
    "a length in hexadecimal": ("Content-Length: 0x2\r\n", "{}", "Content-Length"),
    "an empty length": ("Content-Length: \r\n", "{}", "Content-Length"),
    "a length of other digits": ("Content-Length: \u0662\r\n", "{}", "Content-Length"),
    "a length in two lines": ("Content-Length:\r\n 2\r\n", "{}", "line"),
    "a folded header": ("X-Long: a\r\n b\r\nContent-Length: 2\r\n", "{}", "line"),
    "a header folded by a tab": ("X-Long: a\r\n\tTransfer-Encoding: chunked\r\n", "0\r\n\r\n", "line"),
    "a header line that ends with a line feed": ("X-A: b\nContent-Length: 2\r\n", "{}", "line feed"),
    "a carriage return within a line": ("X-A: b\rContent-Length: 2\r\n", "{}", "carriage return"),
    "chunked twice": ("Transfer-Encoding: chunked, chunked\r\n", "0\r\n\r\n", "Transfer-Encoding"),
    "two codings": (2 * "Transfer-Encoding: chunked\r\n", "0\r\n\r\n", "'chunked' and 'chunked'"),
    "another coding": ("Transfer-Encoding: gzip, chunked\r\n", "0\r\n\r\n", "Transfer-Encoding"),
    "identity": ("Transfer-Encoding: identity\r\nContent-Length: 2\r\n", "{}", "Transfer-Encoding"),
    "a space before the colon": ("Content-Length : 2\r\n", "{}", "header"),
}  # fmt: skip


def answers(server: Any, sent: str, *, half_close: bool = False) -> str:
    """All that the server says on one connection until it closes it."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(sent.encode())
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        received = b""
        while piece := connection.recv(65536):
            received += piece
    return received.decode()


def _refused_and_closed(received: str, *, names: str) -> bool:
    """One answer, a 400 in OpenAI's shape that `names` the fault, and the end of the connection."""
    head, _, body = received.partition("\r\n\r\n")
    if not head.startswith("HTTP/1.1 400 ") or "connection: close" not in head.lower():
        return False
    error = json.loads(body)["error"]  # which a second answer behind the first would break
    return (error["type"], error["code"], names in error["message"]) == ("invalid_request_error", "invalid_http", True)


@pytest.mark.parametrize("route", ROUTES)
def test_a_request_that_could_be_read_in_two_ways_is_refused_and_its_connection_closed(server: Any, route: str) -> None:
    line = " ".join(route.split()[:2])
    wrong = {}
    for shape, (headers, body, names) in AMBIGUOUS.items():
        sent = f"{line} HTTP/1.1\r\nHost: x\r\n{ROUTES[route]}{headers}\r\n{body}{SECOND}"
        received = answers(server, sent)
        if not _refused_and_closed(received, names=names):
            wrong[shape] = received
    assert wrong == {}
    assert server.engine.requests == []


def test_a_coding_in_http_1_0_is_refused(server: Any) -> None:
    """Where nobody knows chunks, who stands before this server may have seen another end."""
    sent = f"POST /v1/completions HTTP/1.0\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    assert _refused_and_closed(answers(server, sent + SECOND), names="HTTP/1.0")


def test_a_head_of_bare_line_feeds_is_refused(server: Any) -> None:
    for line_end in ("\n", "\r\n"):
        sent = f"GET /health HTTP/1.1{line_end}Host: x\n\n"
        assert _refused_and_closed(answers(server, sent + SECOND), names="line feed")


def test_chunks_that_could_be_read_in_two_ways_are_not(server: Any) -> None:
    chunks = {
        "line feeds": "5\nhello\n0\n\n",
        "no end of a chunk": "5\r\nhello0\r\n\r\n",
        "signed": "+2\r\n{}\r\n0\r\n\r\n",
        "hexadecimal prefix": "0x2\r\n{}\r\n0\r\n\r\n",
        "line feed in a trailer": "0\r\nX: y\n\r\n",
    }
    wrong = {}
    for shape, body in chunks.items():
        sent = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n{body}"
        received = answers(server, sent + SECOND, half_close=True)
        if not _refused_and_closed(received, names=""):
            wrong[shape] = received
    assert wrong == {}
    assert server.engine.requests == []


def test_a_running_stream_is_not_hurt(server: Any) -> None:
    server.engine.step_seconds = 0.005
    asked = {"model": "tiny", "prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=asked) as stream:
        lines = stream.iter_lines()
        next(lines)
        answers(server, f"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1, 2\r\n\r\n{SECOND}")
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_a_fault_behind_a_good_request_is_refused_in_its_turn(server: Any) -> None:
    good = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{JSON}Content-Length: {len(TEXT)}\r\n\r\n{TEXT}"
    received = answers(server, f"{good}GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1, 2\r\n\r\n{SECOND}")
    assert [part[:3] for part in received.split("HTTP/1.1 ")[1:]] == ["200", "400"]


@pytest.mark.parametrize("sent_in_pieces_of", [1, 7, 4096])
def test_honest_requests_in_any_pieces_are_answered(server: Any, sent_in_pieces_of: int) -> None:
    chunks = f"3\r\n{TEXT[:3]}\r\n{len(TEXT) - 3:x};extension=1\r\n{TEXT[3:]}\r\n0\r\nX-Trailer: y\r\n\r\n"
    sent = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{JSON}Transfer-Encoding: Chunked\r\n\r\n{chunks}"
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{JSON}Content-Length: {len(TEXT)}\r\n\r\n{TEXT}"
        "GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(sent), sent_in_pieces_of):
            connection.sendall(sent[at : at + sent_in_pieces_of].encode())
        received = b""
        while piece := connection.recv(65536):
            received += piece
    assert [part[:3] for part in received.decode().split("HTTP/1.1 ")[1:]] == ["200", "200", "200"]


def test_a_body_is_never_searched_for_line_ends() -> None:
    """Only heads and trailers are looked at: a body may hold anything."""
    buffer = StrictReceiveBuffer()
    buffer += b"POST / HTTP/1.1\r\nHost: x\r\n\r\n{\n\n\r}"
    assert buffer.maybe_extract_lines() == [b"POST / HTTP/1.1", b"Host: x"]
    assert bytes(buffer) == b"{\n\n\r}"


def test_a_path_with_another_slash_is_a_404_and_never_a_redirect(server: Any) -> None:
    """A redirect would be built from what the client calls this host."""
    with httpx.Client(base_url=server.url, headers={"host": "evil.example"}) as client:
        for method in ("GET", "POST"):
            for path in ("/v1/chat/completions/", "/v1/completions/", "/health/", "/v1//models", "/v1/messages/"):
                answer = client.request(method, path)
                assert (answer.status_code, "location" in answer.headers) == (404, False), path
                error = answer.json()["error"]
                assert error["type"] == "not_found_error" or path.startswith("/v1/messages")
                assert error["message"] == f"no such route: {method} {path}"


def test_a_target_in_absolute_form_is_its_path(server: Any) -> None:
    """As a proxy asks (RFC 9112, 3.2.2)."""
    statuses = {
        "http://x/health": "200",
        "HTTP://other.example:8000/health": "200",
        "https://x/version?a=b": "200",
        "http://x": "404",
    }
    for target, status in statuses.items():
        received = answers(server, f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert received.startswith(f"HTTP/1.1 {status} "), received
        assert status == "200" or "no such route: GET /" in received


def test_headers_that_are_too_long_are_a_431(server: Any) -> None:
    received = answers(server, f"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: {'x' * 70_000}")
    assert received.startswith("HTTP/1.1 431 ")
    assert "its headers are too long" in received
