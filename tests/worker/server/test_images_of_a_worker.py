"""The real worker on the CPU with a model that sees: from a file in a request to the reference's probabilities."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from model_checkpoints import make_towered, make_unified
from seeing import ARCHITECTURE, SLOT, asking, image, picture, text, write_text_files
from unified_reference import image_span, seen_logits

from localcluster.processes import free_ports
from modelserve.engine_args import EngineArgs
from modelserve.sizing.media.image_input import ImageInput
from modelserve_worker.__main__ import image_reader
from modelserve_worker.media.decode_pool import DecodePool
from modelserve_worker.media.image_decoder import decoded
from modelserve_worker.media.image_reader import ImageReader
from modelserve_worker.media.patches import patches_of
from modelserve_worker.terminal_error import TerminalError


@contextmanager
def worker(model: Path, **settings: Any) -> Iterator[str]:
    (port,) = free_ports(1)
    fixed = {
        "model": model, "served-model-name": "tiny", "device": "cpu", "host": "127.0.0.1", "port": port,
        "max-model-len": 1024, "cpu-memory-bytes": 4_000_000_000, "max-num-seqs": 8,
    }  # fmt: skip
    flags = [word for name, value in (fixed | settings).items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "modelserve_worker", "serve", *flags]
    with subprocess.Popen(command) as process:
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 240
            while True:
                assert process.poll() is None
                assert time.monotonic() < deadline
                try:
                    if httpx.get(f"{url}/ready").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.1)
            yield url
        finally:
            process.kill()


@pytest.mark.parametrize("variant", ["12B", "E2B"])
def test_pictures_are_answered_as_the_reference_answers_them(variant: str, tmp_path: Path) -> None:
    """Two in one prompt, in chunks, which of E2B end inside them, and whose tower each of two ranks has; the same again
    reads most of its rows and says the same; another says another."""
    model = tmp_path / "model"
    if variant == "12B":
        make_unified(model, seed=3, image_token=SLOT, vocab_size=512)
    else:
        make_towered(variant, model, seed=3, image_token=SLOT, vocab_size=512, vocab_size_per_layer_input=512)
    write_text_files(model)
    shown = [picture(seed=1), picture(90, 60, seed=2, kind="JPEG")]
    fields = {"max_tokens": 6, "temperature": 0, "logprobs": True, "return_tokens_as_token_ids": True}
    body = asking(text("which "), image(shown[0]), text("?"), image(shown[1]), text("now"), **fields)
    body["ignore_eos"] = True
    steps, ranks = (80, 1) if variant == "12B" else (32, 2)
    settings = {"images-per-request": 2, "max-soft-tokens": 70}
    settings |= {"max-num-batched-tokens": steps, "tensor-parallel-size": ranks}
    with worker(model, **settings) as url:
        answers = []
        for asked in (body, body, body | {"messages": asking(image(picture(seed=9)), text("?"))["messages"]}):
            answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=120)
            assert answer.status_code == 200, answer.text
            answers.append(answer.json())
        fields_of_prompt = {"model": "tiny", "messages": body["messages"]}
        prompt = httpx.post(f"{url}/tokenize", json=fields_of_prompt, timeout=60).json()["tokens"]
    first, again, other = (answer["choices"][0]["logprobs"]["content"] for answer in answers)
    assert [each["token"] for each in first] == [each["token"] for each in again]
    assert first[0]["token"] != other[0]["token"] or abs(first[0]["logprob"] - other[0]["logprob"]) > 0.01
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 64
    reader = ImageReader(ImageInput(2, 70, ARCHITECTURE), DecodePool(1))
    spans = []
    for number, data in enumerate(shown):
        start = prompt.index(SLOT) if not spans else prompt.index(SLOT, spans[0].end)
        order = reader.look(data, 70).order
        rgb = decoded(data, order)
        patches = patches_of(rgb, height=order.resized_height, width=order.resized_width, side=48)
        spans.append(image_span(start, patches, seed=number))
    reader.close()
    said = [int(each["token"].removeprefix("token_id:")) for each in first]
    wanted = seen_logits(model, [*prompt, *said], spans, image_token=SLOT).log_softmax(-1)
    for index, each in enumerate(first):
        assert abs(float(wanted[len(prompt) - 1 + index, said[index]]) - each["logprob"]) <= 2e-4
        assert int(wanted[len(prompt) - 1 + index].argmax()) == said[index]


@pytest.mark.parametrize(
    ("model_type", "settings", "reason", "words"),
    [
        (
            "gemma4_unified",
            {"max_num_batched_tokens": 279},
            "InvalidEngineArgs",
            "a step has 279 .max",
        ),
        ("gemma4_text", {}, "UnsupportedModel", "'gemma4_text': images are taken with gemma4 and gemma4_unified"),
    ],
)
def test_a_worker_says_why_it_takes_no_images(
    model_type: str, settings: dict[str, int], reason: str, words: str, tmp_path: Path
) -> None:
    """Before it loads: steps that are too short for an image, and a model of text alone."""
    vision = {"patch_size": 16, "pooling_kernel_size": 3, "mm_embed_dim": 64, "mm_posemb_size": 1120}
    text_config = {"use_bidirectional_attention": "vision"}
    config = {"model_type": model_type, "vision_config": vision, "text_config": text_config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TerminalError, match=words) as refused:
        image_reader(EngineArgs(model=str(tmp_path), images_per_request=1, **settings), DecodePool(1))
    assert refused.value.reason == reason
    assert image_reader(EngineArgs(model=str(tmp_path), **settings), DecodePool(1)) is None


def test_soft_tokens_are_one_of_the_models_budgets() -> None:
    with pytest.raises(ValueError, match="300 is none of the models' budgets, 70, 140, 280, 560, 1120"):
        EngineArgs(model="/m", images_per_request=1, max_soft_tokens=300)
