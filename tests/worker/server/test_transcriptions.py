"""Recordings become text: cut where they are quiet, answered side by side, joined; forms and what they may not say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from live_server import EchoEngine, LiveServer, serve
from openai import BadRequestError, OpenAI
from seeing import SOUND_SLOT, write_text_files
from sounds import TOWERED, noise, saved

from modelserve.model.audio import RATE
from modelserve.sizing.media.audio_input import AudioInput
from modelserve_worker.media.audio_reader import AudioReader
from modelserve_worker.media.decode_pool import DecodePool
from modelserve_worker.server.settings import ServerSettings
from modelserve_worker.server.state import ServedModel, ServerState
from modelserve_worker.server.transcriptions.form import read_form
from modelserve_worker.server.transcriptions.request import JoinedText, TranslationRequest
from modelserve_worker.text.checkpoint_text import load_checkpoint_text

HEARD, ENGLISH = "/v1/audio/transcriptions", "/v1/audio/translations"


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    directory = tmp_path_factory.mktemp("hearing")
    write_text_files(directory)
    return ServedModel("tiny", load_checkpoint_text(directory), vocab_size=512)


@pytest.fixture
def hearing(text_model: ServedModel) -> Iterator[LiveServer]:
    engine = EchoEngine(max_model_len=2048)
    reader = AudioReader(AudioInput(1, 30, TOWERED), DecodePool(1))
    state = ServerState(replace(text_model, audio=reader))
    state.mark_ready(engine)
    with serve(state, engine) as live:
        yield live
    reader.close()


def recording(seconds: float, *quiet: float) -> bytes:
    samples = noise(seconds, seed=4)
    for at in quiet:
        samples[round((at - 0.1) * RATE) : round((at + 0.1) * RATE)] = 0
    return saved(samples, "FLAC")


def ask(server: LiveServer, data: bytes | None, route: str = HEARD, **fields: Any) -> httpx.Response:
    files = {} if data is None else {"file": ("a.flac", data, "audio/flac")}
    form = {"model": "tiny", **fields}
    if data is None:
        files = {name: (None, value) for name, value in form.items()}
        form = {}
    return httpx.post(server.url + route, data=form, files=files, timeout=60)


def says(server: LiveServer, text: str) -> None:
    """Each sound's answer."""
    vocabulary = server.state.model.text
    server.engine.reply = [*vocabulary.tokenizer.encode(text, add_special_tokens=False).ids, 106]


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_recording_is_answered_sound_by_sound_and_joined(hearing: LiveServer) -> None:
    """Whole, streamed and as text: the same words, one space between sounds; usage counts all of them."""
    says(hearing, " some words\n")
    data = recording(70, 27.0, 52.5)
    whole = ask(hearing, data)
    assert whole.status_code == 200, whole.text
    document = whole.json()
    assert document["text"] == "some words some words some words"
    requests = hearing.engine.requests
    assert len(requests) == 3
    assert [len(request.spans) for request in requests] == [1, 1, 1]
    rows = [len(request.spans[0]) for request in requests]
    assert sum(rows) == pytest.approx(70 * 25, abs=6)
    assert rows[0] == pytest.approx(27 * 25, abs=3)
    assert len({request.spans[0].key for request in requests}) == 3
    for request in requests:
        ids = np.asarray(request.prompt_token_ids)
        span = request.spans[0]
        assert np.flatnonzero(ids == SOUND_SLOT).tolist() == [*range(span.start, span.end)]
    usage = document["usage"]
    assert usage["type"] == "tokens"
    assert usage["input_token_details"]["audio_tokens"] == sum(rows)
    assert usage["input_tokens"] == sum(len(request.prompt_token_ids) for request in requests)
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    streamed = events(ask(hearing, data, stream="true"))
    *deltas, done = streamed
    assert {each["type"] for each in deltas} == {"transcript.text.delta"}
    assert "".join(each["delta"] for each in deltas) == document["text"]
    assert (done["type"], done["text"], done["usage"]) == ("transcript.text.done", document["text"], usage)
    plain = ask(hearing, data, response_format="text")
    assert (plain.text, plain.headers["content-type"]) == (document["text"] + "\n", "text/plain; charset=utf-8")
    assert "modelserve_sounds_total" in httpx.get(f"{hearing.url}/metrics").text


