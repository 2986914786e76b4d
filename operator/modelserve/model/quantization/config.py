"""`quantization_config` of a config.json: which weight format it states, which linear layers have it, and what of it is
not used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.checkpoint_files import CONFIG_FILE, read_json_object
from modelserve.model.quantization import auto_round, awq, block_fp8, compressed_tensors, gptq, modelopt
from modelserve.model.quantization.linears import FormatOf, of_modules
from modelserve.model.quantization.refusal import REMEDY, SHOWN, unknown
from modelserve.model.weight_format import StoredType, WeightFormat

MODELOPT_FILE = "hf_quant_config.json"  # beside a config.json that may not repeat it
_INSTEAD = {  # what to use in place of a method of quantisation that is not read
    "bitsandbytes": "a GPTQ, AWQ or compressed-tensors INT4 form of the model; bitsandbytes quantises as it loads",
    "gemma": "the -it-qat-w4a16-ct form",
    "gguf": "the -it-qat-w4a16-ct form, which has the same quantisation-aware training",
}


def read_config(directory: Path) -> dict[str, Any]:
    """`directory`/config.json, with what it states of the text model alone, or ModelOpt's own file, where it states
    nothing for the whole. Raises InvalidInput."""
    config = read_json_object(directory / CONFIG_FILE)
    text = config.get("text_config")
    stated = config.get("quantization_config") or (isinstance(text, Mapping) and text.get("quantization_config"))
    if stated:
        config = {**config, "quantization_config": stated}
    mixed = isinstance(stated, Mapping) and stated.get("quant_algo") == modelopt.MIXED
    if stated and not (mixed and "quantized_layers" not in modelopt.details(stated)):
        return config
    if not (directory / MODELOPT_FILE).exists():
        return config
    beside = read_json_object(directory / MODELOPT_FILE)
    return {**config, "quantization_config": {**beside, **(stated or {}), "quant_method": modelopt.METHOD}}


def stated_format(config: Mapping[str, Any], architecture: ModelArchitecture) -> WeightFormat | None:
    """The format that `quantization_config` states for this model's text; None where there is none.

    Raises UnsupportedModel, naming what was found and what to use, for every other scheme, for a quantised output head
    or router, and for linear layers of one kind that differ.
    """
    stated = config.get("quantization_config")
    if not stated:
        return None
    return of_modules(architecture, _format_of_modules(stated))


def _format_of_modules(stated: Any) -> FormatOf:
    match method := _method(stated):
        case "auto-round" | "intel/auto-round":
            return auto_round.format_of_modules(stated)
        case "awq":
            return awq.format_of_modules(stated)
        case "compressed-tensors":
            return compressed_tensors.format_of_modules(stated)
        case "fp8":
            return block_fp8.format_of_modules(stated)
        case "gptq":
            return gptq.format_of_modules(stated)
        case modelopt.METHOD:
            return modelopt.format_of_modules(stated)
    raise unknown(f"quant_method {method}", _INSTEAD.get(method, REMEDY))


def unused_parts(config: Mapping[str, Any], stored: WeightFormat) -> Iterator[str]:
    """What a checkpoint read as `stored` states that is not used, and what holds in its place, a sentence each."""
    stated = config.get("quantization_config")
    if not isinstance(stated, Mapping):
        return
    said = modelopt.details(stated)
    if said.get("kv_cache_scheme") or said.get("kv_cache_quant_algo"):
        yield (
            "the checkpoint's scheme for the KV cache is not used, and k_scale and v_scale are not read: kvCache.dtype "
            "says how the cache is held, with scales of its own"
        )
    types, by_modelopt = {each.stored for each in stored.formats()}, _method(stated) == modelopt.METHOD
    inputs = list(_input_activations(said))
    weights_alone = by_modelopt and said.get("quant_algo") == "W4A16_NVFP4"
    rounded = (by_modelopt and not weights_alone) or any(each.get("num_bits") == 4 for each in inputs)
    if StoredType.NVFP4 in types and rounded:
        yield "inputs are not rounded to NVFP4: its weights are read, and products are in the compute type"
    if StoredType.INT8 in types and any(each.get("type") == "int" for each in inputs):
        yield "inputs are not rounded to INT8: its weights are read, and products are in the compute type"
    static = said.get("activation_scheme") == "static" or any(each.get("dynamic") is False for each in inputs)
    if StoredType.FP8 in types and (by_modelopt or static):
        yield "static scales of inputs (input_scale) are not used: inputs are rounded by one scale per token"


def _input_activations(said: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    groups = said.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        found = group.get("input_activations") if isinstance(group, Mapping) else None
        if isinstance(found, Mapping):
            yield found


def _method(stated: object) -> str:
    found = stated.get("quant_method") if isinstance(stated, Mapping) else type(stated).__name__
    text = str(found)[:SHOWN].lower().replace("_", "-")
    return modelopt.METHOD if text.startswith(f"{modelopt.METHOD}-") else text  # with the algorithm, as vLLM has it
