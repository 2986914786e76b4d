"""Sounds of requests: where they are in a prompt, what is refused by which name, and what is told."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from live_server import EchoEngine, LiveServer, serve
from seeing import (
    ARCHITECTURE,
    SLOT,
    SOUND_BEGIN,
    SOUND_END,
    SOUND_SLOT,
    asking,
    image,
    picture,
    text,
    write_text_files,
)
from sounds import TOWERED, noise, saved

from modelserve.model.audio import RATE
from modelserve.sizing.media.audio_input import SOUND_BYTES, AudioInput
from modelserve.sizing.media.image_input import ImageInput
from modelserve_worker.embedded_spans import AudioFrames
from modelserve_worker.media.audio_reader import AudioReader
from modelserve_worker.media.decode_pool import DecodePool
from modelserve_worker.media.image_reader import ImageReader
from modelserve_worker.server.state import ServedModel, ServerState
from modelserve_worker.text.checkpoint_text import load_checkpoint_text

CHAT = "/v1/chat/completions"
ONE = TOWERED.soft_tokens(2 * RATE)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    directory = tmp_path_factory.mktemp("hearing")
    write_text_files(directory)
    return ServedModel("tiny", load_checkpoint_text(directory), vocab_size=512)


@pytest.fixture
def hearing(text_model: ServedModel) -> Iterator[LiveServer]:
    """At most three sounds of 30 s, with room for the frames of four, and two images."""
    engine, pool = EchoEngine(max_model_len=2048), DecodePool(1)
    audio = AudioInput(3, 30, TOWERED)
    heard = AudioReader(audio, pool, most_held_bytes=4 * audio.sound_bytes)
    seen = ImageReader(ImageInput(2, 70, ARCHITECTURE), pool)
    state = ServerState(replace(text_model, images=seen, audio=heard))
    state.mark_ready(engine)
    with serve(state, engine) as live:
        yield live
    heard.close()
    seen.close()


def sound(data: bytes, form: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": form}}


def by_url(data: bytes) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64," + base64.b64encode(data).decode()}}


def ask(server: LiveServer, body: dict[str, Any], route: str = CHAT) -> httpx.Response:
    return httpx.post(server.url + route, json=body, timeout=60)


def refused(server: LiveServer, body: dict[str, Any], route: str = CHAT) -> dict[str, Any]:
    answer = ask(server, body, route)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_each_sound_has_its_rows_between_its_marks(hearing: LiveServer) -> None:
    """Among images, in the order of the messages; what a client types is text."""
    one, other = saved(noise(2)), saved(noise(1.234, seed=2, rate=44_100), "MP3", rate=44_100)
    body = asking(text("<|audio|> and <|audio>"), sound(one), image(picture()), by_url(other), text("?"))
    answer = ask(hearing, body)
    assert answer.status_code == 200, answer.text
    (request,) = hearing.engine.requests
    ids = np.asarray(request.prompt_token_ids)
    first, seen, second = request.spans
    rows = np.flatnonzero(ids == SOUND_SLOT)
    assert rows.tolist() == [*range(first.start, first.end), *range(second.start, second.end)]
    assert np.flatnonzero(ids == SLOT).tolist() == [*range(seen.start, seen.end)]
    assert (len(first), len(second)) == (ONE, TOWERED.soft_tokens(round(1.234 * RATE)))
    for span in (first, second):
        assert (ids[span.start - 1], ids[span.end]) == (SOUND_BEGIN, SOUND_END)
        assert not span.mutual
        assert isinstance(span.embeddings, AudioFrames)
        assert span.embeddings.values.shape[1] == 128
    assert len({first.key, second.key, seen.key}) == 3
    said = hearing.state.model.text.tokenizer.decode(ids[: first.start - 1].tolist(), skip_special_tokens=False)
    assert said.endswith("<|audio|> and <|audio>")
    details = answer.json()["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 0, "audio_tokens": len(first) + len(second), "image_tokens": len(seen)}


def test_what_is_refused_and_by_which_name(hearing: LiveServer) -> None:
    good = sound(saved(noise(2)))
    at = "messages.0.content"
    cases: list[tuple[dict[str, Any], str, str, str]] = [
        (asking(text("a"), {"type": "audio_url", "audio_url": {"url": "https://example.com/a.wav"}}),
         f"{at}.1", "media_url_refused", "fetches nothing; send the sound itself, as data:audio"),
        (asking({"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}),
         f"{at}.0", "media_url_refused", "fetches nothing"),
        (asking(good, sound(b"no sound at all")), f"{at}.1", "media_undecodable", "no sound that is read here"),
        (asking(good, sound(b"\0\0\0\x20ftypM4A ", "m4a")), f"{at}.1", "media_undecodable", "ffmpeg -i FILE"),
        (asking(sound(b"fLaC" + bytes(400))), f"{at}.0", "media_undecodable", "cannot be decoded"),
        (asking(good, sound(saved(noise(30.001)))), f"{at}.1", "audio_too_long", "longer than 30 s"),
        (asking(sound(saved(noise(0.01)))), f"{at}.0", "audio_too_short", "no fewer than 161"),
        (asking(*[good] * 4), f"{at}.3", "media_too_large", "has 4 sounds; the limit is 3"),
        (asking(sound(saved(noise(30))), n=8, seed=1), "n", "media_too_large", "the sounds of 8 answers"),
        (asking({"type": "input_audio", "input_audio": {"data": "UklGRg=="}}),
         f"{at}.0.input_audio.format", "missing_required_parameter", ""),
        (asking({"type": "input_audio", "input_audio": {"data": "@@@", "format": "wav"}}),
         f"{at}.0", "media_undecodable", "the sound is no valid base64"),
        (asking(good) | {"messages": [{"role": "system", "content": [good]}]},
         "messages.0.content.0", "modality_not_served", "results of tools have sounds"),
    ]  # fmt: skip
    for body, param, code, words in cases:
        error = refused(hearing, body)
        assert (error["param"], error["type"]) == (param, "invalid_request_error"), error
        assert error["code"] == code or not words, error
        assert words in error["message"]
    assert hearing.engine.requests == []
    assert ask(hearing, asking(good)).status_code == 200
    larger = refused(hearing, asking(sound(b"fLaC" + bytes(SOUND_BYTES))))
    assert (larger["code"], larger["param"]) == ("media_too_large", f"{at}.0")


def test_a_text_model_refuses_sounds(server: LiveServer) -> None:
    error = refused(server, asking(text("a"), sound(saved(noise(1)))))
    assert (error["code"], error["param"]) == ("modality_not_served", "messages.0.content.1")
    assert "this server reads text only; plan audio to have it hear (spec.modalities.audio)" in error["message"]
    assert "modelserve_sounds" not in httpx.get(f"{server.url}/metrics").text


def test_a_prompt_with_sounds_that_is_too_long_is_told_its_length(hearing: LiveServer) -> None:
    parts = [sound(saved(noise(30, seed=i))) for i in range(3)]
    error = refused(hearing, asking(text("x" * 400), *parts))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_answers_to_one_prompt_share_its_sounds_and_known_ones_are_not_decoded(hearing: LiveServer) -> None:
    body = asking(sound(saved(noise(2))), text("?"), n=2)
    for _ in range(2):
        assert ask(hearing, body).status_code == 200
    first, second, third, _ = hearing.engine.requests
    assert first.spans is second.spans
    assert third.spans[0].embeddings is first.spans[0].embeddings
    assert third.spans[0].key == first.spans[0].key
    refused(hearing, asking(sound(b"x")))
    refused(hearing, asking(sound(saved(noise(31)))))
    salted = body | {"cache_salt": "other"}
    assert ask(hearing, salted).status_code == 200
    counted = httpx.get(f"{hearing.url}/metrics").text
    for line in (
        'modelserve_sounds_total{known="false",model_name="tiny"} 2.0',
        'modelserve_sounds_total{known="true",model_name="tiny"} 1.0',
        f'modelserve_sound_soft_tokens_total{{model_name="tiny"}} {3 * ONE}.0',
        'modelserve_sound_decode_seconds_count{model_name="tiny"} 2.0',
        'modelserve_sounds_refused_total{model_name="tiny",reason="MediaUndecodable"} 1.0',
        'modelserve_sounds_refused_total{model_name="tiny",reason="AudioTooLong"} 1.0',
    ):
        assert line in counted
    card = httpx.get(f"{hearing.url}/v1/models").json()["data"][0]
    assert card["input_modalities"] == ["text", "image", "audio"]
    hearing.eventually(lambda: httpx.get(f"{hearing.url}/load").json()["server_load"] == 0)


def test_streams_and_other_protocols(hearing: LiveServer) -> None:
    """One sound, by two APIs: the same prompt, the same span; and counted by the server's tokenizer."""
    data = saved(noise(2))
    parts = [text("hear"), sound(data)]
    streamed = ask(hearing, asking(*parts, stream=True, stream_options={"include_usage": True}))
    assert f'"audio_tokens":{ONE}' in streamed.text
    content = [{"type": "input_text", "text": "hear"}, sound(data)]
    said = ask(hearing, {"model": "tiny", "input": [{"role": "user", "content": content}], "max_output_tokens": 4},
               "/v1/responses")  # fmt: skip
    assert said.json()["usage"]["input_tokens_details"]["audio_tokens"] == ONE
    requests = hearing.engine.requests
    assert len({tuple(request.prompt_token_ids) for request in requests}) == 1
    assert len({(span.start, span.key) for request in requests for span in request.spans}) == 1
    tokens = ask(hearing, {"model": "tiny", "messages": asking(*parts)["messages"]}, "/tokenize").json()
    assert tokens["tokens"] == list(requests[0].prompt_token_ids)


def test_a_body_may_be_as_large_as_its_sounds(hearing: LiveServer) -> None:
    """Beyond what a text of this context may have."""
    long = saved(np.repeat(noise(29)[:, None], 4, axis=1), rate=RATE, subtype="FLOAT")
    assert len(long) > 7 << 20
    assert ask(hearing, asking(sound(long))).status_code == 200