def test_what_the_model_is_asked(hearing: LiveServer) -> None:
    """By route, language and prompt; nothing is drawn unless a temperature says so, and a seed is the client's."""
    says(hearing, "yes")
    data = recording(1)
    for route, fields in ((HEARD, {}), (HEARD, {"language": "de", "prompt": "Otto"}), (ENGLISH, {"language": "xx-YY"}),
                          (ENGLISH, {"temperature": "0.5", "seed": "7"})):  # fmt: skip
        assert ask(hearing, data, route, **fields).json()["text"] == "yes"
    requests = hearing.engine.requests
    decode = hearing.state.model.text.tokenizer.decode
    first, second, third, fourth = (decode(list(each.prompt_token_ids), skip_special_tokens=False) for each in requests)
    assert "Transcribe the following speech, in the language that is spoken" in first
    assert "speech in German," in second
    assert "may occur: Otto" in second
    assert "Translate the following speech in the language xx-YY into English" in third
    assert "Translate the following speech into English" in fourth
    assert [each.sampling.temperature for each in requests] == [0, 0, 0, 0.5]
    assert requests[3].sampling.seed == 7
    assert len({each.spans[0].key for each in requests}) == 1


def test_thoughts_are_never_in_the_text(hearing: LiveServer) -> None:
    says(hearing, "yes")
    text, answer = hearing.state.model.text, hearing.engine.reply or []
    thought = text.tokenizer.encode("thought\nis it German?", add_special_tokens=False).ids
    ids = text.vocabulary.ids  # what text spells is no marker
    hearing.engine.reply = [ids["<|channel>"], *thought, ids["<channel|>"], *answer]
    data = recording(1)
    assert ask(hearing, data).json()["text"] == "yes"
    assert [each.get("delta") for each in events(ask(hearing, data, stream="true"))][:-1] == [*"yes"]


def test_what_is_refused_and_by_which_name(hearing: LiveServer) -> None:
    good = recording(1)
    cases: list[tuple[bytes | None, dict[str, str], str | None, str, str]] = [
        (None, {}, "file", "missing_field", "required"),
        (b"\0\0\0\x20ftypM4A ", {}, "file", "media_undecodable", "ffmpeg -i FILE"),
        (b"fLaC" + bytes(200), {}, "file", "media_undecodable", "cannot be decoded"),
        (good, {"response_format": "verbose_json"}, "response_format", "invalid_value", "verbose_json tells times"),
        (good, {"response_format": "srt"}, "response_format", "invalid_value", "srt tells times"),
        (good, {"response_format": "xml"}, "response_format", "invalid_value", "'json' or 'text'"),
        (good, {"timestamp_granularities[]": "word"}, "timestamp_granularities", "unsupported_field", "no times"),
        (good, {"temperature": "3"}, "temperature", "invalid_value", ""),
        (good, {"temperature": "nan"}, "temperature", "invalid_value", ""),
        (good, {"stream": "perhaps"}, "stream", "invalid_value", ""),
        (good, {"language": "German!"}, "language", "invalid_value", ""),
        (good, {"chunking_strategy": "server_vad"}, "chunking_strategy", "unsupported_field", "auto"),
        (good, {"colour": "red"}, "colour", "unsupported_field", ""),
    ]
    for data, fields, param, code, words in cases:
        answer = ask(hearing, data, **fields)
        assert answer.status_code == 400, (fields, answer.text)
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (param, code), error
        assert words in error["message"], error
    assert ask(hearing, good, model="other").status_code == 404
    assert hearing.engine.requests == []
    assert ask(hearing, good, chunking_strategy="auto").status_code == 200


def test_longer_recordings_than_half_an_hour_are_refused(hearing: LiveServer) -> None:
    """Silence of so long has few bytes."""
    import io

    import soundfile

    held = io.BytesIO()
    with soundfile.SoundFile(held, "w", 8_000, 1, format="FLAC") as file:
        for _ in range(31):
            file.write(np.zeros(60 * 8_000, dtype=np.int16))
    error = ask(hearing, held.getvalue()).json()["error"]
    assert (error["param"], error["code"]) == ("file", "audio_too_long")
    assert "longer than 1800 s" in error["message"]


def test_who_hears_nothing_says_so(server: LiveServer) -> None:
    error = ask(server, recording(1)).json()["error"]
    assert (error["code"], error["param"]) == ("modality_not_served", "file")
    assert "plan audio to have it hear" in error["message"]
    assert HEARD not in httpx.get(f"{server.url}/openapi.json").json()["paths"]


