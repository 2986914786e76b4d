"""What a checkpoint directory says about text: tokenizer, chat template, sampling defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from modelserve.errors import InvalidInput
from modelserve.model.checkpoint_files import GENERATION_FILE, read_generation_config, read_json_object
from modelserve.model.gguf.files import GgufCheckpoint, read_gguf
from modelserve_worker.text.chat_template import ChatTemplate
from modelserve_worker.text.gguf_tokenizer import repeated_tokens, special_tokens, tokenizer_json
from modelserve_worker.text.prompt_encoder import PromptEncoder
from modelserve_worker.text.vocabulary import Vocabulary

TOKENIZER_FILE = "tokenizer.json"
_GGUF_SAMPLING = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat"
}  # fmt: skip
_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True)
class SamplingDefaults:
    """generation_config.json: what a request gets for the fields it leaves out."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class CheckpointText:
    """Everything the server needs to turn text into token ids and back."""

    tokenizer: Tokenizer
    vocabulary: Vocabulary
    chat_template: ChatTemplate | None
    defaults: SamplingDefaults
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)  # tokenizer_config.json as it is

    @cached_property
    def encoder(self) -> PromptEncoder:
        """The way to token ids: raw text with its control tokens, and conversations, which can spell none."""
        longest = max(map(len, self.vocabulary.token_bytes))
        return PromptEncoder(self.tokenizer, longest_token_bytes=longest)


def load_checkpoint_text(directory: Path) -> CheckpointText:
    """Read tokenizer.json and, where present, tokenizer_config.json, chat_template.jinja and generation_config.json; of
    a GGUF checkpoint its metadata, which hold all that.

    Raises InvalidInput that names the file.
    """
    source = read_tokenizer_json(directory)
    if source is None:
        path = directory / TOKENIZER_FILE
        raise InvalidInput(f"{path} is missing; a checkpoint needs the tokenizer of its model", field=TOKENIZER_FILE)
    try:
        tokenizer = Tokenizer.from_str(source)
    except Exception as error:  # the library raises plain Exception for every fault of the file
        raise InvalidInput(f"{directory / TOKENIZER_FILE}: {error}", field=TOKENIZER_FILE) from error
    gguf, vocabulary = read_gguf(directory), Vocabulary.from_tokenizer(tokenizer)
    settings_file = directory / "tokenizer_config.json"
    settings: dict[str, Any] = {}
    if gguf is not None:
        vocabulary = vocabulary.with_texts(repeated_tokens(gguf))
        settings = {**special_tokens(gguf), "chat_template": gguf.metadata.get("tokenizer.chat_template")}
    elif settings_file.is_file():
        settings = read_json_object(settings_file)
    return CheckpointText(
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        chat_template=_chat_template(directory, settings),
        defaults=_defaults(directory, gguf),
        tokenizer_config=settings,
    )


def read_tokenizer_json(directory: Path) -> str | None:
    """The text of tokenizer.json, of a GGUF checkpoint as its metadata have it; None where there is none.

    Raises InvalidInput that names the file.
    """
    if (gguf := read_gguf(directory)) is not None:
        return tokenizer_json(gguf)
    path = directory / TOKENIZER_FILE
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path}: {error}", field=TOKENIZER_FILE) from error


def _chat_template(directory: Path, settings: dict[str, Any]) -> ChatTemplate | None:
    path = directory / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
    if source is None:
        return None
    if not isinstance(source, str):
        raise InvalidInput("tokenizer_config.json: chat_template must be a string", field="chat_template")
    return ChatTemplate(source, special_tokens=_special_tokens(settings))


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Token texts by role; a role is a plain string or an object with `content`."""
    texts = {}
    for role in _TOKEN_ROLES:
        token = settings.get(role)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            texts[role] = text
    return texts


def _defaults(directory: Path, gguf: GgufCheckpoint | None) -> SamplingDefaults:
    document = read_generation_config(directory)
    if gguf is not None:
        document = {name: gguf.metadata.get(f"general.sampling.{key}") for name, key in _GGUF_SAMPLING.items()}
    names = SamplingDefaults.__dataclass_fields__
    given = {name: document[name] for name in names if document.get(name) is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            where = directory / GENERATION_FILE if gguf is None else gguf.first
            raise InvalidInput(f"{where}: {name} must be a number, not {value!r}", field=name)
    if document.get("do_sample") is False:
        given["temperature"] = 0.0
    return SamplingDefaults(**given)
