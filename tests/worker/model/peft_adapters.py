"""Adapters as PEFT saves them, of models of random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Gemma4ForCausalLM

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]  # parameters, of all experts of a layer
EXPERT_WIDTH = {"moe_intermediate_size": 48}  # so that both sizes of the experts' matrices differ
PER_LAYER = ["per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"]


def adapted(base: Path, into: Path, *, seed: int = 3, **settings: Any) -> PeftModel:
    """A model with every factor random, of rank 4 unless another is given; its adapter is saved."""
    torch.manual_seed(seed)
    model = Gemma4ForCausalLM.from_pretrained(base)
    plain = {"r": 4, "lora_alpha": 6, "init_lora_weights": False}
    peft = get_peft_model(model, LoraConfig(**plain | settings))
    peft.save_pretrained(into)
    return peft
