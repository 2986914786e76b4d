"""Keys, names and shapes that llama.cpp's converter writes for a Gemma 4 model of any geometry, and files of them."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gguf_writer import NUMBERS, header, info

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.gguf.block_types import BLOCK_TYPES

ALIGNMENT = 32
ENDS = {1: "<eos>", 2: "<bos>", 50: "<|tool_response>", 106: "<turn|>"}
TEXT = {
    "tokenizer.ggml.model": "gemma4",
    "tokenizer.ggml.tokens": [ENDS.get(token_id, f"<unused{token_id}>") for token_id in range(110)],
    "tokenizer.ggml.eos_token_id": 106,
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.chat_template": "{{ messages }}",
}


def architecture_metadata(a: ModelArchitecture) -> dict[str, Any]:
    """As `TextModel`, `Gemma3Model` and `Gemma4Model` of llama.cpp's conversion write it."""
    layers = range(a.num_hidden_layers)
    sliding = [layer not in a.full_attention_layers for layer in layers]
    widths = [a.layer_intermediate_size(layer) for layer in layers]
    moe = {"expert_count": a.num_experts, "expert_used_count": a.top_k_experts} if a.num_experts else {}
    return {
        "general.architecture": "gemma4",
        "general.type": "model",
        "general.quantization_version": 2,
        **{
            f"gemma4.{name}": given
            for name, given in {
                "block_count": a.num_hidden_layers,
                "context_length": a.max_position_embeddings,
                "embedding_length": a.hidden_size,
                "feed_forward_length": widths if a.use_double_wide_mlp else a.intermediate_size,
                **moe,
                **({"expert_feed_forward_length": a.moe_intermediate_size} if a.num_experts else {}),
                "attention.head_count": a.num_attention_heads,
                "attention.head_count_kv": [a.layer_kv_heads(layer) for layer in layers],
                "attention.layer_norm_rms_epsilon": a.rms_norm_eps,
                "attention.key_length": a.global_head_dim,
                "attention.value_length": a.global_head_dim,
                "attention.key_length_swa": a.head_dim,
                "attention.value_length_swa": a.head_dim,
                "attention.sliding_window": a.sliding_window,
                "attention.sliding_window_pattern": sliding,
                "attention.shared_kv_layers": a.num_kv_shared_layers,
                "embedding_length_per_layer_input": a.hidden_size_per_layer_input,
                "rope.freq_base": a.global_rope_theta,
                "rope.freq_base_swa": a.sliding_rope_theta,
                "rope.dimension_count": a.global_head_dim,
                "rope.dimension_count_swa": a.head_dim,
                **({"final_logit_softcapping": a.final_logit_softcapping} if a.final_logit_softcapping else {}),
            }.items()
        },
    }


def tensor_shapes(a: ModelArchitecture) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of a text model, as torch has its shape."""
    hidden, width = a.hidden_size, a.hidden_size_per_layer_input
    yield "token_embd.weight", (a.vocab_size, hidden)
    yield "output_norm.weight", (hidden,)
    if width:
        yield "per_layer_token_embd.weight", (a.vocab_size_per_layer_input, a.num_hidden_layers * width)
        yield "per_layer_model_proj.weight", (a.num_hidden_layers * width, hidden)
        yield "per_layer_proj_norm.weight", (width,)
    for layer in range(a.num_hidden_layers):
        for name, shape in _layer_shapes(a, layer):
            yield f"blk.{layer}.{name}", shape


def _layer_shapes(a: ModelArchitecture, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, head = a.hidden_size, a.layer_head_dim(layer)
    queries, inner = a.num_attention_heads * head, a.layer_intermediate_size(layer)
    for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
        yield f"{name}.weight", (hidden,)
    yield "layer_output_scale.weight", (1,)
    yield "attn_q.weight", (queries, hidden)
    yield "attn_q_norm.weight", (head,)
    yield "attn_output.weight", (hidden, queries)
    if a.owns_cache(layer):
        yield "attn_k.weight", (a.layer_kv_heads(layer) * head, hidden)
        yield "attn_k_norm.weight", (head,)
        if not a.k_from_v(layer):
            yield "attn_v.weight", (a.layer_kv_heads(layer) * head, hidden)
    yield "ffn_gate.weight", (inner, hidden)
    yield "ffn_up.weight", (inner, hidden)
    yield "ffn_down.weight", (hidden, inner)
    if a.num_experts:
        yield "ffn_gate_inp.weight", (a.num_experts, hidden)
        yield "ffn_gate_inp.scale", (hidden,)
        yield "ffn_gate_up_exps.weight", (a.num_experts, 2 * a.moe_intermediate_size, hidden)
        yield "ffn_down_exps.weight", (a.num_experts, hidden, a.moe_intermediate_size)
        yield "ffn_down_exps.scale", (a.num_experts,)
        for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
            yield f"{name}.weight", (hidden,)
    if width := a.hidden_size_per_layer_input:
        yield "inp_gate.weight", (width, hidden)
        yield "proj.weight", (hidden, width)
        yield "post_norm.weight", (hidden,)


def types_of(a: ModelArchitecture, kind: str, **named: str) -> dict[str, str]:
    """Tensor -> type: norms, scales and the router in F32, all else in `kind`, but what `named` says by the part of a
    name behind the layer's number (`attn_v`, `token_embd`)."""
    types = {}
    for name, shape in tensor_shapes(a):
        plain = len(shape) < 2 or "ffn_gate_inp" in name
        types[name] = named.get(name.removesuffix(".weight").rpartition(".")[2], "F32" if plain else kind)
    return types


def write_sparse(
    path: Path, a: ModelArchitecture, types: Mapping[str, str], *, left_out: str = "", **metadata: Any
) -> None:
    """The whole file as it is on a disk that has none of its weights: header, RoPE factors, and the true size."""
    kinds, infos, offset = {kind.name: kind for kind in BLOCK_TYPES.values()}, [], 0
    half, pairs = a.global_head_dim // 2, a.global_rotary_pairs
    shapes = [("rope_freqs.weight", (half,)), *tensor_shapes(a)]
    for name, shape in shapes:
        if name == left_out:
            continue
        kind = kinds[types.get(name, "F32")]
        infos.append(info(name, NUMBERS[kind.name], shape, offset))
        offset += -(-math.prod(shape) // kind.elements * kind.bytes // ALIGNMENT) * ALIGNMENT
    given = {**architecture_metadata(a), **TEXT, **{key.replace("__", "."): each for key, each in metadata.items()}}
    head = header({key: each for key, each in given.items() if each is not None}, infos)
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % ALIGNMENT))
        file.write(factors(pairs, half))
        file.truncate(len(head) + -len(head) % ALIGNMENT + offset)


def factors(pairs: int, half: int) -> bytes:
    return struct.pack(f"<{half}f", *([1.0] * pairs + [1e30] * (half - pairs)))
