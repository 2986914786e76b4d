"""Fields that clients send and this server does not have: which are ignored, and why each may be.

A field whose absence changes nothing is ignored; a metric counts it and the log names it once. Everything else is
refused by name, since an answer that silently lacks what was asked for is worse than none. docs/fields.md shows both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ignored:
    """A field with `values` is ignored with one of them only; None stands for any value."""

    reason: str
    values: tuple[Any, ...] | None = None

    def covers(self, value: Any) -> bool:
        if self.values is None:
            return True
        return any(type(value) is type(each) and value == each for each in self.values)


_BOOKKEEPING = "the client's own bookkeeping; no part of the prompt"
_NOTHING_STORED = "nothing is stored here, whatever it says"
_NO_TIERS = "there is one class of service"
_PREFIX_CACHE = "a hint; prefixes are cached without being asked"
_OFF = "with this value it asks for nothing"
_DEFAULT = "this is how the server behaves"
_NOTHING_CUT = "nothing is cut: an input beyond the context is refused"
_ECHO = "clients send back whole what they were answered; it is no part of the prompt"

_PREDICTION = Ignored("it changes no answer; /v1/chat/completions uses it")

SHARED_FIELDS: Mapping[str, Ignored] = {
    "user": Ignored(_BOOKKEEPING),
    "metadata": Ignored(_BOOKKEEPING),
    "safety_identifier": Ignored(_BOOKKEEPING),
    "request_id": Ignored("ids come in the header X-Request-Id"),
    "store": Ignored(_NOTHING_STORED),
    "service_tier": Ignored(_NO_TIERS),
    "priority": Ignored(_NO_TIERS, (0,)),
    "prompt_cache_key": Ignored(_PREFIX_CACHE),
    "prompt_cache_retention": Ignored(_PREFIX_CACHE),
    "prompt_cache_options": Ignored(_PREFIX_CACHE),
    "best_of": Ignored(_OFF, (1,)),
    "use_beam_search": Ignored(_OFF, (False,)),
    "length_penalty": Ignored(_OFF, (1, 1.0)),
    "early_stopping": Ignored(_OFF, (False,)),
    "typical_p": Ignored(_OFF, (1, 1.0)),
    "top_a": Ignored(_OFF, (0, 0.0)),
    "bad_words": Ignored(_OFF, ([],)),
    "logits_processors": Ignored(_OFF, ([],)),
    "vllm_xargs": Ignored(_OFF, ({},)),
    "mm_processor_kwargs": Ignored(_OFF, ({},)),
    "kv_transfer_params": Ignored(_OFF, ({},)),
    "media_io_kwargs": Ignored(_OFF, ({},)),
    "truncate_prompt_tokens": Ignored(_NOTHING_CUT, (-1,)),
    "return_token_ids": Ignored(_OFF, (False,)),
    "detokenize": Ignored(_DEFAULT, (True,)),
    "spaces_between_special_tokens": Ignored("no spaces are put between tokens"),
}

COMPLETION_FIELDS: Mapping[str, Ignored] = {
    **SHARED_FIELDS,
    "prediction": _PREDICTION,
    "suffix": Ignored(_OFF, ("",)),
    "logprobs": Ignored(_OFF, (False,)),
}

CHAT_FIELDS: Mapping[str, Ignored] = {
    **{name: ignored for name, ignored in SHARED_FIELDS.items() if name != "mm_processor_kwargs"},  # read
    "echo": Ignored(_OFF, (False,)),
    "functions": Ignored(_OFF, ([],)),
    "function_call": Ignored(_OFF, ("none", "auto")),
    "documents": Ignored(_OFF, ([],)),
    "verbosity": Ignored(_DEFAULT, ("medium",)),
    "include_reasoning": Ignored(_DEFAULT, (True,)),
}

RESPONSES_FIELDS: Mapping[str, Ignored] = {
    **{name: ignored for name, ignored in SHARED_FIELDS.items() if name not in ("user", "metadata")},  # told again
    "prediction": _PREDICTION,
    "truncation": Ignored(_NOTHING_CUT),
    "max_tool_calls": Ignored("it bounds built-in tools, of which there are none"),
    "top_logprobs": Ignored(_OFF, (0,)),
}

ANTHROPIC_FIELDS: Mapping[str, Ignored] = {
    **SHARED_FIELDS,
    "prediction": _PREDICTION,
    "cache_control": Ignored(_PREFIX_CACHE),
    "context_management": Ignored(_OFF, ({}, {"edits": []})),
    "mcp_servers": Ignored(_OFF, ([],)),
    "betas": Ignored(_OFF, ([],)),
    "fallbacks": Ignored(_OFF, ([],)),
    "speed": Ignored(_NO_TIERS, ("standard",)),
    "user_profile_id": Ignored(_BOOKKEEPING),
    "workspace_id": Ignored(_BOOKKEEPING),
}

TRANSCRIPTION_FIELDS: Mapping[str, Ignored] = {
    "user": Ignored(_BOOKKEEPING),
    "chunking_strategy": Ignored("recordings are cut where they are quiet", ("auto",)),
    "include": Ignored(_OFF, ([],)),
    "stream_include_usage": Ignored("usage comes with the last event"),
    "stream_continuous_usage_stats": Ignored("usage comes with the last event"),
}

STREAM_OPTIONS_FIELDS: Mapping[str, Ignored] = {
    "continuous_usage_stats": Ignored("usage comes with the last event, if include_usage asks for it"),
    "include_obfuscation": Ignored("padding of events, which is no part of the answer"),
}

MESSAGE_FIELDS: Mapping[str, Ignored] = {
    "id": Ignored(_ECHO),
    "object": Ignored(_ECHO),
    "created": Ignored(_ECHO),
    "status": Ignored(_ECHO),
    "metadata": Ignored(_BOOKKEEPING),
    "provider_specific_fields": Ignored(_ECHO),
    "additional_kwargs": Ignored(_ECHO),
    "response_metadata": Ignored(_ECHO),
    "cache_control": Ignored(_PREFIX_CACHE),
    "annotations": Ignored(_ECHO),
    "reasoning_details": Ignored("reasoning_content says the same"),
    "thinking_blocks": Ignored("reasoning_content says the same"),
    "parsed": Ignored("content says the same"),
    "function_call": Ignored("tool_calls say the same", ({},)),
    "refusal": Ignored(_OFF, ("",)),
    "images": Ignored(_OFF, ([],)),
    "weight": Ignored("it concerns training"),
    "is_error": Ignored(_OFF, (False,)),
}

PART_FIELDS: Mapping[str, Ignored] = {
    "cache_control": Ignored(_PREFIX_CACHE),
    "annotations": Ignored(_ECHO),
    "citations": Ignored(_ECHO),
    "logprobs": Ignored(_ECHO),
    "provider_specific_fields": Ignored(_ECHO),
    "id": Ignored(_ECHO),
}

INPUT_FIELDS: Mapping[str, Ignored] = {
    "id": Ignored(_ECHO),
    "status": Ignored(_ECHO),
    "phase": Ignored(_ECHO),
    "summary": Ignored("of a thought, content is read"),
    "encrypted_content": Ignored("nothing is encrypted here; of a thought, content is read"),
}

BLOCK_FIELDS: Mapping[str, Ignored] = {
    "cache_control": Ignored(_PREFIX_CACHE),
    "citations": Ignored(_ECHO),
    "signature": Ignored("nothing is signed here"),
    "is_error": Ignored("the model's format has no sign for it; the content must say it"),
}

THINKING_FIELDS: Mapping[str, Ignored] = {
    "display": Ignored("thoughts come whole"),
}

REASONING_FIELDS: Mapping[str, Ignored] = {
    "summary": Ignored("thoughts come whole"),
    "generate_summary": Ignored("thoughts come whole"),
}

CALL_FIELDS: Mapping[str, Ignored] = {
    "index": Ignored("a part of streams, which clients leave in calls they put together"),
    "provider_specific_fields": Ignored(_ECHO),
    "cache_control": Ignored(_PREFIX_CACHE),
    "parsed_arguments": Ignored("arguments say the same"),
    "thought_signature": Ignored(_ECHO),
}

TOOL_FIELDS: Mapping[str, Ignored] = {
    "cache_control": Ignored(_PREFIX_CACHE),
    "provider_specific_fields": Ignored(_ECHO),
    "defer_loading": Ignored(_OFF, (False,)),
    "eager_input_streaming": Ignored("arguments are always streamed as they are written"),
    "input_examples": Ignored("the model's format has no place for them"),
}


class FieldPolicy:
    """What one server does with ignored fields. `on_ignored` hears (field, reason) of each, from any thread.

    With `strict` nothing is ignored.
    """

    def __init__(self, *, strict: bool = False, on_ignored: Callable[[str, str], None] | None = None) -> None:
        self._strict = strict
        self._on_ignored = on_ignored

    def without_ignored(self, document: Mapping[str, Any], table: Mapping[str, Ignored], where: str) -> dict[str, Any]:
        """`document` less null fields and those that `table` covers; `where` names the object, such as "messages."."""
        kept = {}
        for name, value in document.items():
            if value is None:
                continue  # null means that a field was left out
            ignored = table.get(name)
            if ignored is None or not ignored.covers(value) or self._strict:
                kept[name] = value
            elif self._on_ignored is not None:
                self._on_ignored(where + name, ignored.reason)
        return kept


LENIENT = FieldPolicy()


def policy_of(context: Any) -> FieldPolicy:
    """The policy that is the context of a validation, or one that tells nobody."""
    return context if isinstance(context, FieldPolicy) else LENIENT
