"""Images of requests: where they are in a prompt, how closely they are looked at, what is refused, and what is told."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from live_server import EchoEngine, LiveServer, serve
from seeing import ARCHITECTURE, BEGIN, END, SLOT, asking, image, picture, text, url_of, write_text_files

from modelserve.sizing.media.image_input import ImageInput
from modelserve_worker.embedded_spans import ImagePatches
from modelserve_worker.media.decode_pool import DecodePool
from modelserve_worker.media.image_reader import ImageReader
from modelserve_worker.server.state import ServedModel, ServerState
from modelserve_worker.text.checkpoint_text import load_checkpoint_text

CHAT = "/v1/chat/completions"
ONE = 63  # soft tokens of `picture()` at a budget of 70


@pytest.fixture(scope="module")
def seeing_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    directory = tmp_path_factory.mktemp("seeing")
    write_text_files(directory)
    return ServedModel("tiny", load_checkpoint_text(directory), vocab_size=512)


@pytest.fixture
def seeing(seeing_model: ServedModel) -> Iterator[LiveServer]:
    """At most three images of 280 soft tokens, and room for the pixels of four."""
    engine = EchoEngine(max_model_len=2048)
    reader = ImageReader(ImageInput(3, 280, ARCHITECTURE), DecodePool(1), most_held_bytes=4 * 280 * 6912)
    state = ServerState(replace(seeing_model, images=reader))
    state.mark_ready(engine)
    with serve(state, engine) as live:
        yield live
    reader.close()


def ask(server: LiveServer, body: dict[str, Any], route: str = CHAT) -> httpx.Response:
    return httpx.post(server.url + route, json=body, timeout=60)


def refused(server: LiveServer, body: dict[str, Any], route: str = CHAT) -> dict[str, Any]:
    answer = ask(server, body, route)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_each_image_has_its_rows_between_its_marks(seeing: LiveServer) -> None:
    """In the order of the messages; two neighbours are two spans; what a client types is text."""
    one, other = picture(), picture(90, 60, seed=2)
    body = asking(text("<|image|> and <|image>"), image(one, detail="low"), image(other, detail="low"), text("?"))
    answer = ask(seeing, body)
    assert answer.status_code == 200, answer.text
    (request,) = seeing.engine.requests
    ids = np.asarray(request.prompt_token_ids)
    first, second = request.spans
    rows = np.flatnonzero(ids == SLOT)
    assert rows.tolist() == [*range(first.start, first.end), *range(second.start, second.end)]
    assert (len(first), len(second), second.start - first.end) == (ONE, 60, 2)
    for span in request.spans:
        assert (ids[span.start - 1], ids[span.end]) == (BEGIN, END)
        assert span.mutual
    assert first.key != second.key
    patches = first.embeddings
    assert isinstance(patches, ImagePatches)
    assert (patches.values.shape, patches.columns) == ((ONE, 6912), 9)
    said = seeing.state.model.text.tokenizer.decode(ids[: first.start - 1].tolist(), skip_special_tokens=False)
    assert said.endswith("<|image|> and <|image>")
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == len(ids)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "image_tokens": ONE + 60}


def test_how_closely_an_image_is_looked_at(seeing: LiveServer) -> None:
    """By the part, else by its detail, else by the request; detail never asks for more than the plan has."""
    data = picture(900, 1200)
    asked: list[tuple[dict[str, Any], dict[str, Any], int]] = [
        ({}, {}, 266),
        ({"detail": "auto"}, {}, 266),
        ({"detail": "high"}, {}, 266),
        ({"detail": "low"}, {}, 63),
        ({"max_soft_tokens": 140}, {}, 130),
        ({"max_soft_tokens": 140, "detail": "low"}, {}, 130),
        ({}, {"mm_processor_kwargs": {"max_soft_tokens": 70}}, 63),
        ({"max_soft_tokens": 140}, {"mm_processor_kwargs": {"max_soft_tokens": 70}}, 130),
        ({}, {"mm_processor_kwargs": {}}, 266),
    ]
    for options, fields, tokens in asked:
        answer = ask(seeing, asking(image(data, **options), **fields))
        assert answer.json()["usage"]["prompt_tokens_details"]["image_tokens"] == tokens, (options, fields)
    for body, param in (
        (asking(image(data, max_soft_tokens=560)), "messages.0.content.0"),
        (asking(image(data), mm_processor_kwargs={"max_soft_tokens": 1120}), "messages.0.content.0"),
    ):
        error = refused(seeing, body)
        assert (error["code"], error["param"]) == ("media_too_large", param)
        assert "at most 280 here (spec.modalities.image.maxSoftTokens)" in error["message"]


def test_what_is_refused_and_by_which_name(seeing: LiveServer) -> None:
    good = image(picture())
    cases: list[tuple[dict[str, Any], str, str, str]] = [
        (asking(text("a"), {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}),
         "messages.0.content.1", "media_url_refused", "fetches nothing; send the image itself"),
        (asking({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}),
         "messages.0.content.0", "media_url_refused", "fetches nothing"),
        (asking(good, image(b"no image at all")), "messages.0.content.1", "media_undecodable", "no image that is read"),
        (asking(good, image(picture()[:-200])), "messages.0.content.1", "media_undecodable", "cannot be decoded"),
        (asking(*[good] * 4), "messages.0.content.3", "media_too_large", "has 4 images; the limit is 3"),
        (asking(good, image(picture(300, 400)), n=8, seed=1), "n", "media_too_large", "ask for fewer answers"),
        (asking({"type": "image_url", "image_url": {"url": "x", "detail": "huge"}}),
         "messages.0.content.0.image_url.detail", "invalid_value", "'low', 'auto' or 'high'"),
        (asking({"type": "image_url", "image_url": "x"}), "messages.0.content.0.image_url", "invalid_value", ""),
        (asking({"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}),
         "messages.0.content.0", "modality_not_served", "reads text and images only; plan audio to have it hear"),
        (asking({"type": "video_url", "video_url": {}}), "messages.0.content.0", "modality_not_served", "no video"),
        (asking(good) | {"messages": [{"role": "system", "content": [good]}]},
         "messages.0.content.0", "modality_not_served", "messages of the user and results of tools have"),
    ]  # fmt: skip
    for body, param, code, words in cases:
        error = refused(seeing, body)
        assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error"), error
        assert words in error["message"]
    assert seeing.engine.requests == []
    assert ask(seeing, asking(good)).status_code == 200


def test_a_prompt_with_images_that_is_too_long_is_told_its_length(seeing: LiveServer) -> None:
    error = refused(seeing, asking(text("x" * 1400), *[image(picture(900, 1200, seed=i)) for i in range(3)]))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_a_text_model_refuses_images_and_what_concerns_them(server: LiveServer) -> None:
    for body, param in (
        (asking(text("a"), image(picture())), "messages.0.content.1"),
        (asking(text("a"), mm_processor_kwargs={"max_soft_tokens": 70}), "mm_processor_kwargs"),
    ):
        error = refused(server, body)
        assert (error["code"], error["param"]) == ("modality_not_served", param)
        assert "this server reads text only; plan images" in error["message"]
    assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["input_modalities"] == ["text"]
    assert "modelserve_images" not in httpx.get(f"{server.url}/metrics").text


def test_answers_to_one_prompt_share_its_images_and_known_ones_are_not_decoded(seeing: LiveServer) -> None:
    body = asking(image(picture(), detail="low"), text("?"), n=2)
    for _ in range(2):
        assert ask(seeing, body).status_code == 200
    first, second, third, _ = seeing.engine.requests
    assert first.spans is second.spans
    assert third.spans[0].embeddings is first.spans[0].embeddings
    assert third.spans[0].key == first.spans[0].key
    refused(seeing, asking(image(b"x")))
    counted = httpx.get(f"{seeing.url}/metrics").text
    for line in (
        'modelserve_images_total{known="false",model_name="tiny"} 1.0',
        'modelserve_images_total{known="true",model_name="tiny"} 1.0',
        f'modelserve_image_soft_tokens_total{{model_name="tiny"}} {2 * ONE}.0',
        'modelserve_image_decode_seconds_count{model_name="tiny"} 1.0',
        'modelserve_images_refused_total{model_name="tiny",reason="MediaUndecodable"} 1.0',
    ):
        assert line in counted
    assert httpx.get(f"{seeing.url}/v1/models").json()["data"][0]["input_modalities"] == ["text", "image"]
    seeing.eventually(lambda: httpx.get(f"{seeing.url}/load").json()["server_load"] == 0)


def test_streams_and_other_protocols(seeing: LiveServer) -> None:
    """One image, four ways: the same prompt, the same span; and counted without being decoded."""
    data = picture()
    parts = [text("see"), image(data)]
    streamed = ask(seeing, asking(*parts, stream=True, stream_options={"include_usage": True}))
    assert '"image_tokens":266' in streamed.text
    item = {"type": "input_image", "image_url": url_of(data), "detail": "auto"}
    content = [{"type": "input_text", "text": "see"}, item]
    said = ask(seeing, {"model": "tiny", "input": [{"role": "user", "content": content}], "max_output_tokens": 4},
               "/v1/responses")  # fmt: skip
    assert said.json()["usage"]["input_tokens_details"]["image_tokens"] == 266
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    message = {"role": "user", "content": [text("see"), {"type": "image", "source": source}]}
    asked = {"model": "tiny", "messages": [message]}
    assert ask(seeing, asked | {"max_tokens": 4}, "/v1/messages").status_code == 200
    requests = seeing.engine.requests
    assert len(requests) == 3
    assert len({tuple(request.prompt_token_ids) for request in requests}) == 1
    assert len({(span.start, span.key) for request in requests for span in request.spans}) == 1
    counted = ask(seeing, asked, "/v1/messages/count_tokens").json()["input_tokens"]
    assert counted == len(requests[0].prompt_token_ids)
    tokens = ask(seeing, {"model": "tiny", "messages": asking(*parts)["messages"]}, "/tokenize").json()
    assert tokens["tokens"] == list(requests[0].prompt_token_ids)
    url = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    answer = ask(seeing, asked | {"max_tokens": 4, "messages": [{"role": "user", "content": [url]}]}, "/v1/messages")
    assert answer.status_code == 400
    assert "fetches nothing" in answer.json()["error"]["message"]


def test_results_of_tools_have_images(seeing: LiveServer) -> None:
    """In all three protocols: the same prompt, where the template writes an image inside the result."""
    data, call = picture(), {"name": "look", "arguments": "{}"}
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    chat = asking(text("look")) | {"tools": tools}
    chat["messages"] += [
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "c", "content": [text("seen"), image(data)]},
    ]
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [text("seen"), {"type": "image", "source": source}]}
    messages = {
        "model": "tiny", "max_tokens": 4, "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": [text("look")]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
            {"role": "user", "content": [result]},
        ],
    }  # fmt: skip
    output = [{"type": "input_text", "text": "seen"}, {"type": "input_image", "image_url": url_of(data)}]
    responses = {
        "model": "tiny", "max_output_tokens": 4,
        "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}}],
        "input": [
            {"role": "user", "content": "look"},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": output},
        ],
    }  # fmt: skip
    for body, route in ((chat, CHAT), (messages, "/v1/messages"), (responses, "/v1/responses")):
        answer = ask(seeing, body, route)
        assert answer.status_code == 200, answer.text
    requests = seeing.engine.requests
    assert len({tuple(each.prompt_token_ids) for each in requests}) == 1
    (span,) = requests[0].spans
    ids = requests[0].prompt_token_ids
    assert ids.index(50) < span.start < ids.index(51), "inside the result"
    cut = {"id": "c", "type": "function", "function": call | {"arguments": '{"a'}}
    chat["messages"][1]["tool_calls"] = [cut]
    error = refused(seeing, chat)
    assert (error["param"], error["code"]) == ("messages.2.content.1", "invalid_value")
    assert "without images" in error["message"]


def test_images_by_file_are_refused_by_name(seeing: LiveServer) -> None:
    by_file = {"type": "image", "source": {"type": "file", "file_id": "f"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [text("a"), by_file]}
    part = {"type": "input_image", "file_id": "f", "detail": "auto"}
    words = "an image by file_id is not supported: this server keeps no files"
    error = refused(seeing, {"model": "tiny", "input": [{"role": "user", "content": [part]}]}, "/v1/responses")
    assert error["code"] == "modality_not_served"
    assert error["param"].endswith("content.0.file_id")
    assert words in error["message"]
    for content in ([text("a"), by_file], [result]):
        said = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
        message = refused(seeing, said, "/v1/messages")["message"]
        assert f"1.source: {words}" in message


def test_a_body_may_be_as_large_as_its_images(seeing: LiveServer) -> None:
    """Beyond what a text of this context may have; and an image beyond its own bound is told so."""
    data = picture() + bytes(6 << 20)  # behind a PNG's end anything may stand
    assert ask(seeing, asking(image(data, detail="low"))).status_code == 200
    error = refused(seeing, asking(image(picture() + bytes(17 << 20))))
    assert (error["code"], error["param"]) == ("media_too_large", "messages.0.content.0")
