"""Text files of a model that sees and hears, pictures to send it, and parts of messages that hold them."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from modelserve.model.images import ImageArchitecture
from modelserve_tools.tiny import tokenizer_files
from modelserve_tools.tiny.__main__ import chat_template

SLOT, BEGIN, END = 110, 111, 112
SOUND_SLOT, SOUND_BEGIN, SOUND_END = 113, 114, 115
_TEXT_ONLY = "{{ raise_exception('content part ' ~ part.type ~ ' is not text') }}"
ARCHITECTURE = ImageArchitecture(patch_side=48, embed_size=40, positions=1120, mutual=True)


def write_text_files(directory: Path) -> None:
    """A tokenizer with the three tokens of images and of sounds, and a template that writes the first of them where an
    image or a sound is."""
    with pytest.MonkeyPatch.context() as patched:
        named = tokenizer_files.SPECIAL_TOKENS | {
            SLOT: "<|image|>", BEGIN: "<|image>", END: "<image|>",
            SOUND_SLOT: "<|audio|>", SOUND_BEGIN: "<|audio>", SOUND_END: "<audio|>",
        }  # fmt: skip
        patched.setattr(tokenizer_files, "SPECIAL_TOKENS", named)
        template = chat_template("e4b")
        assert _TEXT_ONLY in template
        template = template.replace(
            f"{{%- if part.type != 'text' -%}}{_TEXT_ONLY}{{%- endif -%}}",
            "{%- if part.type in ('image', 'audio') -%}<|{{ part.type }}|>{%- endif -%}",
        ).replace("{{ part.text }}", "{{ part.text if part.type == 'text' }}")
        tokenizer_files.write_tokenizer(directory, chat_template=template)


def picture(height: int = 60, width: int = 80, *, seed: int = 1, kind: str = "PNG") -> bytes:
    rough = np.random.default_rng(seed).integers(0, 256, (-(-height // 20), -(-width // 20), 3))
    values = np.kron(rough, np.ones((20, 20, 1)))[:height, :width].astype(np.uint8)
    held = io.BytesIO()
    Image.fromarray(values).save(held, kind)
    return held.getvalue()


def url_of(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def image(data: bytes, **options: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(data), **options}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def asking(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4, **fields}
