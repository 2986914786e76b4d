"""Tokens and text by themselves, names, load and the continued message."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

CHAT = [{"role": "user", "content": "hé"}]


@pytest.fixture
def http(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as client:
        yield client


def test_tokens_of_a_prompt_and_back(http: httpx.Client) -> None:
    body = http.post("/tokenize", json={"model": "tiny", "prompt": "hé", "return_token_strs": True}).json()
    assert body == {
        "count": 4, "max_model_len": 512, "tokens": [2, 238 + 0x68, 238 + 0xC3, 238 + 0xA9],
        "token_strs": ["<bos>", "h", "Ã", "©"],
    }  # fmt: skip
    assert http.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": "<bos>hé"}
    bare = http.post("/tokenize", json={"prompt": "hé", "add_special_tokens": False}).json()
    assert (bare["tokens"], bare["token_strs"]) == (body["tokens"][1:], None)


def test_tokens_of_a_conversation_are_those_of_its_request(server: Any, http: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    fields = {"messages": CHAT, "tools": tools, "chat_template_kwargs": {"enable_thinking": True}}
    tokens = http.post("/tokenize", json=fields).json()["tokens"]
    assert http.post("/v1/chat/completions", json={"model": "tiny", "max_tokens": 1, **fields}).status_code == 200
    assert tokens == list(server.engine.requests[-1].prompt_token_ids)
    closed = http.post("/tokenize", json=fields | {"add_generation_prompt": False}).json()["tokens"]
    assert tokens[: len(closed)] == closed
    assert len(closed) < len(tokens)


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("/tokenize", {}, "prompt and messages are both missing: one of them is required"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt and messages exclude each other; send one"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools belongs to messages"),
        ("/tokenize", {"messages": [*CHAT, {"role": "tool", "content": "x"}]}, "messages.1.tool_call_id"),
        ("/tokenize", {"messages": CHAT, "continue_final_message": True}, "last message of role assistant"),
        ("/detokenize", {"tokens": [512]}, "token id 512 is outside the vocabulary"),
    ],
)
def test_refusals(http: httpx.Client, route: str, body: dict[str, Any], message: str) -> None:
    answer = http.post(route, json=body)
    assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True), answer.text


def test_the_tokenizers_settings_and_the_template(server: Any, http: httpx.Client) -> None:
    info = http.get("/tokenizer_info").json()
    assert (info["tokenizer_class"], info["bos_token"]) == ("PreTrainedTokenizerFast", "<bos>")
    assert info["chat_template"] == server.state.model.text.chat_template.source


def test_several_names_are_one_model(server: Any, http: httpx.Client) -> None:
    server.state.model = replace(server.state.model, aliases=("gpt-4", "default"))
    cards = http.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"]) for card in cards] == [(name, "tiny") for name in ("tiny", "gpt-4", "default")]
    assert http.get("/v1/models/gpt-4").json() == cards[1]
    answer = http.post("/v1/completions", json={"model": "default", "prompt": "a"})
    assert (answer.status_code, answer.json()["model"]) == (200, "tiny")
    refused = http.post("/v1/completions", json={"model": "big", "prompt": "a"})
    assert "this server serves 'tiny', 'gpt-4', 'default'" in refused.json()["error"]["message"]


def test_load_and_ping(server: Any, http: httpx.Client) -> None:
    assert http.get("/load").json() == {"server_load": 0}
    server.engine.step_seconds = 0.2  # far from its end however busy the machine is
    body = {"model": "tiny", "prompt": "a", "stream": True, "ignore_eos": True, "max_tokens": 400}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # kept: an iterator that is dropped closes its connection
        next(lines)
        assert http.get("/load").json() == {"server_load": 1}
    assert http.get("/ping").status_code == 200
    server.engine.dead = "stopped"
    assert http.get("/ping").status_code == 503


@pytest.mark.parametrize("content", ["The answer is ", [{"type": "text", "text": "The answer is "}], ""])
def test_a_continued_message_goes_on_behind_its_last_character(server: Any, http: httpx.Client, content: Any) -> None:
    said = content if isinstance(content, str) else content[0]["text"]
    messages = [*CHAT, {"role": "assistant", "content": content}]
    body = {"model": "tiny", "messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    prompt = server.state.model.text.tokenizer.decode(
        server.engine.requests[-1].prompt_token_ids, skip_special_tokens=False
    )
    assert prompt == f"<bos><|turn>user\nhé<turn|>\n<|turn>model\n{said}"
    both = http.post("/v1/chat/completions", json=body | {"add_generation_prompt": True})
    assert "exclude each other" in both.json()["error"]["message"]
    last = http.post("/v1/chat/completions", json=body | {"messages": CHAT})
    assert "needs a last message of role assistant" in last.json()["error"]["message"]
