"""The geometry of a Gemma 4 text model, read from a GGUF file's metadata and the shapes of its tensors.

Keys are those that llama.cpp's converter writes (`Gemma4Model.set_gguf_parameters` in `conversion/gemma.py`) and its
loader reads (`src/models/gemma4.cpp`). What they state otherwise than Gemma 4 has it is refused by name.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from modelserve.errors import InvalidInput, UnsupportedModel, first_fault
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.gguf.block_types import F32
from modelserve.model.gguf.files import GgufCheckpoint, reading
from modelserve.model.gguf.header import ArraySpan, Value, read_strings
from modelserve.model.gguf.tensor_names import HEAD, LAYER_EMBEDDING, ROPE_FACTORS, TOKEN_EMBEDDING

ARCHITECTURE = "gemma4"
TURN_ENDS = (b"<turn|>", b"<|tool_response>")  # end an answer of models with a chat template, as llama.cpp has it
_UNTURNED = 1e20  # factors from here on stand for pairs that are not rotated: llama.cpp writes 1e30


@lru_cache(maxsize=4)  # a start asks several times, and the ends of turns are looked for in the whole vocabulary
def gguf_architecture(checkpoint: GgufCheckpoint) -> ModelArchitecture:
    """The geometry. Raises UnsupportedModel for another architecture and for a setting that is not served, InvalidInput
    for keys and tensors that are missing or contradict each other."""
    keys = _Keys(checkpoint)
    stated = checkpoint.metadata.get("general.architecture")
    if stated != ARCHITECTURE:
        what = "an image or audio tower (mmproj)" if stated == "clip" else f"of architecture {str(stated)[:64]!r}"
        raise UnsupportedModel(f"{checkpoint.first} is {what}; this release serves GGUF files of {ARCHITECTURE}")
    try:
        return ModelArchitecture.model_validate(_fields(checkpoint, keys))
    except ValidationError as error:
        field, message = first_fault(error)
        raise InvalidInput(f"{checkpoint.first}: {field or 'geometry'}: {message}", field=field or None) from error


def _fields(checkpoint: GgufCheckpoint, keys: _Keys) -> dict[str, Any]:
    layers = keys.count("block_count")
    if not 1 <= layers <= 1024:
        raise InvalidInput(f"{checkpoint.first}: {ARCHITECTURE}.block_count is {layers}; 1 to 1024 are served")
    sliding = [bool(each) for each in keys.by_layer("attention.sliding_window_pattern", layers)]
    shared = keys.count("attention.shared_kv_layers", 0)
    widths, double = _widths(keys, layers, shared)
    heads = keys.same("attention.head_count", keys.by_layer("attention.head_count", layers))
    kv_heads = keys.by_layer("attention.head_count_kv", layers)
    of_kind = {kind: [kv for kv, each in zip(kv_heads, sliding, strict=True) if each is kind] for kind in (True, False)}
    global_dim = keys.count("attention.key_length")
    head_dim = keys.count("attention.key_length_swa", global_dim)
    for name, served in (
        ("attention.value_length", global_dim),
        ("attention.value_length_swa", head_dim),
        ("rope.dimension_count", global_dim),
        ("rope.dimension_count_swa", head_dim),
        ("rope.scaling.type", "none"),
        ("rope.scaling.factor", 1.0),
        ("attention.causal", True),
        ("attn_logit_softcapping", 0.0),
    ):
        keys.check(name, served)
    embedding = checkpoint.tensors.get(TOKEN_EMBEDDING)
    if embedding is None:
        raise InvalidInput(f"{checkpoint.first} holds no tensor {TOKEN_EMBEDDING!r}")
    vocabulary, hidden = keys.matrix(TOKEN_EMBEDDING)
    keys.check("embedding_length", hidden)
    keys.check("vocab_size", vocabulary)
    width = keys.count("embedding_length_per_layer_input", 0)
    experts = keys.count("expert_count", 0)
    softcap = keys.number("final_logit_softcapping", 0.0)
    global_layers = [layer for layer, each in enumerate(sliding) if not each]
    tokenizer = "tokenizer.ggml."
    return {
        "num_hidden_layers": layers,
        "full_attention_layers": tuple(global_layers),
        "hidden_size": hidden,
        "intermediate_size": widths,
        "use_double_wide_mlp": double,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.same("attention.head_count_kv of sliding layers", of_kind[True] or kv_heads),
        "num_global_key_value_heads": keys.same("attention.head_count_kv of global layers", of_kind[False] or kv_heads),
        "head_dim": head_dim,
        "global_head_dim": global_dim,
        "attention_k_eq_v": _keys_are_values(checkpoint, [layer for layer in global_layers if layer < layers - shared]),
        "num_kv_shared_layers": shared,
        "sliding_window": keys.count("attention.sliding_window"),
        "max_position_embeddings": keys.count("context_length"),
        "vocab_size": vocabulary,
        "hidden_size_per_layer_input": width,
        "vocab_size_per_layer_input": keys.matrix(LAYER_EMBEDDING)[0] if width else 0,
        "num_experts": experts,
        "top_k_experts": keys.count("expert_used_count") if experts else 0,
        "moe_intermediate_size": keys.count("expert_feed_forward_length") if experts else 0,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "final_logit_softcapping": softcap or None,
        "sliding_rope_theta": keys.number("rope.freq_base_swa"),
        "global_rope_theta": keys.number("rope.freq_base"),
        "global_partial_rotary_factor": _rotated(checkpoint, global_dim) if global_layers else 1.0,
        "tie_word_embeddings": HEAD not in checkpoint.tensors,
        "eos_token_ids": _eos(checkpoint),
        "bos_token_id": checkpoint.metadata.get(f"{tokenizer}bos_token_id", 2),
        "pad_token_id": checkpoint.metadata.get(f"{tokenizer}padding_token_id", 0),
    }


class _Keys:
    """Metadata of the architecture, by key without its prefix."""

    def __init__(self, checkpoint: GgufCheckpoint) -> None:
        self.checkpoint = checkpoint

    def value(self, name: str) -> Value | None:
        return self.checkpoint.metadata.get(f"{ARCHITECTURE}.{name}")

    def fault(self, name: str, found: object, wanted: str) -> InvalidInput:
        shown = str(found)[:64]
        return InvalidInput(f"{self.checkpoint.first}: {ARCHITECTURE}.{name} is {shown}; {wanted}", field=name)

    def number(self, name: str, default: float | None = None) -> float:
        """A number, of a float of 32 bits the shortest decimal that is it."""
        value = self.value(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._missing(name, value)
        return _decimal(float(value))

    def count(self, name: str, default: int | None = None) -> int:
        value = self.value(name)
        value = default if value is None else value
        if type(value) is not int or value < 0:
            raise self._missing(name, value)
        return value

    def _missing(self, name: str, value: object) -> InvalidInput:
        if value is None:
            return InvalidInput(f"{self.checkpoint.first} lacks {ARCHITECTURE}.{name}: convert it again", field=name)
        return self.fault(name, value, "a number, 0 or more, is expected")

    def by_layer(self, name: str, layers: int) -> list[int]:
        """One whole number for each layer; a single one holds for all."""
        value = self.value(name)
        values: Sequence[object] = value if isinstance(value, tuple) else (value,) * layers
        if value is None or isinstance(value, ArraySpan | str | float):
            raise self._missing(name, value)
        if len(values) != layers or any(not isinstance(each, int) for each in values):
            raise self.fault(
                name, f"{len(values)} elements", f"{layers} whole numbers, one for each layer, are expected"
            )
        return [int(each) for each in values if isinstance(each, int)]

    def same(self, name: str, values: Sequence[int]) -> int:
        """What all layers have. Raises UnsupportedModel where they differ."""
        if len(set(values)) != 1:
            raise UnsupportedModel(
                f"{self.checkpoint.first}: {ARCHITECTURE}.{name} differs between layers ({sorted(set(values))[:4]}); "
                "one for all is served"
            )
        return values[0]

    def check(self, name: str, served: object) -> None:
        """Raises UnsupportedModel where the file states another value than the one that is served."""
        value = self.value(name)
        if value is not None and value != served:
            raise UnsupportedModel(
                f"{self.checkpoint.first}: {ARCHITECTURE}.{name} is {str(value)[:64]}; {served} is served", field=name
            )

    def matrix(self, name: str) -> tuple[int, int]:
        """Rows and columns of a tensor."""
        found = self.checkpoint.tensors.get(name)
        if found is None or len(found[1].shape) != 2:
            raise InvalidInput(f"{self.checkpoint.first} holds no matrix {name!r}")
        rows, columns = found[1].shape
        return rows, columns


def _decimal(value: float) -> float:
    """The shortest decimal that rounds to the same float of 32 bits: 1e-6, not 9.999999974752427e-07."""
    stored = struct.pack("<f", value)
    found = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((each for each in found if struct.pack("<f", each) == stored), value)


def _widths(keys: _Keys, layers: int, shared: int) -> tuple[int, bool]:
    """(width of the MLP, whether layers that read another's cache have twice that)"""
    widths = keys.by_layer("feed_forward_length", layers)
    owning, others = widths[: layers - shared], set(widths[layers - shared :])
    name = "feed_forward_length"
    width = keys.same(name, owning or widths)
    if others - {width, 2 * width} or len(others) > 1:
        raise UnsupportedModel(
            f"{keys.checkpoint.first}: {ARCHITECTURE}.{name} of layers that share a cache is {sorted(others)[:4]}; "
            f"{width} or {2 * width} is served"
        )
    return width, others == {2 * width}


def _keys_are_values(checkpoint: GgufCheckpoint, layers: Sequence[int]) -> bool:
    """Whether global layers have no values of their own: keys before their norm are values, too."""
    missing = [layer for layer in layers if f"blk.{layer}.attn_v.weight" not in checkpoint.tensors]
    if missing and len(missing) < len(layers):
        there = next(layer for layer in layers if layer not in missing)
        raise InvalidInput(
            f"{checkpoint.first} holds 'blk.{there}.attn_v.weight' and no 'blk.{missing[0]}.attn_v.weight'; all global "
            "layers must be alike"
        )
    return bool(missing)


def _rotated(checkpoint: GgufCheckpoint, head_dim: int) -> float:
    """Part of a global head that is rotated, from the factors of its frequencies: ones, then what turns nothing."""
    found = checkpoint.tensors.get(ROPE_FACTORS)
    if found is None:
        raise InvalidInput(f"{checkpoint.first} holds no tensor {ROPE_FACTORS!r}: convert it again")
    path, tensor = found
    if tensor.type is not F32 or tensor.shape != (head_dim // 2,):
        raise InvalidInput(
            f"{path}: tensor {ROPE_FACTORS!r} is {tensor.type.name} of shape {list(tensor.shape)}; F32 of shape "
            f"[{head_dim // 2}] is expected"
        )
    factors = struct.unpack(f"<{head_dim // 2}f", reading(path)(tensor.start, tensor.end - tensor.start))
    pairs = next((i for i, factor in enumerate(factors) if factor != 1.0), len(factors))
    if any(not factor >= _UNTURNED for factor in factors[pairs:]):
        raise UnsupportedModel(
            f"{path}: tensor {ROPE_FACTORS!r} has {factors[pairs]!r} at {pairs}; ones and then 1e30 are served (RoPE "
            "is not scaled)"
        )
    return pairs / (head_dim // 2)


def _eos(checkpoint: GgufCheckpoint) -> tuple[int, ...]:
    """What ends an answer: the ids that the file names, and with a chat template the ends of turns."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = {checkpoint.metadata.get(f"tokenizer.ggml.{name}") for name in names} - {None}
    tokens = checkpoint.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, ArraySpan) and "tokenizer.chat_template" in checkpoint.metadata:
        texts = enumerate(read_strings(reading(checkpoint.first), tokens))
        named |= {token_id for token_id, text in texts if text in TURN_ENDS}
    wrong = next((each for each in named if type(each) is not int), None)
    if wrong is not None:
        raise InvalidInput(f"{checkpoint.first}: {str(wrong)[:64]} is no token id that ends an answer")
    return tuple(sorted(each for each in named if isinstance(each, int))) or (1,)
