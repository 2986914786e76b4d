"""A checkpoint of published geometry with random weights, for runs through the whole product without the real files.

    python tests/bench random_checkpoint DIRECTORY --variant 31B [--device cuda] [--processes 4]

`--variant tiny` is the demo's small model, written the same way. The values are those of `--load-format dummy` with the
same seed. Tokens beyond the small tokenizer's get made-up words, so that a completion can be read.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve.model.assistant import AssistantArchitecture
from modelserve.model.checkpoint_files import INDEX_FILE
from modelserve.published import assistant_of, published_model
from modelserve_tools.tiny.__main__ import chat_template
from modelserve_tools.tiny.tokenizer_files import write_tokenizer
from modelserve_tools.tiny.variants import config_json as tiny_config_json
from modelserve_worker.layers.placement import Placement
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.models.gemma4_checkpoint import TEXT_PREFIXES, weight_sources
from modelserve_worker.models.weight_source import WeightSource
from modelserve_worker.weights.dummy import DummyWeights

SHARD_BYTES = 2 << 30
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


def sources(architecture: ModelArchitecture) -> list[WeightSource]:
    """Every tensor that the model reads, from a model that holds no memory."""
    meta = torch.device("meta")
    model = Gemma4ForCausalLM(architecture, Placement(meta, torch.bfloat16))
    return list(weight_sources(model))


def shards(tensors: list[WeightSource]) -> list[list[str]]:
    """Names by file, about SHARD_BYTES each, in the model's order."""
    files: list[list[str]] = []
    filled = SHARD_BYTES
    for tensor in tensors:
        size = 2 * math.prod(tensor.shape)
        if filled + size > SHARD_BYTES:
            files.append([])
            filled = 0
        files[-1].append(tensor.name)
        filled += size
    return files


def write_shard(path: Path, names: list[str], *, architecture: ModelArchitecture, device: str, seed: int) -> int:
    """Write one safetensors file of bfloat16 tensors and return their bytes."""
    weights = DummyWeights(seed=seed, device=torch.device(device), dtype=torch.bfloat16)
    wanted = {source.name: source for source in sources(architecture)}
    tensors = {
        TEXT_PREFIXES[0] + name: weights.read(wanted[name], start=0, count=wanted[name].shape[0]).contiguous().cpu()
        for name in names
    }
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library writes 0600, which a pod with another user could not read
    return sum(tensor.nbytes for tensor in tensors.values())


def made_up_words(first: int, stop: int) -> Iterator[tuple[str, int]]:
    """(piece, id) for ids [first, stop): a space, in byte-level BPE's spelling, and syllables that spell the id."""
    for token_id in range(first, stop):
        digits, rest = [], token_id
        while rest:
            rest, digit = divmod(rest, len(SYLLABLES))
            digits.append(SYLLABLES[digit])
        yield "\u0120" + "".join(digits), token_id


def write_text_files(directory: Path, architecture: ModelArchitecture) -> None:
    write_tokenizer(directory, chat_template=chat_template("31b"))
    path = directory / "tokenizer.json"
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = document["model"]["vocab"]
    vocabulary.update(made_up_words(len(vocabulary), architecture.vocab_size))
    path.write_text(json.dumps(document), encoding="utf-8")


def config_json(architecture: ModelArchitecture) -> dict[str, Any]:
    """A config.json of `architecture`, in the shape of the published ones."""
    a = architecture
    text: dict[str, Any] = {
        name: getattr(a, name)
        for name in (
            "num_hidden_layers", "hidden_size", "intermediate_size", "use_double_wide_mlp", "num_attention_heads",
            "num_key_value_heads", "head_dim", "global_head_dim", "attention_k_eq_v", "num_kv_shared_layers",
            "sliding_window", "max_position_embeddings", "vocab_size", "hidden_size_per_layer_input",
            "vocab_size_per_layer_input", "rms_norm_eps", "final_logit_softcapping",
        )
    }  # fmt: skip
    text |= {
        "num_global_key_value_heads": a.num_global_key_value_heads if a.attention_k_eq_v else None,
        "layer_types": [a.kind(layer).value for layer in range(a.num_hidden_layers)],
        "rope_parameters": {
            LayerKind.SLIDING.value: {"rope_type": "default", "rope_theta": a.sliding_rope_theta},
            LayerKind.GLOBAL.value: {
                "rope_type": "proportional",
                "rope_theta": a.global_rope_theta,
                "partial_rotary_factor": a.global_partial_rotary_factor,
            },
        },
    }
    if a.num_experts:
        text |= {
            "enable_moe_block": True,
            "num_experts": a.num_experts,
            "top_k_experts": a.top_k_experts,
            "moe_intermediate_size": a.moe_intermediate_size,
        }
    return {"model_type": "gemma4", "dtype": "bfloat16", "eos_token_id": [1], "text_config": text}


