"""The real worker on the CPU with a model that hears: from a file in a request to the reference's probabilities."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from hearing_reference import heard_logits, sound_span
from model_checkpoints import make_towered, make_unified
from seeing import SOUND_SLOT, asking, text, write_text_files
from sounds import noise, saved
from test_images_of_a_worker import worker
from test_sounds import sound

from modelserve.engine_args import EngineArgs
from modelserve.model.audio import AudioArchitecture
from modelserve.sizing.media.audio_input import AudioInput
from modelserve_worker.__main__ import audio_reader
from modelserve_worker.media.audio_reader import AudioReader
from modelserve_worker.media.decode_pool import DecodePool
from modelserve_worker.terminal_error import TerminalError


@pytest.mark.parametrize("variant", ["12B", "E2B"])
def test_sounds_are_answered_as_the_reference_answers_them(variant: str, tmp_path: Path) -> None:
    """Two in one prompt, in chunks that end inside them, of E2B by two ranks, each of which has the tower; the same
    again reads most of its rows and says the same; another says another."""
    model = tmp_path / "model"
    if variant == "12B":
        make_unified(model, seed=3, image_token=SOUND_SLOT - 4, vocab_size=512)
    else:
        make_towered(
            variant,
            model,
            seed=3,
            image_token=SOUND_SLOT - 4,
            vocab_size=512,
            vocab_size_per_layer_input=512,
            hears=True,
        )
    write_text_files(model)
    seconds = (0.09, 0.05) if variant == "12B" else (3.3, 1.7)  # of 16 samples a row, and of 640
    played = [saved(noise(seconds[0])), saved(noise(seconds[1], seed=2, rate=44_100), "FLAC", rate=44_100)]
    fields = {"max_tokens": 6, "temperature": 0, "logprobs": True, "return_tokens_as_token_ids": True}
    body = asking(text("which "), sound(played[0]), text("?"), sound(played[1]), text("now"), **fields)
    body["ignore_eos"] = True
    settings = {"audio-per-request": 2, "audio-seconds": 5, "max-num-batched-tokens": 32}
    settings |= {"tensor-parallel-size": 1 if variant == "12B" else 2}
    with worker(model, **settings) as url:
        answers = []
        for asked in (body, body, body | {"messages": asking(sound(saved(noise(0.1, seed=9))), text("?"))["messages"]}):
            answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=120)
            assert answer.status_code == 200, answer.text
            answers.append(answer.json())
        fields_of_prompt = {"model": "tiny", "messages": body["messages"]}
        prompt = httpx.post(f"{url}/tokenize", json=fields_of_prompt, timeout=60).json()["tokens"]
    first, again, other = (answer["choices"][0]["logprobs"]["content"] for answer in answers)
    assert [each["token"] for each in first] == [each["token"] for each in again]
    assert first[0]["token"] != other[0]["token"] or abs(first[0]["logprob"] - other[0]["logprob"]) > 0.01
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 64
    architecture = AudioArchitecture.from_config(json.loads((model / "config.json").read_text()))
    reader = AudioReader(AudioInput(2, 5, architecture), DecodePool(1))
    spans = []
    for number, data in enumerate(played):
        start = prompt.index(SOUND_SLOT) if not spans else prompt.index(SOUND_SLOT, spans[0].end)
        spans.append(sound_span(start, reader.frames(reader.look(data), "").frames, seed=number))
    reader.close()
    assert prompt.count(SOUND_SLOT) == sum(map(len, spans))
    said = [int(each["token"].removeprefix("token_id:")) for each in first]
    wanted = heard_logits(model, [*prompt, *said], spans).log_softmax(-1)
    for index, each in enumerate(first):
        assert abs(float(wanted[len(prompt) - 1 + index, said[index]]) - each["logprob"]) <= 2e-4
        assert int(wanted[len(prompt) - 1 + index].argmax()) == said[index]


@pytest.mark.parametrize(
    ("model_type", "seconds", "reason", "words"),
    [("gemma4", 31, "InvalidEngineArgs", "longer than the 30 s"), ("gemma4_text", 30, "UnsupportedModel", "12B hear")],
)
def test_a_worker_says_why_it_hears_nothing(
    model_type: str, seconds: int, reason: str, words: str, tmp_path: Path
) -> None:
    """Before it loads: sounds that are too long for the encoder, and a model of text alone."""
    audio = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "conv_kernel_size": 5}
    config = {"model_type": model_type, "audio_config": audio | {"subsampling_conv_channels": [128, 4]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = EngineArgs(model=str(tmp_path), audio_per_request=1, audio_seconds=seconds)
    with pytest.raises(TerminalError, match=words) as refused:
        audio_reader(args, DecodePool(1))
    assert refused.value.reason == reason
    assert audio_reader(EngineArgs(model=str(tmp_path)), DecodePool(1)) is None
