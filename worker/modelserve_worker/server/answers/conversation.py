"""From the messages of a request to those a chat template renders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modelserve_worker.server.bodies.media_parts import AUDIO, IMAGE, for_template
from modelserve_worker.server.bodies.messages import ONLY_ASSISTANT, Message, MessageToolCall
from modelserve_worker.server.errors.errors import ApiError
from modelserve_worker.server.json_text import nested_deeper, read_json
from modelserve_worker.text.markers import without_thoughts
from modelserve_worker.text.tool_calls import MAX_DEPTH

INSTRUCTIONS = ("system", "developer")


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages with arguments as objects; tool messages carry both the id they answer and the function's name.

    A call whose arguments are no object, as one that was cut, stands as text in its message, and what it returned as
    text of the user behind the other results: nobody ran it, and the conversation goes on. A thought stands under both
    names that templates look for. System and developer messages, wherever they stand, are one message at the beginning:
    the format has one place for them. Raises ApiError that names the field.
    """
    functions: dict[str, str] = {}  # name by id of the calls so far; a later call may use an id again
    spoken: set[str] = set()  # ids of those of them that stand as text
    ready: list[dict[str, Any]] = []
    returned: list[str] = []  # what such calls returned, not told yet
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        _require_fields_of_role(message, where)
        entry = message.model_dump(include={"role", "content", "name"}, exclude_none=True)
        if isinstance(message.content, list):
            entry["content"] = [for_template(part) for part in message.content]
        if message.role in ("assistant", "tool") and message.content is None and not message.tool_calls:
            entry["content"] = ""
        elif message.role == "assistant" and message.content is not None:
            # Here and not in the template, which sees markers in a message as the text they are.
            entry["content"] = without_thoughts(_text(message.content))
        if message.role == "tool":
            name = _answered(message, functions, where)
            if message.tool_call_id in spoken:
                _require_text(message, where)
                returned.append(f"{name} returned: {_text(message.content or '')}")
                continue
            entry |= {"tool_call_id": message.tool_call_id, "name": name}
        elif returned:
            ready.append(_told(returned))
            returned = []
        if message.tool_calls:
            calls, texts = _calls(message.tool_calls, where)
            functions |= {call.id: call.function.name for call in message.tool_calls}
            spoken = spoken - calls.keys() | texts.keys()
            if calls:
                entry["tool_calls"] = list(calls.values())
            if texts:
                entry["content"] = "\n".join([*filter(None, [_text(entry.get("content", ""))]), *texts.values()])
        thought = message.reasoning_content or message.reasoning
        if thought:
            entry |= {"reasoning_content": thought, "reasoning": thought}
        ready.append(entry)
    if returned:
        ready.append(_told(returned))
    return _instructions_first(ready)


def _require_text(message: Message, where: str) -> None:
    """Of the result of a call that stands as text."""
    for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
        if part["type"] in (IMAGE, AUDIO):
            param = f"{where}.content.{index}"
            raise _wrong(
                param, "the call that it answers is no valid one; its result stands as text, without images and sounds"
            )


def _told(returned: Sequence[str]) -> dict[str, Any]:
    return {"role": "user", "content": "\n".join(returned)}


def _instructions_first(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    instructions = [entry for entry in messages if entry["role"] in INSTRUCTIONS]
    if not instructions or (len(instructions) == 1 and instructions[0] is messages[0]):
        return messages
    text = "\n\n".join(_text(entry["content"]) for entry in instructions)
    others = [entry for entry in messages if entry["role"] not in INSTRUCTIONS]
    return [{"role": instructions[0]["role"], "content": text}, *others]


def _text(content: str | Sequence[Mapping[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _require_fields_of_role(message: Message, where: str) -> None:
    role = message.role
    if role != "assistant":
        for name in ONLY_ASSISTANT:
            if getattr(message, name):
                raise _wrong(f"{where}.{name}", f"only assistant messages have it, not one of role {role!r}")
    if role != "tool" and message.tool_call_id is not None:
        raise _wrong(f"{where}.tool_call_id", f"only tool messages have it, not one of role {role!r}")
    # An assistant may have said nothing (a thought that was cut), and a function may return nothing.
    if message.content is None and role not in ("assistant", "tool"):
        raise ApiError(f"field '{where}.content' is required", param=f"{where}.content", code="missing_field")


def _answered(message: Message, functions: dict[str, str], where: str) -> str:
    """Name of the function whose call the tool message answers."""
    param = f"{where}.tool_call_id"
    if message.tool_call_id is None:
        raise ApiError(f"field {param!r} is required", param=param, code="missing_field")
    if message.tool_call_id not in functions:
        known = ", ".join(repr(call_id) for call_id in list(functions)[-4:]) or "none"
        raise _wrong(
            param,
            f"no assistant message before it made a call with the id {message.tool_call_id[:80]!r} (known: {known}); "
            "keep the assistant message with its tool_calls in the conversation",
        )
    return functions[message.tool_call_id]


def _calls(calls: Sequence[MessageToolCall], where: str) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Calls for the template, and texts of those whose arguments are no object; both by id."""
    ready: dict[str, dict[str, Any]] = {}
    texts: dict[str, str] = {}
    for index, call in enumerate(calls):
        if call.id in ready or call.id in texts:
            param = f"{where}.tool_calls.{index}.id"
            raise _wrong(param, f"{call.id[:80]!r} is the id of another call in this message; ids must differ")
        name, arguments = call.function.name, _arguments(call.function.arguments)
        if arguments is None:
            texts[call.id] = f"{name}({call.function.arguments})"
        else:
            ready[call.id] = {"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return ready, texts


def _arguments(text: str) -> dict[str, Any] | None:
    """None for what is no object, or nested deeper than the model's format is read."""
    if not text.strip():
        return {}
    try:
        arguments = read_json(text)
    except ValueError:
        return None
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, dict) and not nested_deeper(arguments, MAX_DEPTH) else None


def _wrong(param: str, text: str) -> ApiError:
    return ApiError(f"{param}: {text}", param=param, code="invalid_value")
