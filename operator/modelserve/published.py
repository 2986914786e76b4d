"""The published Gemma 4 checkpoints, by name.

`hf://google/gemma-4-{E2B,E4B,12B,26B-A4B,31B}` and their `-it` forms in bfloat16, `-it-qat-w4a16-ct` in INT4 (not of
26B-A4B), and the drafters `-it-assistant`.

Drafters of the DFlash family: `hf://z-lab/gemma-4-31B-it-DFlash`, `hf://RedHatAI/gemma-4-31B-it-speculator.{dflash,dspark}`
and `hf://deepseek-ai/dspark_gemma4_12b_block7`; an inspect Job reads others.

Their facts ship with the package, so that a plan for them needs neither network nor an inspect Job.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve.model.assistant import AssistantArchitecture
from modelserve.model.audio import AudioArchitecture
from modelserve.model.drafters.configs import dflash_architecture
from modelserve.model.images import ImageArchitecture
from modelserve.model.model_facts import AssistantFacts, ModelFacts
from modelserve.model.weight_format import BFLOAT16, int4
from modelserve.sizing.weights.text import weight_terms

_NAME = re.compile(r"hf://google/gemma-4-(?P<variant>[A-Z0-9-]+?)(?P<form>-it|-it-qat-w4a16-ct)?")
_QAT_FORM = "-it-qat-w4a16-ct"
ASSISTANT_LAYERS = 4
_DRAFTER_NAME = re.compile(r"hf://google/gemma-4-(?P<variant>[A-Z0-9-]+?)-it-assistant")


def published_model(uri: str) -> ModelFacts | None:
    """Facts of a published checkpoint, or None when the address is not one of them."""
    match = _NAME.fullmatch(uri)
    if match is None or match["variant"] not in _data()["variants"]:
        return None
    facts = _facts(match["variant"], "it" if match["form"] else "base")
    if match["form"] != _QAT_FORM:
        return facts
    return _quantised(match["variant"], facts) if _data()["variants"][match["variant"]]["qat_int4"] else None


def published_assistant(uri: str) -> AssistantFacts | None:
    """Facts of a published drafter, or None when the address is not one of them."""
    match = _DRAFTER_NAME.fullmatch(uri)
    if match is None or match["variant"] not in _data()["variants"]:
        return _published_dflash(uri)
    stored = _data()["variants"][match["variant"]]["assistant_bytes"]
    return AssistantFacts(assistant=assistant_of(match["variant"]), weight_bytes=stored)


@cache
def _published_dflash(uri: str) -> AssistantFacts | None:
    data = json.loads(files("modelserve").joinpath("data/drafters.json").read_text())["drafters"].get(uri)
    if data is None:
        return None
    return AssistantFacts(assistant=dflash_architecture(data["config"]), weight_bytes=data["checkpoint_bytes"])


def assistant_uri(model: str) -> str | None:
    """Address of the assistant that is published with a model, or None: base models have none. Those that are trained
    for quantisation have none of their own, so it is that of their size."""
    match = _NAME.fullmatch(model)
    if match is None or not match["form"] or match["variant"] not in _data()["variants"]:
        return None
    return f"hf://google/gemma-4-{match['variant']}-it-assistant"


@cache
def assistant_of(variant: str) -> AssistantArchitecture:
    """Geometry of a published size's drafter: four layers, the last of them global. KeyError for another size."""
    target, own = _facts(variant, "it").architecture, _data()["variants"][variant]["assistant"]
    fields = target.model_dump() | own
    return AssistantArchitecture.model_validate(
        fields
        | {
            "num_hidden_layers": ASSISTANT_LAYERS,
            "num_kv_shared_layers": ASSISTANT_LAYERS,
            "full_attention_layers": (ASSISTANT_LAYERS - 1,),
            "backbone_hidden_size": target.hidden_size,
            "final_logit_softcapping": None,
            "use_double_wide_mlp": False,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_experts": 0,
            "top_k_experts": 0,
            "moe_intermediate_size": 0,
        }
    )


def lineage_problem(model: str, drafter: str) -> str | None:
    """Why an assistant was trained for another form of a model, by the names of both (addresses or directories), or
    None. Nothing breaks then, but a model that is trained for quantisation says other tokens than its assistant."""
    quantised = {name: "-qat-" in name for name in (model, drafter)}
    if quantised[model] == quantised[drafter]:
        return None
    which, other = ("is", "is not") if quantised[model] else ("is not", "is")
    return (
        f"the model {model} {which} trained for quantisation (-qat-) and the drafter {drafter} {other}: few of its "
        "drafts may be right; use the assistant that was published with this form of the model"
    )


def published_uris() -> tuple[str, ...]:
    """Every address that `published_model` knows."""
    variants = _data()["variants"].items()
    return tuple(
        f"hf://google/gemma-4-{variant}{form}"
        for variant, entry in variants
        for form in ("", "-it", *([_QAT_FORM] if entry["qat_int4"] else []))
    )


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
        architecture=ModelArchitecture.from_config(config),
        images=_images(entry),
        audio=_audio(entry),
        weight_bytes=entry["checkpoint_bytes"],
        format=BFLOAT16,
    )


def _images(entry: Mapping[str, Any]) -> ImageArchitecture:
    return ImageArchitecture.from_config({name: entry[name] for name in ("model_type", "vision_config", "text_config")})


def _audio(entry: Mapping[str, Any]) -> AudioArchitecture | None:
    """None: it hears nothing."""
    if "audio_config" not in entry:
        return None
    return AudioArchitecture.from_config({name: entry[name] for name in ("model_type", "audio_config")})


def _quantised(variant: str, facts: ModelFacts) -> ModelFacts:
    """The INT4 form: all of the decoder's linear layers, those of per-layer embeddings too, in groups of 32.

    Towers stay bfloat16; the files may hold the embedding twice, so the budget counts it twice.
    """
    entry, stored_as = _data()["variants"][variant], int4(32)
    text = weight_terms(facts.architecture, tensor_parallel_size=1, weight_format=stored_as)
    towers = entry["checkpoint_bytes"] - 2 * entry["parameters"]
    stored = towers + sum(text.values()) + text["embedding"]
    return facts.model_copy(update={"weight_bytes": stored, "format": stored_as})
