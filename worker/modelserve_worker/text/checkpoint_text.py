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
from modelserve_worker.text.chat_template import ChatTemplate
from modelserve_worker.text.prompt_encoder import PromptEncoder
from modelserve_worker.text.vocabulary import Vocabulary

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
    """Read tokenizer.json and, where present, tokenizer_config.json, chat_template.jinja and generation_config.json.

    Raises InvalidInput that names the file.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise InvalidInput(f"{path} is missing; a checkpoint needs the tokenizer of its model", field="tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for every fault of the file
        raise InvalidInput(f"{path}: {error}", field="tokenizer.json") from error
    settings_file = directory / "tokenizer_config.json"
    settings = read_json_object(settings_file) if settings_file.is_file() else {}
    return CheckpointText(
        tokenizer=tokenizer,
        vocabulary=Vocabulary.from_tokenizer(tokenizer),
        chat_template=_chat_template(directory, settings),
        defaults=_defaults(directory),
        tokenizer_config=settings,
    )


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


def _defaults(directory: Path) -> SamplingDefaults:
    document = read_generation_config(directory)
    names = SamplingDefaults.__dataclass_fields__
    given = {name: document[name] for name in names if document.get(name) is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidInput(f"{directory / GENERATION_FILE}: {name} must be a number, not {value!r}", field=name)
    if document.get("do_sample") is False:
        given["temperature"] = 0.0
    return SamplingDefaults(**given)
