"""Images of requests by address: the same prompt as of their bytes, refused by name, and a slow host is its own
request's alone."""

from __future__ import annotations

import asyncio
import base64
import ssl
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from live_server import EchoEngine, LiveServer, serve
from seeing import ARCHITECTURE, asking, image, picture, text, write_text_files
from sounds import TOWERED, noise, saved

from modelserve.model.audio import RATE
from modelserve.sizing.media.audio_input import AudioInput
from modelserve.sizing.media.image_input import ImageInput
from modelserve.sizing.media.image_urls import url_hosts
from modelserve_worker.media.audio_reader import AudioReader
from modelserve_worker.media.decode_pool import DecodePool
from modelserve_worker.media.fetching.image_fetcher import ImageFetcher, Streams
from modelserve_worker.media.image_reader import ImageReader
from modelserve_worker.server.answers.fetched_media import MediaElsewhere, Wanted, fetch_media
from modelserve_worker.server.errors.errors import ApiError
from modelserve_worker.server.http.body_limits import OpenBodies
from modelserve_worker.server.http.request_context import RequestContext
from modelserve_worker.server.state import ServedModel, ServerState
from modelserve_worker.text.checkpoint_text import load_checkpoint_text

CHAT = "/v1/chat/completions"
HOST, INSIDE = "http://pictures.example.com", "http://inside.example.com"
DATA, SOUND = picture(), saved(noise(2))


