"""The requests that load generators send, replayed: guidellm 0.8.1, aiperf 0.13.0, vllm bench at 02cfb53."""

from __future__ import annotations

import json
import sys
from typing import Any

import httpx
from features import HELLO, HOST, MODEL, run

_USER = [{"role": "user", "content": HELLO}]
_PARTS = [{"role": "user", "content": [{"type": "text", "text": HELLO}]}]
_USAGE = {"include_usage": True}
_CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
PAYLOADS: dict[str, dict[str, dict[str, Any]]] = {
    "guidellm": {
        "chat": {
            "model": MODEL, "stream": True, "stream_options": _CONTINUOUS, "max_completion_tokens": 8, "stop": None,
            "ignore_eos": True, "messages": _PARTS,
        },
        "completions": {
            "model": MODEL, "stream": True, "stream_options": _CONTINUOUS, "max_tokens": 8, "stop": None,
            "ignore_eos": True, "prompt": HELLO,
        },
    },
    "aiperf": {
        "chat": {
            "messages": [{"role": "user", "content": HELLO}], "model": MODEL, "stream": True,
            "max_completion_tokens": 8, "min_tokens": 8, "ignore_eos": True, "stream_options": _USAGE,
        },
        "completions": {"prompt": HELLO, "model": MODEL, "stream": True, "max_tokens": 8, "stream_options": _USAGE},
    },
    "vllm bench": {
        "chat": {
            "model": MODEL, "messages": _PARTS, "max_completion_tokens": 8, "stream": True, "stream_options": _USAGE,
            "ignore_eos": True, "temperature": 0.0,
        },
        "completions": {
            "model": MODEL, "prompt": HELLO, "repetition_penalty": 1.0, "max_tokens": 8, "logprobs": None,
            "stream": True, "stream_options": _USAGE, "ignore_eos": True, "temperature": 0.0,
        },
    },
}  # fmt: skip


def _replay(route: str, payload: dict[str, Any]) -> None:
    with httpx.stream("POST", f"{HOST}{route}", json=payload, timeout=60) as answer:
        if answer.status_code != 200:
            raise AssertionError(f"{answer.status_code}: {answer.read().decode()}")
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    if events[-1] != "[DONE]" or json.loads(events[-2])["usage"]["completion_tokens"] != 8:
        raise AssertionError(f"it ends with {events[-2:]}")


def chat() -> None:
    _replay("/v1/chat/completions", PAYLOADS[sys.argv[1]]["chat"])


def completions() -> None:
    _replay("/v1/completions", PAYLOADS[sys.argv[1]]["completions"])


run(chat, completions)
