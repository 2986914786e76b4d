"""Bad requests get OpenAI's error shape with the field, the value and the limit; nothing unknown is ignored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from modelserve_worker.server.state import ServedModel, ServerState
from modelserve_worker.text.checkpoint_text import load_checkpoint_text

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hi"}


def _nested(depth: int) -> dict[str, Any]:
    """Objects inside each other."""
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


def _tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f"} | function}]}


def _history(*messages: dict[str, Any]) -> dict[str, Any]:
    return CHAT | {"messages": [*CHAT["messages"], *messages]}


def _calls(*calls: tuple[str, str]) -> dict[str, Any]:
    functions = [{"id": name, "function": {"name": "f", "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "tool_calls": functions}


@pytest.fixture
def http(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as client:
        yield client


def _error(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"], "every error has one"
    return error


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (CHAT | {"functions": [{"name": "f"}]}, "functions", "field 'functions' is not supported: use tools"),
        (CHAT | {"response_format": {"type": "xml"}}, "response_format.type", "Input should be 'text', 'json_object'"),
        (CHAT | {"modalities": ["text", "audio"]}, "modalities.1", "Input should be 'text', not 'audio'"),
        (CHAT | {"audio": {"voice": "alloy"}}, "audio", "does not speak; sounds are parts of messages"),
        (CHAT | {"temprature": 1}, "temprature", "check its spelling"),
        (CHAT | {"top_logprobs": 2}, "top_logprobs", "only with logprobs=true"),
        (CHAT | {"stream_options": {"include_usage": True}}, "stream_options", "only with stream=true"),
        (CHAT | {"temperature": 2.5}, "temperature", "less than or equal to 2, not 2.5"),
        (CHAT | {"temperature": "1"}, "temperature", "valid number, not '1'"),
        (CHAT | {"top_k": 1 << 70}, "top_k", "less than or equal to 2147483647"),
        (CHAT | {"n": 0}, "n", "greater than or equal to 1, not 0"),
        (CHAT | {"n": 129}, "n", "less than or equal to 128, not 129"),
        (CHAT | {"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        (CHAT | {"max_tokens": int("9" * 4300)}, "max_tokens", "less than or equal to 2147483647"),
        (CHAT | {"max_completion_tokens": int("9" * 4300)}, "max_completion_tokens", "equal to 2147483647"),
        (CHAT | {"min_tokens": 9, "max_tokens": 8}, "min_tokens", "min_tokens 9 exceeds max_tokens 8"),
        (CHAT | {"logit_bias": {"x": 1}}, "logit_bias", "keys are token ids, not 'x'"),
        (CHAT | {"logit_bias": {"1" * 5000: 1}}, "logit_bias", "keys are token ids, not '1111"),
        (CHAT | {"logit_bias": {"512": 1}}, "logit_bias", "512 is outside the vocabulary; ids go from 0 to 511"),
        (CHAT | {"stop_token_ids": [-1]}, "stop_token_ids.0", "greater than or equal to 0"),
        (CHAT | {"stop": [""]}, "stop.0", "at least 1 character"),
        (CHAT | {"stop": ["x"] * 17}, "stop", "at most 16 items"),
        (CHAT | {"messages": []}, "messages", "at least 1 item"),
        (CHAT | {"messages": [{"role": "function", "content": "x"}]}, "messages.0.role", "or 'tool', not 'function'"),
        (CHAT | {"messages": [{"role": "user"}]}, "messages.0.content", "required"),
        (
            CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0", "this server reads text only; plan images",
        ),
        (CHAT | {"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token", "set by the server"),
        (CHAT | {"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "half of a surrogate pair"),
        (CHAT | {"chat_template_kwargs": {"a": _nested(600)}}, "chat_template_kwargs", "nested more than 32 deep"),
        (CHAT | {"function_call": {"name": "f"}}, "function_call", "use tools, with tool_choice for the request"),
        (CHAT | {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0.type", "should be 'function'"),
        (CHAT | {"tools": [{"type": "function"}]}, "tools.0.function", "required"),
        (CHAT | _tool(name="f g"), "tools.0.function.name", "pattern '^[A-Za-z0-9_.:/-]{1,64}$', not 'f g'"),
        (CHAT | _tool(description="x" * 16385), "tools.0.function.description", "at most 16384 characters"),
        (CHAT | _tool(parameters={"description": "x" * 65536}), "tools.0.function.parameters", "the limit is 65536"),
        (CHAT | _tool(parameters=_nested(33)), "tools.0.function.parameters", "more than 32 deep; flatten the schema"),
        (CHAT | {"tools": _tool()["tools"] * 2}, "tools", "two functions are named 'f'; names must differ"),
        (CHAT | {"tools": _tool()["tools"] * 1025}, "tools", "at most 1024 items"),
        (CHAT | {"messages": [{"role": "user", "content": ["text"]}]}, "messages.0.content", "'text' is not supported"),
        (CHAT | {"tool_choice": "required"}, "tool_choice", "there are no tools; send tools"),
        (
            CHAT | _tool() | {"tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice", "tool_choice names 'g', which is none of the tools",
        ),
        (CHAT | _tool() | {"tool_choice": "any"}, "tool_choice", "is 'auto', 'none', 'required', {'type': 'function'"),
        (CHAT | {"reasoning_effort": "much"}, "reasoning_effort", "or 'xhigh', not 'much'"),
        (CHAT | {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools", "set by the server"),
        (_history(_calls(("a", "{}"), ("a", "{}"))), "messages.1.tool_calls.1.id", "ids must differ"),
        (_history({"role": "user", "content": None}), "messages.1.content", "required"),
        (_history({"role": "tool", "content": "x"}), "messages.1.tool_call_id", "required"),
        (
            _history(_calls(("a", "{}")), {"role": "tool", "tool_call_id": "b", "content": "x"}),
            "messages.2.tool_call_id", "made a call with the id 'b' (known: 'a')",
        ),
        (
            _history(_calls(("a", "{}")), CHAT["messages"][0], {"role": "tool", "tool_call_id": "a", "content": "x"}),
            "messages", "a tool message must follow an assistant message with tool_calls",
        ),
        (
            _history({"role": "user", "content": "x", "reasoning_content": "y"}),
            "messages.1.reasoning_content", "only assistant messages have it, not one of role 'user'",
        ),
        (
            _history({"role": "assistant", "content": "x", "tool_call_id": "y"}),
            "messages.1.tool_call_id", "only tool messages have it, not one of role 'assistant'",
        ),
        (TEXT | _tool(), "tools", "is not supported: it is a field of /v1/chat/completions"),
        (TEXT | {"prompt": ""}, "prompt", "must not be empty"),
        (TEXT | {"prompt": []}, "prompt", "must not be empty"),
        (TEXT | {"prompt": [[1], []]}, "prompt", "must not be empty"),
        (TEXT | {"prompt": 5}, "prompt", "a prompt is a string"),
        (TEXT | {"prompt": [512]}, "prompt", "token id 512 is outside the vocabulary"),
        (TEXT | {"prompt": [1, True]}, "prompt", "integers from 0 on, not 'True'"),
        (TEXT | {"prompt": [[1, -1]]}, "prompt", "integers from 0 on, not '-1'"),
        (TEXT | {"prompt": [5, (1 << 63) + 1]}, "prompt", "token id 9223372036854775809 is outside the vocabulary"),
        (TEXT | {"prompt": [5, True]}, "prompt", "integers from 0 on, not 'True'"),
        (TEXT | {"prompt": [5, "6"]}, "prompt", "integers from 0 on, not '6'"),
        (TEXT | {"prompt": [5, 6.5]}, "prompt", "integers from 0 on, not '6.5'"),
        (TEXT | {"prompt": [1 << 70]}, "prompt", "is outside the vocabulary"),
        (TEXT | {"prompt": ["a", 5]}, "prompt", "a string or a list of token ids, not '5'"),
        (TEXT | {"prompt": ["a"] * 1025}, "prompt", "there are 1025 prompts; the limit is 1024"),
        (TEXT | {"prompt": ["a"] * 600, "n": 2}, "n", "1200 answers; the limit is 1024"),
        (TEXT | {"best_of": 2}, "best_of", "use n"),
        (TEXT | {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "prompt_logprobs come with a whole answer"),
        (TEXT | {"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
        (TEXT | {"guided_json": {}}, "guided_json", "use structured_outputs"),
        (CHAT | {"guided_regex": "a"}, "guided_regex", "use structured_outputs"),
        (TEXT | {"structured_outputs": {}}, "structured_outputs", "exactly one of json"),
        (TEXT | {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one of json"),
        (TEXT | {"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"prompt": "hi"}, "model", "required"),
    ],
)  # fmt: skip
def test_bad_fields_are_named(http: httpx.Client, body: dict[str, Any], param: str | None, message: str) -> None:
    route = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    response = http.post(route, content=json.dumps(body), headers={"content-type": "application/json"})
    error = _error(response)
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert not error["message"].startswith("None")


def test_null_and_no_op_fields_are_accepted(http: httpx.Client) -> None:
    body = CHAT | {
        "tools": None, "tool_choice": "none", "functions": None, "user": "me",
        "metadata": {"a": "b"}, "store": False, "service_tier": "auto",
        "parallel_tool_calls": True, "response_format": {"type": "text"}, "modalities": ["text"],
        "chat_template_kwargs": {"enable_thinking": True},
    }  # fmt: skip
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"].startswith("system\n")


def test_whole_numbers_may_be_written_as_floats(server: Any, http: httpx.Client) -> None:
    """JSON does not tell 2.0 from 2; 2.5 and "2" are something else."""
    body = TEXT | {"prompt": [303.0, 304], "n": 2.0, "max_tokens": 3.0, "temperature": 1, "stop_token_ids": [5.0]}
    answer = http.post("/v1/completions", json=body)
    assert (answer.status_code, len(answer.json()["choices"])) == (200, 2)
    request = server.engine.requests[-1]
    assert (*request.prompt_token_ids, request.sampling.stop_token_ids) == (303, 304, (5,))
    for wrong in ({"n": 2.5}, {"n": "2"}, {"n": True}, {"prompt": [1.5]}, {"stop_token_ids": [0.5]}):
        assert http.post("/v1/completions", json=body | wrong).status_code == 400, wrong


def test_nesting_up_to_the_limit_is_rendered(server: Any, http: httpx.Client) -> None:
    server.engine.max_model_len = 4096
    body = _history(_calls(("a", json.dumps(_nested(32))))) | _tool(parameters=_nested(32), strict=False)
    assert http.post("/v1/chat/completions", json=body | {"max_tokens": 1}).status_code == 200


def test_the_context_limit_is_explained(http: httpx.Client) -> None:
    long = http.post("/v1/completions", json=TEXT | {"prompt": "x" * 512})
    assert _error(long)["message"].startswith(
        "This model's maximum context length is 512 tokens. The prompt has 513 tokens and 1 are asked for, together 514"
    ), "in the words by which clients know an overflow"
    assert (_error(long)["param"], _error(long)["code"]) == ("prompt", "context_length_exceeded")
    chat = http.post("/v1/chat/completions", json=CHAT | {"messages": [{"role": "user", "content": "x" * 512}]})
    assert (_error(chat)["param"], _error(chat)["code"]) == ("messages", "context_length_exceeded")
    for field, value in (("stop_token_ids", [99999]), ("logit_bias", {"99999": 1}), ("prompt", [99999])):
        beyond = _error(http.post("/v1/completions", json=TEXT | {field: value}))
        assert (beyond["param"], beyond["code"]) == (field, "invalid_value")
    asked = _error(http.post("/v1/completions", json=TEXT | {"max_tokens": 510}))
    assert (asked["param"], asked["code"]) == ("max_tokens", "context_length_exceeded")
    assert "ask for at most 509" in asked["message"]
    assert http.post("/v1/completions", json=TEXT | {"max_tokens": 509}).status_code == 200


def test_another_model_is_not_found(server: Any, http: httpx.Client) -> None:
    error = _error(http.post("/v1/completions", json=TEXT | {"model": "big"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.NotFoundError, match="serves 'tiny'"),
    ):
        client.models.retrieve("big")


def test_a_fault_of_the_server_is_told_with_its_id_and_hurts_no_connection(
    server: Any, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    server.engine.plan_report = broken
    connections = set()
    for _ in range(2):
        answer = http.get("/v1/plan", headers={"x-request-id": "abc-1"})
        assert _error(answer, 500)["code"] == "internal_error"
        assert answer.headers["x-request-id"] == "abc-1"
        connections.add(answer.extensions["network_stream"].get_extra_info("client_addr"))
    assert len(connections) == 1, "others of a pool would find it closed with their request on it"
    assert 'handler="/v1/plan",method="GET",status="500"} 2.0' in http.get("/metrics").text
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError] * 2
    assert "request abc-1 failed" in caplog.text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1]",
        b"\xff",
        b'{"model": NaN}',
        b"[" * 100_000,
        '{"model": "tiny", "prompt": "a"}'.encode("utf-16"),
    ],
)
def test_bodies_that_are_not_json_objects(http: httpx.Client, content: bytes) -> None:
    response = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert _error(response)["code"] == "invalid_json"


def test_unknown_routes_and_methods(http: httpx.Client) -> None:
    assert "no such route: GET /v2" in _error(http.get("/v2"), 404)["message"]
    for method, path, answered in (
        ("GET", "/v1/completions", {"POST"}),
        ("DELETE", "/v1/models/tiny", {"GET", "HEAD"}),
        ("GET", "/v1/messages/count_tokens", {"POST"}),
    ):
        answer = http.request(method, path)
        assert "does not answer that method" in answer.json()["error"]["message"]
        assert (answer.status_code, set(answer.headers["allow"].split(", "))) == (405, answered)
    assert "allow" not in http.get("/v2").headers
    assert http.post("/v1/completions", json=TEXT).status_code == 200, "the connection goes on"


def test_a_checkpoint_without_chat_template(
    server: Any, http: httpx.Client, tmp_path: Path, model_directory: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_directory / "tokenizer.json").read_bytes())
    state: ServerState = server.state
    state.model = ServedModel("tiny", load_checkpoint_text(tmp_path), vocab_size=512)
    error = _error(http.post("/v1/chat/completions", json=CHAT))
    assert (error["code"], "use /v1/completions" in error["message"]) == ("no_chat_template", True)
    assert http.post("/v1/completions", json=TEXT).status_code == 200


def test_a_tokenizer_larger_than_the_model(server: Any, http: httpx.Client) -> None:
    """Ids that the model has no embedding for never reach a step, which would fail for everyone in it."""
    state: ServerState = server.state
    state.model = ServedModel("tiny", state.model.text, vocab_size=300)
    assert http.post("/v1/completions", json=TEXT | {"prompt": "!"}).status_code == 200
    error = _error(http.post("/v1/completions", json=TEXT | {"prompt": "z"}))
    assert (error["param"], "is outside the vocabulary; ids go from 0 to 299" in error["message"]) == ("prompt", True)
    assert _error(http.post("/v1/chat/completions", json=CHAT | {"messages": [{"role": "user", "content": "z"}]}))


@pytest.mark.parametrize(
    ("route", "long", "asked"),
    [
        ("chat/completions", "messages", "max_tokens"),
        ("completions", "prompt", "max_tokens"),
        ("responses", "input", "max_output_tokens"),
        ("messages", "messages", "max_tokens"),
    ],
)
def test_an_overflow_begins_with_the_words_that_clients_know_in_every_api(
    http: httpx.Client, route: str, long: str, asked: str
) -> None:
    for text, most, param in (("x" * 600, 1, long), ("x", 4000, asked)):
        said = {"prompt": text, "input": text, "messages": [{"role": "user", "content": text}]}[long]
        answer = http.post(f"/v1/{route}", json={"model": "tiny", long: said, asked: most})
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert error["message"].startswith("This model's maximum context length is 512 tokens. The prompt has ")
        if route != "messages":  # Anthropic's errors have neither
            assert (error["param"], error["code"]) == (param, "context_length_exceeded")
