"""Forms that ask for the text of a recording."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator

from modelserve_worker.server.bodies.field_policy import TRANSCRIPTION_FIELDS
from modelserve_worker.server.bodies.request_model import RequestModel

LONGEST_PROMPT = 4096
_LANGUAGES: Mapping[str, str] = {
    "ar": "Arabic", "bn": "Bengali", "cs": "Czech", "da": "Danish", "de": "German", "el": "Greek", "en": "English",
    "es": "Spanish", "fa": "Persian", "fi": "Finnish", "fr": "French", "he": "Hebrew", "hi": "Hindi",
    "hu": "Hungarian", "id": "Indonesian", "it": "Italian", "ja": "Japanese", "ko": "Korean", "nl": "Dutch",
    "no": "Norwegian", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sv": "Swedish",
    "ta": "Tamil", "te": "Telugu", "th": "Thai", "tr": "Turkish", "uk": "Ukrainian", "ur": "Urdu", "vi": "Vietnamese",
    "zh": "Chinese",
}  # fmt: skip
_NUMBERS = ("temperature", "seed")
_FLAGS = {"true": True, "false": False}
_WITH_TIMES = ("verbose_json", "srt", "vtt", "diarized_json")

Language = Annotated[str, StringConstraints(pattern=r"^[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8})*$", max_length=32)]


class TranscriptionRequest(RequestModel):
    """What is said in a recording, in the language that is spoken."""

    ignored = TRANSCRIPTION_FIELDS

    file: bytes = Field(min_length=1, description="WAV, FLAC, OGG or MP3, of half an hour at most")
    model: str
    language: Language | None = Field(default=None, description="that is spoken, as ISO 639-1 names it: en")
    prompt: str | None = Field(default=None, max_length=LONGEST_PROMPT, description="names, or what was said before")
    response_format: Literal["json", "text"] = "json"
    temperature: float = Field(default=0.0, ge=0, le=2)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    stream: bool = False

    @field_validator("response_format", mode="before")
    @classmethod
    def _no_times(cls, value: Any) -> Any:
        if value in _WITH_TIMES:
            raise ValueError(f"{value} tells times, or who speaks, which the model does not hear; take json or text")
        return value

    @property
    def instruction(self) -> str:
        """What the model is asked beside the recording."""
        spoken = "" if self.language is None else f" in {language_name(self.language)}"
        asked = (
            f"Transcribe the following speech{spoken}, in the language that is spoken. Answer with the transcription "
            "alone, without line breaks, and with numbers in digits."
        )
        return self._with_prompt(asked)

    def _with_prompt(self, asked: str) -> str:
        return asked if not self.prompt else f"{asked} Names and words that may occur: {self.prompt}"


class TranslationRequest(TranscriptionRequest):
    """What is said in a recording, in English."""

    @property
    def instruction(self) -> str:
        spoken = "" if self.language is None else f" in {language_name(self.language)}"
        asked = (
            f"Translate the following speech{spoken} into English. Answer with the translation alone, without line "
            "breaks, and with numbers in digits."
        )
        return self._with_prompt(asked)


def language_name(code: str) -> str:
    """In English; of one that is not listed, its code."""
    return _LANGUAGES.get(code.partition("-")[0].lower(), f"the language {code}")


def document_of(fields: Mapping[str, Sequence[bytes]]) -> dict[str, Any]:
    """The fields of a form as JSON would have them: text, but for the file, numbers and what is true or false. A field
    that stands there twice is a list."""
    return {name: _value(name, held[0]) if len(held) == 1 else [_value(name, each) for each in held]
            for name, held in fields.items()}  # fmt: skip


def _value(name: str, data: bytes) -> Any:
    if name == "file":
        return data
    text = data.decode(errors="replace")
    if name in _NUMBERS:
        try:
            number = float(text)
            return int(text) if text.lstrip("-").isdigit() else number if math.isfinite(number) else text
        except ValueError:
            return text
    return _FLAGS.get(text.lower(), text) if name == "stream" else text


class JoinedText:
    """The texts of sounds that follow each other, as one: white space at their ends is one space, or none between
    characters that are written without."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._begun = False
        self._behind = ""  # white space that stands if anything follows

    def next_sound(self) -> None:
        self._begun, self._behind = False, ""

    def push(self, text: str) -> str:
        """What is added to the whole by a further piece of the sound's text."""
        lead = self._behind
        if not self._begun:
            text = text.lstrip()
            if not text:
                return ""
            last = self.said[-1][-1] if self.said else ""
            lead = " " if last and not (_wide(last) and _wide(text[0])) else ""
            self._begun = True
        whole = lead + text
        kept = whole.rstrip()
        if not kept:
            self._behind = whole
            return ""
        self._behind = whole[len(kept) :]
        self.said.append(kept)
        return kept

    @property
    def text(self) -> str:
        return "".join(self.said)


def _wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in "WF"
