"""Exercises as token ids, with the tokens that the model has to say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from modelserve_tools.evaluation.exercise import Exercise, ToolCall
from modelserve_tools.tiny.__main__ import chat_template
from modelserve_tools.tiny.tokenizer_files import SPECIAL_TOKENS
from modelserve_worker.server.answers.conversation import template_messages
from modelserve_worker.server.bodies.messages import Message
from modelserve_worker.text.chat_template import ChatTemplate

_IDS = {text: token_id for token_id, text in SPECIAL_TOKENS.items()}
TURN, END_OF_TURN, TOOL_RESPONSE, END_OF_TOOL_RESPONSE = (
    _IDS[text] for text in ("<|turn>", "<turn|>", "<|tool_response>", "<tool_response|>")
)
_MODEL_TURN = "<|turn>model\n"
_SPECIAL_TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}


@dataclass(frozen=True)
class Rendered:
    """Token ids of a conversation with its answer; `answers` are half-open ranges, the last one is the final answer.

    The token at position p of a range is predicted from the tokens before p.
    """

    token_ids: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]

    @property
    def prompt_tokens(self) -> int:
        return self.answers[-1][0]


class Renderer:
    """Conversations in the chat format of one published variant ("31b", "e4b"), as the server would render them."""

    def __init__(self, tokenizer: Tokenizer, *, variant: str) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(chat_template(variant), special_tokens=_SPECIAL_TOKENS)
        self._model_turn = tuple(self._encode(_MODEL_TURN))

    def render(self, exercise: Exercise) -> Rendered:
        """The conversation up to the end of the final answer, its end-of-turn token included."""
        prompt = self._encode(self._text(exercise, exercise.messages, add_generation_prompt=True))
        answer = self._encode(self._answer(exercise))
        earlier = tuple(self._earlier_answers(prompt))
        return Rendered(tuple(prompt + answer), (*earlier, (len(prompt), len(prompt) + len(answer))))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _text(self, exercise: Exercise, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        variables = {"tools": list(exercise.tools) or None, "enable_thinking": exercise.thinking}
        ready = template_messages([Message.model_validate(message) for message in messages])
        return self._template.render(ready, add_generation_prompt=add_generation_prompt, variables=variables)

    def _answer(self, exercise: Exercise) -> str:
        answer = exercise.answer
        thought = f"<|channel>thought\n{answer.reasoning}<channel|>" if exercise.thinking else ""
        if not answer.tool_calls:
            return f"{thought}{answer.content}<turn|>"
        calls = [_call(call, call_id=f"answer_{i}") for i, call in enumerate(answer.tool_calls)]
        said = {"role": "assistant", "tool_calls": calls}
        text = self._text(exercise, [*exercise.messages, said], add_generation_prompt=False)
        return f"{thought}{text[text.rindex(_MODEL_TURN) + len(_MODEL_TURN) :]}<|tool_response>"

    def _earlier_answers(self, prompt: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Ranges of what the model said in finished turns, and of its calls in the turn that a tool has answered."""
        opening = self._model_turn
        start: int | None = None
        for position, token in enumerate(prompt):
            if token == TURN:
                said = position + len(opening)
                start = said if tuple(prompt[position:said]) == opening else None
            elif start is not None and token in (END_OF_TURN, TOOL_RESPONSE):
                if start < position:
                    yield start, position + 1
                start = None
            elif token == END_OF_TOOL_RESPONSE:
                start = position + 1


def _call(call: ToolCall, *, call_id: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
    return {"id": call_id, "type": "function", "function": function}