class Host(ThreadingHTTPServer):
    """Has one picture at any path but two, or a sound where it ends in .wav: `/late`, when `go` is set, and `/text`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []
        self.go, self.late = threading.Event(), threading.Event()

    async def resolve(self, name: str, _: int) -> Sequence[str]:
        return ["169.254.169.254" if name.startswith("inside") else "93.184.216.34"]

    async def connect(self, address: str, port: int, tls: ssl.SSLContext | None, name: str) -> Streams:
        assert (address, port, tls) == ("93.184.216.34", 80, None)
        return await asyncio.open_connection("127.0.0.1", self.server_port)


class _Handler(BaseHTTPRequestHandler):
    server: Host

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.path == "/late":
            self.server.late.set()
            self.server.go.wait(60)
        body = b"a text" if self.path == "/text" else SOUND if self.path.endswith(".wav") else DATA
        self.send_response(404 if self.path == "/none" else 200)
        self.send_header("Content-Type", "text/html")  # bytes count, not what is said of them
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def seeing_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    directory = tmp_path_factory.mktemp("seeing")
    write_text_files(directory)
    return ServedModel("tiny", load_checkpoint_text(directory), vocab_size=512)


@pytest.fixture
def host() -> Iterator[Host]:
    with Host() as there:
        thread = threading.Thread(target=there.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield there
        there.go.set()
        there.shutdown()
        thread.join()


@pytest.fixture
def seeing(seeing_model: ServedModel, host: Host) -> Iterator[LiveServer]:
    engine = EchoEngine(max_model_len=2048)
    fetcher = ImageFetcher(url_hosts([HOST, INSIDE]), resolve=host.resolve, connect=host.connect, seconds=60)
    pool = DecodePool(1)
    reader = ImageReader(ImageInput(3, 280, ARCHITECTURE), pool, fetcher=fetcher)
    heard = AudioReader(AudioInput(2, 30, TOWERED), pool)
    state = ServerState(replace(seeing_model, images=reader, audio=heard))
    state.mark_ready(engine)
    with serve(state, engine) as live:
        yield live
    reader.close()
    heard.close()


def sound(path: str, where: str = HOST) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": where + path}}


def test_sounds_are_fetched_from_the_hosts_of_images(seeing: LiveServer, host: Host) -> None:
    """Beside images, once each, and known by their bytes; elsewhere nothing is, nor for a request that asks so."""
    answer = ask(seeing, asking(text("a"), sound("/a.wav"), at("/b"), sound("/a.wav")))
    assert answer.status_code == 200, answer.text
    assert sorted(host.asked) == ["/a.wav", "/b"]
    details = answer.json()["usage"]["prompt_tokens_details"]
    assert (details["audio_tokens"], details["image_tokens"]) == (2 * TOWERED.soft_tokens(2 * RATE), 266)
    first, _, second = seeing.engine.requests[0].spans
    assert first.key == second.key
    assert ask(seeing, asking(text("b"), sound("/c.wav"))).status_code == 200
    assert seeing.engine.requests[1].spans[0].key == first.key
    counted = httpx.get(f"{seeing.url}/metrics").text
    assert 'modelserve_sound_fetch_seconds_count{model_name="tiny"} 2.0' in counted
    assert 'modelserve_image_fetch_seconds_count{model_name="tiny"} 1.0' in counted
    host.asked.clear()
    for part, code, words in (
        (sound("/a.wav", "https://elsewhere.example.com"), "media_url_refused", "not fetched from there"),
        (sound("/a.wav", INSIDE), "media_url_refused", "not public"),
        (sound("/none"), "media_fetch_failed", "answers 404"),
        (sound("/text"), "media_undecodable", "no sound that is read here"),
    ):
        error = ask(seeing, asking(text("c"), part)).json()["error"]
        assert (error["code"], error["param"]) == (code, "messages.0.content.1"), error
        assert words in error["message"]
    assert host.asked == ["/none", "/text"]
    assert (
        'modelserve_sounds_refused_total{model_name="tiny",reason="MediaFetchFailed"} 1.0'
        in httpx.get(f"{seeing.url}/metrics").text
    )


def at(path: str, where: str = HOST, **options: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": where + path, **options}}


def ask(server: LiveServer, body: dict[str, Any], route: str = CHAT) -> httpx.Response:
    return httpx.post(server.url + route, json=body, timeout=60)


def test_an_image_by_address_is_the_image(seeing: LiveServer, host: Host) -> None:
    """By each API; the key is that of the bytes, and one address of a request is fetched once."""
    sent = asking(text("see"), image(DATA), image(DATA, detail="low"))
    by_address = asking(text("see"), at("/a?x=1"), at("/a?x=1", detail="low"))
    assert [ask(seeing, body).status_code for body in (sent, by_address)] == [200, 200]
    assert host.asked == ["/a?x=1"]
    first, second = seeing.engine.requests
    assert first.prompt_token_ids == second.prompt_token_ids
    assert [(s.start, s.key) for s in first.spans] == [(s.start, s.key) for s in second.spans]
    assert first.spans[0].embeddings is second.spans[0].embeddings, "known by its bytes"
    one = asking(text("see"), at("/b"))
    item = {"type": "input_image", "image_url": HOST + "/b"}
    content = [{"type": "input_text", "text": "see"}, item]
    block = {"type": "image", "source": {"type": "url", "url": HOST + "/b"}}
    messages = {"model": "tiny", "messages": [{"role": "user", "content": [text("see"), block]}]}
    said = [
        ask(seeing, one),
        ask(seeing, {"model": "tiny", "input": [{"role": "user", "content": content}]}, "/v1/responses"),
        ask(seeing, messages | {"max_tokens": 4}, "/v1/messages"),
    ]
    assert [each.status_code for each in said] == [200] * 3
    assert said[0].json()["usage"]["prompt_tokens_details"]["image_tokens"] == 266
    assert len({tuple(request.prompt_token_ids) for request in seeing.engine.requests[2:]}) == 1
    length = len(seeing.engine.requests[2].prompt_token_ids)
    assert ask(seeing, messages, "/v1/messages/count_tokens").json()["input_tokens"] == length
    assert ask(seeing, {"model": "tiny", "messages": one["messages"]}, "/tokenize").json()["count"] == length
    counted = httpx.get(f"{seeing.url}/metrics").text
    assert 'modelserve_image_fetch_seconds_count{model_name="tiny"} 6.0' in counted
    assert 'modelserve_images_total{known="true",model_name="tiny"} 5.0' in counted
    seeing.eventually(lambda: httpx.get(f"{seeing.url}/load").json()["server_load"] == 0)
    assert seeing.app.state.bodies.open_bodies.held_bytes == 0


@pytest.mark.parametrize(("parts", "param", "code", "words", "asked"), [
    ([at("/a"), at("/x.png", "https://elsewhere.example.com")], 1, "media_url_refused", "not fetched from there", []),
    ([at("/a"), {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], 1, "media_url_refused", "", []),
    ([at("/a", INSIDE)], 0, "media_url_refused", "not public", []),
    ([at("/none")], 0, "media_fetch_failed", "answers 404", ["/none"]),
    ([at("/text")], 0, "media_undecodable", "no image that is read here", ["/text"]),
    ([at(f"/{n}") for n in range(4)], 3, "media_too_large", "has 4 images", []),
])  # fmt: skip
def test_what_is_refused_and_by_which_name(
    seeing: LiveServer, host: Host, parts: list[Any], param: int, code: str, words: str, asked: list[str]
) -> None:
    """Nothing is fetched for a request of which one address is refused."""
    answer = ask(seeing, asking(*parts))
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert (error["param"], error["code"]) == (f"messages.0.content.{param}", code)
    assert words in error["message"]
    assert host.asked == asked
    assert seeing.engine.requests == []
    assert 'modelserve_images_refused_total{model_name="tiny",reason="Media' in httpx.get(f"{seeing.url}/metrics").text


def test_a_host_that_does_not_answer_keeps_nobody_else_waiting(seeing: LiveServer, host: Host) -> None:
    """More such requests than there are threads for bodies: text, sent images and other addresses are answered."""
    with ThreadPoolExecutor(7) as pool:
        slow = [pool.submit(ask, seeing, asking(at("/late"), text(f"{n}"))) for n in range(7)]
        assert host.late.wait(60)
        for body in (asking(text("hi")), asking(image(DATA)), asking(at("/a"))):
            assert ask(seeing, body).status_code == 200
        assert not any(each.done() for each in slow)
        host.go.set()
        assert [each.result().status_code for each in slow] == [200] * 7


def test_the_bytes_of_a_request_are_bounded_together(seeing: LiveServer, host: Host) -> None:
    """And those of all: what is fetched is held by the account that bodies are held by."""
    bodies = seeing.app.state.bodies.open_bodies
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(ask, seeing, asking(at("/a"), at("/late")))
        seeing.eventually(lambda: bodies.held_bytes >= len(DATA) and host.late.is_set())
        bodies.limit_bytes, before = bodies.held_bytes + 600, bodies.limit_bytes
        answer = ask(seeing, asking(at("/b")))
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "server_busy")
        bodies.limit_bytes = before
        host.go.set()
        assert slow.result().status_code == 200


def test_base64_is_not_fetched(seeing: LiveServer, host: Host) -> None:
    url = "DATA:image/png;base64," + base64.b64encode(DATA).decode()
    assert ask(seeing, asking({"type": "image_url", "image_url": {"url": url}})).status_code == 200
    assert host.asked == []


async def test_fetching_is_told_in_a_span_also_where_it_fails(seeing_model: ServedModel, host: Host) -> None:
    fetcher = ImageFetcher(url_hosts([HOST]), resolve=host.resolve, connect=host.connect)
    reader = ImageReader(ImageInput(3, 280, ARCHITECTURE), DecodePool(1), fetcher=fetcher)
    model = replace(seeing_model, images=reader)
    with OpenBodies().account() as account:
        context = RequestContext("r", "c", account)
        wanted = MediaElsewhere({f"{HOST}/a": Wanted("messages.0"), f"{HOST}/b": Wanted("messages.1")})
        await fetch_media(wanted, model, context, iter(range(9)).__next__)
        assert context.fetched == {f"{HOST}/a": DATA, f"{HOST}/b": DATA}
        with pytest.raises(ApiError, match="answers 404"):
            await fetch_media(
                MediaElsewhere({f"{HOST}/none": Wanted("messages.2")}), model, context, iter((10, 11, 12)).__next__
            )
    assert [(each.name, each.items, each.began_s) for each in context.media_spans] == [
        ("images fetch", 2, 0),
        ("images fetch", 1, 10),
    ]
    assert [each.ended_s for each in context.media_spans] == [3, 12]
    reader.close()