def test_the_document_has_both_routes(hearing: LiveServer) -> None:
    document = httpx.get(f"{hearing.url}/openapi.json").json()
    for route, name in ((HEARD, "TranscriptionRequest"), (ENGLISH, "TranslationRequest")):
        operation = document["paths"][route]["post"]
        assert operation["requestBody"]["content"]["multipart/form-data"]["schema"]["$ref"].endswith(name)
        assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/plain", "text/event-stream"}
    assert httpx.post(hearing.url + HEARD, json={}).status_code == 415


def test_forms_that_are_none_are_refused(hearing: LiveServer) -> None:
    kind = {"content-type": "multipart/form-data; boundary=xx"}
    for body, words in (
        (b"", "no parts"),
        (b"--xx\r\nContent-Disposition: form-data\r\n\r\na\r\n--xx--\r\n", "a part of it has no name"),
        (b"no boundary", "not a valid form"),
        (b'--xx\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n' * 70 + b"--xx--\r\n", "more than 64 parts"),
    ):
        answer = httpx.post(hearing.url + HEARD, content=body, headers=kind)
        assert answer.status_code == 400, body[:40]
        assert words in answer.json()["error"]["message"]
    part = b'--xx\r\nContent-Disposition: form-data; name="a[]"\r\n\r\n%s\r\n'
    assert read_form(part % b"1" + part % b"2\0" + b"--xx--\r\n", b"xx") == {"a": [b"1", b"2\0"]}


def test_pages_of_others_may_not_send_forms(text_model: ServedModel) -> None:
    """A browser sends them without asking first, and says where they come from."""
    reader = AudioReader(AudioInput(1, 30, TOWERED), DecodePool(1))
    data = recording(1)
    for allowed, refused in (((), True), (("https://friend.example",), False), (("*",), False)):
        engine = EchoEngine(max_model_len=2048)
        state = ServerState(replace(text_model, audio=reader))
        state.mark_ready(engine)
        with serve(state, engine, ServerSettings(allowed_origins=allowed)) as live:
            sent: dict[str, Any] = {"data": {"model": "tiny"}, "files": {"file": ("a", data)}, "timeout": 60}
            headers = {"origin": "https://friend.example"}
            answer = httpx.post(live.url + HEARD, headers=headers, **sent)
            assert answer.status_code == (403 if refused else 200)
            own = httpx.post(live.url + HEARD, headers={"origin": live.url}, **sent)
            assert own.status_code == 200
    reader.close()


def test_openai_s_own_client(hearing: LiveServer) -> None:
    says(hearing, "some words")
    client = OpenAI(base_url=f"{hearing.url}/v1", api_key="none")
    data = ("a.flac", recording(1))
    assert client.audio.transcriptions.create(model="tiny", file=data).text == "some words"
    with pytest.warns(DeprecationWarning, match="deprecated"):
        assert client.audio.translations.create(model="tiny", file=data).text == "some words"
    assert client.audio.transcriptions.create(model="tiny", file=data, response_format="text") == "some words\n"
    heard = list(client.audio.transcriptions.create(model="tiny", file=data, stream=True))
    assert heard[-1].type == "transcript.text.done"
    assert "".join(each.delta for each in heard if each.type == "transcript.text.delta") == "some words"
    with pytest.raises(BadRequestError, match="tells times"):
        client.audio.transcriptions.create(model="tiny", file=data, response_format="verbose_json")


def test_texts_are_joined_as_they_come() -> None:
    """Whatever pieces a stream has: white space at ends of sounds is one space, of Chinese none, of silence none."""
    for texts, wanted in (
        ([["a", " b", " "], ["  ", "c"]], "a b c"),
        ([["\n\n"], [" a\n"], [], ["b\n\nc "]], "a b\n\nc"),
        ([["\u4f60"], ["\u597d"], ["a"]], "\u4f60\u597d a"),
        ([[""], []], ""),
    ):
        joined, told = JoinedText(), ""
        for sound in texts:
            for piece in sound:
                told += joined.push(piece)
            joined.next_sound()
        assert told == joined.text == wanted


def test_a_form_is_read_as_strictly_as_json() -> None:
    body = TranslationRequest.model_validate({"file": b"x", "model": "m", "temperature": 1})
    assert (body.temperature, body.stream, body.response_format) == (1.0, False, "json")