def read_config(variant: str, weights: str | None = None) -> dict[str, Any]:
    """config.json of a published size, or of the demo's model.

    `weights` names a quantised format for its linear layers, such as int4_g32, and wants tests/models on the path.
    """
    if variant == "tiny":
        config = tiny_config_json("31b")
    else:
        facts = published_model(f"hf://google/gemma-4-{variant}")
        if facts is None:
            raise SystemExit(f"--variant {variant}: not a published size; take E2B, E4B, 12B, 26B-A4B, 31B or tiny")
        config = config_json(facts.architecture)
    if not weights:
        return config
    from bench.quantised_config import quantised  # which imports from tests/models

    return quantised(config, weights)


def assistant_config(variant: str) -> dict[str, Any]:
    """config.json of the published size's assistant, or of a small one for the demo's model."""
    target = ModelArchitecture.from_config(read_config(variant))
    assistant = _small_assistant(target) if variant == "tiny" else assistant_of(variant)
    assert assistant is not None, f"{variant} has no published assistant"
    return config_json(assistant) | {
        "model_type": "gemma4_assistant", "backbone_hidden_size": target.hidden_size,
        "use_ordered_embeddings": assistant.num_centroids > 0, "num_centroids": assistant.num_centroids,
        "centroid_intermediate_top_k": assistant.centroid_top_k,
    }  # fmt: skip


def _small_assistant(target: ModelArchitecture) -> AssistantArchitecture:
    return AssistantArchitecture.model_validate(
        target.model_dump()
        | {
            "num_hidden_layers": 4, "num_kv_shared_layers": 4, "full_attention_layers": (3,), "hidden_size": 64,
            "intermediate_size": 64, "backbone_hidden_size": target.hidden_size,
        }
    )  # fmt: skip


def write_checkpoint(directory: Path, *, variant: str, device: str, processes: int, seed: int = 0) -> int:
    """`write_files` for a published size, or for the demo's model."""
    return write_files(directory, read_config(variant), device=device, processes=processes, seed=seed)


def write_files(directory: Path, config: dict[str, Any], *, device: str, processes: int, seed: int = 0) -> int:
    """Write config, tokenizer and shards; return the weights' bytes. Processes share the GPU, and leave it empty."""
    architecture = ModelArchitecture.from_config(config)
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o755)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    write_text_files(directory, architecture)
    files = shards(sources(architecture))
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        writing = [
            pool.submit(write_shard, directory / name, tensors, architecture=architecture, device=device, seed=seed)
            for name, tensors in zip(names, files, strict=True)
        ]
        total = sum(shard.result() for shard in writing)
    weight_map = {TEXT_PREFIXES[0] + tensor: name for name, group in zip(names, files, strict=True) for tensor in group}
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return total


def write_model(folder: Path, config: dict[str, Any]) -> ModelArchitecture:
    """A folder that a worker serves with weights that it makes itself: config.json and the files of the text."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    architecture = ModelArchitecture.from_config(config)
    write_text_files(folder, architecture)
    return architecture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=4)
    options = parser.parse_args()
    began = time.monotonic()
    size = write_checkpoint(
        options.directory, variant=options.variant, device=options.device, processes=options.processes
    )
    seconds = time.monotonic() - began
    print(f"{size / 1e9:.4g} GB of random weights in {seconds:.0f} s, {size / 1e9 / seconds:.2g} GB/s")
