"""POST /tokenize and /detokenize, GET /tokenizer_info: the text half of the server by itself, in vLLM's shapes."""

from __future__ import annotations

from array import array
from typing import Annotated, Any

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from modelserve_worker.server.answers.preparation import chat_prompt, completion_prompts
from modelserve_worker.server.answers.prompt_tokens import require_in_vocabulary
from modelserve_worker.server.bodies.messages import Message
from modelserve_worker.server.bodies.protocol import ChatCompletionRequest, CompletionRequest, TokenIds
from modelserve_worker.server.bodies.request_model import RequestModel
from modelserve_worker.server.bodies.tools import MAX_TOOLS, Tool
from modelserve_worker.server.errors.errors import FieldError
from modelserve_worker.server.state import ServedModel
from modelserve_worker.text.detokenizer import decode

_OF_CHAT = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class TokenizeRequest(RequestModel):
    """Either `prompt`, as /v1/completions takes it, or `messages` with what /v1/chat/completions knows of them."""

    model: str | None = None
    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_special_tokens: bool | None = Field(default=None, description="true for prompt, false for messages")
    return_token_strs: bool = False

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        reference = handler(core)
        schema = handler.resolve_ref_schema(reference)
        fields = schema.pop("properties")
        for key in ("type", "additionalProperties"):
            schema.pop(key)
        schema["oneOf"] = [
            {
                "type": "object",
                "properties": {name: field for name, field in fields.items() if name not in others},
                "required": [required],
                "additionalProperties": False,
            }
            for required, others in (("prompt", _OF_CHAT), ("messages", ("prompt",)))
        ]
        return reference

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if self.prompt is None and self.messages is None:
            raise FieldError("prompt", "prompt and messages are both missing: one of them is required")
        if self.prompt is not None and self.messages is not None:
            raise FieldError("messages", "prompt and messages exclude each other; send one")
        given = [name for name in _OF_CHAT[1:] if name in self.model_fields_set]
        if self.prompt is not None and given:
            raise ValueError(f"{given[0]} belongs to messages; a prompt is encoded as it is")
        return self

    def token_ids(self, model: ServedModel, *, max_model_len: int) -> array[int]:
        """The prompt that the same fields have in a request for an answer. Raises ApiError."""
        fields: dict[str, Any] = {"model": model.name}
        if self.add_special_tokens is not None:
            fields["add_special_tokens"] = self.add_special_tokens
        if self.messages is None:
            completion = CompletionRequest(prompt=self.prompt, **fields)  # type: ignore[arg-type]
            (prompt,) = completion_prompts(completion, model, max_model_len=max_model_len)
            return prompt
        fields |= {name: getattr(self, name) for name in _OF_CHAT if name in self.model_fields_set}
        return chat_prompt(ChatCompletionRequest(**fields), model, max_model_len=max_model_len)


class DetokenizeRequest(RequestModel):
    """Token ids to text, special tokens written out."""

    model: str | None = None
    tokens: TokenIds = Field(max_length=1 << 20)


def tokenize(body: TokenizeRequest, model: ServedModel, *, max_model_len: int) -> dict[str, Any]:
    """Token ids, their number, the longest context, and on request each token as text. Raises ApiError."""
    token_ids = body.token_ids(model, max_model_len=max_model_len)
    texts = [model.text.tokenizer.id_to_token(token_id) for token_id in token_ids] if body.return_token_strs else None
    return {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids.tolist(), "token_strs": texts}


def detokenize(body: DetokenizeRequest, model: ServedModel, *, max_model_len: int) -> dict[str, Any]:  # noqa: ARG001
    """The text. Raises ApiError for an id outside the vocabulary."""
    require_in_vocabulary(body.tokens, model, param="tokens")
    return {"prompt": decode(body.tokens, model.text.vocabulary, skip_special_tokens=False)}


def tokenizer_info(model: ServedModel) -> dict[str, Any]:
    """tokenizer_config.json of the checkpoint, with the chat template that is used."""
    template = model.text.chat_template
    return {**model.text.tokenizer_config, "chat_template": None if template is None else template.source}
