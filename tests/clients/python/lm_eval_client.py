"""lm-eval: its two kinds of API models, by the requests that its tasks make."""

from __future__ import annotations

from typing import Any

from features import BASE_URL, HELLO, MODEL, SAID, run, same
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

SETTINGS: Any = {"pretrained": MODEL, "model": MODEL, "tokenizer_backend": None, "num_concurrent": 1, "max_retries": 1}


def _instance(kind: Any, *arguments: Any) -> Any:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def chat() -> None:
    """generate_until of a chat model."""
    model = LocalChatCompletion(base_url=f"{BASE_URL}/chat/completions", **SETTINGS)
    prompt = model.apply_chat_template([{"role": "user", "content": HELLO}])
    until = {"until": ["\n\n"], "max_gen_toks": 32}
    same(model.generate_until([_instance("generate_until", prompt, until)], disable_tqdm=True), [SAID])


def completions() -> None:
    """generate_until of a text model."""
    model = LocalCompletionsAPI(base_url=f"{BASE_URL}/completions", **SETTINGS)
    until = {"until": ["\n\n"], "max_gen_toks": 32}
    same(model.generate_until([_instance("generate_until", HELLO, until)], disable_tqdm=True), [SAID])


def loglikelihood() -> None:
    """echo with logprobs over token ids; the tokens are those of /tokenize."""
    remote = SETTINGS | {"tokenizer_backend": "remote"}
    model = LocalCompletionsAPI(base_url=f"{BASE_URL}/completions", **remote)
    ((value, _),) = model.loglikelihood([_instance("loglikelihood", "Hi", " there")], disable_tqdm=True)
    same(isinstance(value, float) and value < 0, True)


run(chat, completions, loglikelihood)
