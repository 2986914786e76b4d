"""OpenAI's `prediction`: text that a client expects the answer to be, or nearly, as a file that is to be edited."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ValidationInfo, field_validator

from modelserve_worker.server.bodies.field_policy import PART_FIELDS
from modelserve_worker.server.bodies.messages import TextPart
from modelserve_worker.server.bodies.request_model import RequestModel
from modelserve_worker.server.bodies.text_content import text_parts


class Prediction(RequestModel):
    """`content` is text, or a list of {"type": "text", "text": ...} parts. It changes no token of the answer."""

    ignored = PART_FIELDS
    described_as = "prediction."

    type: Literal["content"]
    content: str | list[dict[str, str]]

    @field_validator("content", mode="before", json_schema_input_type=str | list[TextPart])
    @classmethod
    def _text_parts_only(cls, value: Any, info: ValidationInfo) -> Any:
        return text_parts(value, ("text",), info)

    @property
    def text(self) -> str:
        """All of it."""
        content = self.content
        return content if isinstance(content, str) else "".join(part["text"] for part in content)
