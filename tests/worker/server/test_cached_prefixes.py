"""What a client is told of the prefix cache, whose prefixes it reads, and where a chat says that histories part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from modelserve_tools.tiny.__main__ import chat_template
from modelserve_tools.tiny.tokenizer_files import write_tokenizer
from modelserve_worker.server.answers.preparation import chat_sequences
from modelserve_worker.server.bodies.protocol import ChatCompletionRequest
from modelserve_worker.server.settings import ServerSettings
from modelserve_worker.server.state import ServedModel, ServerState
from modelserve_worker.text.checkpoint_text import load_checkpoint_text

USER = {"role": "user", "content": "What is the time in Rome, and what was it an hour ago?"}
SYSTEM = {"role": "system", "content": "You are brief."}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c0", "type": "function", "function": {"name": "now", "arguments": "{}"}}
CALLS = [
    {"role": "assistant", "content": "", "reasoning_content": "I must ask the clock.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c0", "content": "12:00"},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "place", "cached"),
    [
        ("completions", {"prompt": "once", "n": 2}, ("usage", "prompt_tokens_details", "cached_tokens"), 3),
        ("chat/completions", {"messages": [USER]}, ("usage", "prompt_tokens_details", "cached_tokens"), 3),
        ("responses", {"input": "hi"}, ("usage", "input_tokens_details", "cached_tokens"), 3),
        ("messages", {"messages": [USER], "max_tokens": 9}, ("usage", "cache_read_input_tokens"), 3),
    ],
)
def test_every_api_tells_how_much_of_the_prompt_was_cached(
    server: Any, path: str, body: dict[str, Any], place: tuple[str, ...], cached: int, stream: bool
) -> None:
    server.engine.cached_tokens = 3
    server.says("a b")
    told = {"stream_options": {"include_usage": True}} if stream and path.endswith("completions") else {}
    answer = httpx.post(f"{server.url}/v1/{path}", json={"model": "tiny", "stream": stream, **body, **told})
    assert answer.status_code == 200, answer.text
    if stream:
        assert f'"{place[-1]}":{cached}' in answer.text.replace(" ", "")
        return
    found = answer.json()
    for name in place:
        found = found[name]
    assert found == cached, "of a prompt with two answers once"
    if path == "messages":
        whole = len(server.engine.requests[-1].prompt_token_ids)
        assert answer.json()["usage"]["input_tokens"] == whole - 3, "as Anthropic counts"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "once"}),
        ("chat/completions", {"messages": [USER]}),
        ("responses", {"input": "hi"}),
        ("messages", {"messages": [USER], "max_tokens": 9}),
    ],
)
def test_a_salt_reaches_the_engine(server: Any, path: str, body: dict[str, Any]) -> None:
    for salt in ({"cache_salt": "mine"}, {}):
        httpx.post(f"{server.url}/v1/{path}", json={"model": "tiny", **body, **salt}).raise_for_status()
    salted, plain = (request.cache_namespace for request in server.engine.requests)
    assert salted != plain
    wrong = httpx.post(f"{server.url}/v1/{path}", json={"model": "tiny", **body, "cache_salt": ""})
    assert (wrong.status_code, "cache_salt" in wrong.text) == (400, True)


@pytest.mark.parametrize("shared", [False, True])
def test_keys_are_tenants_unless_they_share(
    served_model: ServedModel, echo_engine: Any, serve_with: Any, shared: bool
) -> None:
    state = ServerState(served_model)
    state.mark_ready(echo_engine)
    with serve_with(state, echo_engine, ServerSettings(api_keys=("one", "two"), share_prefixes=shared)) as live:
        for key in ("one", "two", "one"):
            headers = {"Authorization": f"Bearer {key}"}
            body = {"model": "tiny", "prompt": "once"}
            httpx.post(f"{live.url}/v1/completions", json=body, headers=headers).raise_for_status()
    first, second, third = (request.cache_namespace for request in echo_engine.requests)
    assert first == third
    assert (first == second) is shared
    assert len({request.client for request in echo_engine.requests}) == 2, "bytes are counted by key all the same"


def test_without_keys_everybody_shares(server: Any) -> None:
    httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "once"}).raise_for_status()
    (request,) = server.engine.requests
    assert (request.tenant, request.client) == ("", "127.0.0.1")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ServedModel]:
    found = {}
    for variant in ("e4b", "31b"):
        directory: Path = tmp_path_factory.mktemp(variant)
        write_tokenizer(directory, chat_template=chat_template(variant))
        found[variant] = ServedModel("tiny", load_checkpoint_text(directory), vocab_size=512)
    return found


def _prompt(model: ServedModel, messages: list[dict[str, Any]], **fields: Any) -> tuple[list[int], tuple[int, ...]]:
    body = ChatCompletionRequest.model_validate({"model": "tiny", "messages": messages, **fields})
    (spec,) = chat_sequences(body, model, response_id="r", max_model_len=4096)
    return list(spec.request.prompt_token_ids), spec.request.checkpoints


@pytest.mark.parametrize("variant", ["e4b", "31b"])
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER], [SYSTEM, USER, *CALLS], [USER, *CALLS, *CALLS]])
def test_a_prompt_knows_where_its_next_turn_parts_from_it(
    models: dict[str, ServedModel], variant: str, thinking: bool, messages: list[dict[str, Any]]
) -> None:
    """Found by rendering both ways, and compared here token by token with what the next turn really sends."""
    fields = {"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": thinking}}
    prompt, checkpoints = _prompt(models[variant], messages, **fields)
    later, _ = _prompt(
        models[variant],
        [*messages, {"role": "assistant", "content": "Noon."}, {**USER, "content": "And now?"}],
        **fields,
    )
    same = next((at for at, (one, other) in enumerate(zip(prompt, later, strict=False)) if one != other), len(prompt))
    turn = models[variant].text.vocabulary.ids["<|turn>"]
    second_turn = [at for at, token_id in enumerate(prompt) if token_id == turn][1]
    assert checkpoints[0] == second_turn, "behind the system block, which holds the tools"
    assert checkpoints == tuple(sorted({second_turn, same} - {len(prompt)}))


def test_a_template_that_cannot_go_on_says_nothing(models: dict[str, ServedModel]) -> None:
    messages = [USER, {"role": "assistant", "content": "Noon"}]
    _, checkpoints = _prompt(models["e4b"], messages, add_generation_prompt=False, continue_final_message=True)
    assert checkpoints == ()
