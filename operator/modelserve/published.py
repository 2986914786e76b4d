"""The published Gemma 4 checkpoints `hf://google/gemma-4-{E2B,E4B,12B,26B-A4B,31B}` and their `-it` forms, by name.

Their facts ship with the package, so that a plan for them needs neither network nor an inspect Job.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

from modelserve.architecture import LayerKind, ModelArchitecture
from modelserve.model_facts import ModelFacts

_NAME = re.compile(r"hf://google/gemma-4-(?P<variant>[A-Z0-9-]+?)(?P<it>-it)?")


def published_model(uri: str) -> ModelFacts | None:
    """Facts of a published checkpoint, or None when the address is not one of them."""
    match = _NAME.fullmatch(uri)
    if match is None or match["variant"] not in _data()["variants"]:
        return None
    return _facts(match["variant"], "it" if match["it"] else "base")


def published_uris() -> tuple[str, ...]:
    """Every address that `published_model` knows."""
    return tuple(f"hf://google/gemma-4-{variant}{form}" for variant in _data()["variants"] for form in ("", "-it"))


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(files("modelserve").joinpath("data/gemma4.json").read_text())
    return data


@cache
def _facts(variant: str, form: str) -> ModelFacts:
    entry = _data()["variants"][variant]
    text = dict(entry["text_config"])
    full = set(text.pop("full_attention_layers"))
    kinds = (LayerKind.GLOBAL if i in full else LayerKind.SLIDING for i in range(text["num_hidden_layers"]))
    text["layer_types"] = [kind.value for kind in kinds]
    config = {
        "model_type": entry["model_type"],
        "eos_token_id": _data()["eos_token_ids"][form],
        "dtype": "bfloat16",
        "text_config": text,
    }
    return ModelFacts(
        architecture=ModelArchitecture.from_config(config), weight_bytes=entry["checkpoint_bytes"], format="bfloat16"
    )
