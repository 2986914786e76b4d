"""The checkpoint's Jinja2 chat template, rendered in a sandbox."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from modelserve.errors import InvalidInput


class ChatTemplateError(InvalidInput):
    """The template refused these messages, or could not render them."""


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as the model was trained on: no HTML escapes, unlike Jinja2's own filter."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(pattern: str) -> str:
    return datetime.now(UTC).strftime(pattern)


class ChatTemplate:
    """A compiled template. Raises InvalidInput when the source is not valid Jinja2."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise InvalidInput(f"chat template, line {error.lineno}: {error.message}", field="chat_template") from error

    @property
    def reserved_names(self) -> frozenset[str]:
        """Variables that requests may not set: they come from fields of their own."""
        return frozenset({"messages", "tools", "add_generation_prompt", *self._special_tokens})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text, special tokens written out. Raises ChatTemplateError.

        `continue_final_message` leaves the last message open: the prompt ends with the last character of its content.
        """
        if not continue_final_message:
            return self._render(messages, add_generation_prompt, variables)
        end = f"[end {secrets.token_hex(16)}]"  # what templates trim and write behind a content is behind this, too
        text = self._render([*messages[:-1], _with_end(messages[-1], end)], False, variables)
        content, found, _ = text.partition(end)
        if not found:
            raise ChatTemplateError("it does not write the content of the final message, which cannot be continued")
        return content

    def history_length(
        self, messages: Sequence[Mapping[str, Any]], text: str, *, variables: Mapping[str, Any] | None = None
    ) -> int:
        """How many characters of a prompt's `text` are still there when its messages are history, with an answer and
        another question behind them: templates take thoughts out of older turns, and what opens an answer with them.
        """
        later = [*messages, {"role": "assistant", "content": "-"}, {"role": "user", "content": "-"}]
        try:
            history = self._render(later, True, variables)
        except ChatTemplateError:  # it may not go on in this way
            return len(text)
        same, differs = 0, min(len(text), len(history)) + 1
        while differs - same > 1:  # by halves, since strings are compared faster than characters
            middle = (same + differs) // 2
            same, differs = (middle, differs) if text[same:middle] == history[same:middle] else (same, middle)
        return same

    def _render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any] | None
    ) -> str:
        context = {
            **(variables or {}),
            **self._special_tokens,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(context)
        except ChatTemplateError:
            raise
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise ChatTemplateError(f"{type(error).__name__}: {error}") from error


def _with_end(message: Mapping[str, Any], end: str) -> dict[str, Any]:
    content = message.get("content") or ""
    if isinstance(content, str):
        return {**message, "content": content + end}
    return {**message, "content": [*content, {"type": "text", "text": end}]}
