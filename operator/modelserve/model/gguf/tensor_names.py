"""Names of tensors: as llama.cpp writes those of Gemma 4, and as the text model here knows them.

Read in llama.cpp: `gguf-py/gguf/constants.py` and `tensor_mapping.py` (MODEL_ARCH.GEMMA4), `Gemma4Model` in
`conversion/gemma.py`, which renames the router's scales, and `src/models/gemma4.cpp`, which loads them. Matrices are
as transformers has them (RoPE there is NEOX: q and k are not permuted), and norms as they are stored: its
`norm_shift` is 0 for Gemma 4, where Gemma 3's added 1.
"""

from __future__ import annotations

import re

ROPE_FACTORS = "rope_freqs.weight"  # read for the geometry, not as a weight
TOKEN_EMBEDDING, LAYER_EMBEDDING, HEAD = "token_embd.weight", "per_layer_token_embd.weight", "output.weight"

_MODEL = {
    TOKEN_EMBEDDING: "embed_tokens.weight",
    LAYER_EMBEDDING: "embed_tokens_per_layer.weight",
    HEAD: "lm_head.weight",
    "per_layer_model_proj.weight": "per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "per_layer_projection_norm.weight",
    "output_norm.weight": "norm.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate.weight": "per_layer_input_gate.weight",
    "proj.weight": "per_layer_projection.weight",
    "post_norm.weight": "post_per_layer_input_norm.weight",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


def text_name(name: str) -> str | None:
    """Name relative to the text model; None for what is no weight; a name that is not known stays as it is."""
    if name == ROPE_FACTORS:
        return None
    block = _BLOCK.fullmatch(name)
    if block and block[2] in _LAYER:
        return f"layers.{block[1]}.{_LAYER[block[2]]}"
    return _MODEL.get(name, name)


def gguf_name(name: str) -> str:
    """The opposite of `text_name`, which the files have for a tensor of the text model."""
    if match := re.fullmatch(r"layers\.(\d+)\.(.+)", name):
        return f"blk.{match[1]}.{_GGUF_LAYER[match[2]]}"
    return _GGUF_MODEL[name]


_GGUF_LAYER = {ours: theirs for theirs, ours in _LAYER.items()}
_GGUF_MODEL = {ours: theirs for theirs, ours in _MODEL.items()}
