"""Parts of a message that are images or sounds, as clients send them and as the rest of the server has them.

A part of a chat message that is an image has the type IMAGE, a `url`, and where its client says so a `detail` and
`max_soft_tokens`; one that is a sound the type AUDIO and a `url`; all as text. What the kinds of other media are is
known, and that none of them is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from pydantic import Field, ValidationError, ValidationInfo

from modelserve.errors import first_fault
from modelserve_worker.server.bodies.field_policy import PART_FIELDS
from modelserve_worker.server.bodies.request_model import RequestModel
from modelserve_worker.server.errors.errors import FieldError

IMAGE, AUDIO = "image", "audio"
NOT_SERVED = "modality_not_served"
_OTHERS = {
    "video_url": "video", "input_video": "video",
    "video": "video", "file": "files", "input_file": "files", "document": "documents",
}  # fmt: skip
_IMAGES, _SOUNDS = ("image_url", "input_image", IMAGE), ("audio_url", "input_audio", AUDIO)

Detail = Literal["low", "auto", "high"]
SoftTokens = Literal[70, 140, 280, 560, 1120]


class ImageUrl(RequestModel):
    """Where an image is, and how closely the model looks: `detail` low is 70 soft tokens, auto 280, high 1,120;
    `max_soft_tokens` names them."""

    url: str
    detail: Detail | None = None
    max_soft_tokens: SoftTokens | None = None

    def part(self) -> dict[str, str]:
        named = {"detail": self.detail, "max_soft_tokens": self.max_soft_tokens and str(self.max_soft_tokens)}
        return {"type": IMAGE, "url": self.url, **{name: value for name, value in named.items() if value}}


class ImageUrlPart(RequestModel):
    """A part of a chat message that is an image, as it is documented."""

    ignored = PART_FIELDS
    described_as = "messages.content."

    type: Literal["image_url"]
    image_url: ImageUrl

    def part(self) -> dict[str, str]:
        return self.image_url.part()


class AudioUrl(RequestModel):
    """Where a sound is."""

    url: str


class AudioUrlPart(RequestModel):
    """A part of a chat message that is a sound, by vLLM's name."""

    ignored = PART_FIELDS
    described_as = "messages.content."

    type: Literal["audio_url"]
    audio_url: AudioUrl

    def part(self) -> dict[str, str]:
        return {"type": AUDIO, "url": self.audio_url.url}


class InputAudio(RequestModel):
    """The sound itself, in base64; its format is read from its bytes, whatever `format` says."""

    data: str
    format: str = Field(max_length=16, description="wav, mp3, flac or ogg")


class InputAudioPart(RequestModel):
    """The same by OpenAI's name."""

    ignored = PART_FIELDS
    described_as = "messages.content."

    type: Literal["input_audio"]
    input_audio: InputAudio

    def part(self) -> dict[str, str]:
        return {"type": AUDIO, "url": f"data:audio/{self.input_audio.format};base64,{self.input_audio.data}"}


class MediaSettings(RequestModel):
    """vLLM's name for what counts for all images of a request."""

    max_soft_tokens: SoftTokens | None = Field(default=None, description="soft tokens of an image at most")


class _Message(Protocol):
    @property
    def content(self) -> str | Sequence[Mapping[str, str]] | None: ...


_READ: Mapping[str, type[ImageUrlPart | AudioUrlPart | InputAudioPart]] = {
    "image_url": ImageUrlPart, "audio_url": AudioUrlPart, "input_audio": InputAudioPart,
}  # fmt: skip
MEDIA_KINDS = tuple(_READ)


def media_part(part: Mapping[str, Any], index: int, info: ValidationInfo) -> dict[str, str]:
    """A part of MEDIA_KINDS as the server has it. Raises FieldError."""
    try:
        return _READ[part["type"]].model_validate(part, context=info.context).part()
    except ValidationError as error:
        path, message = first_fault(error)
        at = ".".join(filter(None, (str(index), path)))
        raise FieldError(at, f"content part {at}: {message}") from error


def refuse_media(kind: Any, index: int) -> None:
    """Raise FieldError for a part that is no text, where it is of a known kind."""
    if kind in _IMAGES or kind in _SOUNDS:
        raise FieldError(
            str(index),
            f"content part {kind!r} is not supported here: messages of the user and results of tools have "
            f"{'images' if kind in _IMAGES else 'sounds'}",
            NOT_SERVED,
        )
    if kind in _OTHERS:
        raise FieldError(str(index), f"content part {kind!r}: this server takes no {_OTHERS[kind]}", NOT_SERVED)


def refuse_file(part: Mapping[str, Any], at: str) -> None:
    """Raise FieldError for an image that is named as a file which its client has stored."""
    if part.get("file_id") is not None:
        raise FieldError(
            f"{at}.file_id",
            f"{at}: an image by file_id is not supported: this server keeps no files; send the image, or its address",
            NOT_SERVED,
        )


def media_parts(messages: Sequence[_Message]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Every image and sound of a conversation with its place in the body, in order."""
    for number, message in enumerate(messages):
        for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part["type"] in (IMAGE, AUDIO):
                yield f"messages.{number}.content.{index}", part


def for_template(part: Mapping[str, str]) -> Mapping[str, str]:
    """What a chat template sees of a part: of an image or a sound, that there is one."""
    return {"type": part["type"]} if part["type"] in (IMAGE, AUDIO) else part
