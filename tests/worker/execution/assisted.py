"""Engines of small checkpoints that draft with an assistant, and drafters that stand between the two."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from untrained import random_tensor

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.assistant import AssistantArchitecture
from modelserve.sizing.pages import CacheGeometry
from modelserve_tools.tiny.weights import save_weights, tensor_shapes
from modelserve_worker.batch import AdmittedRequest, Asked
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.drafters.assistant_drafter import AssistantDrafter
from modelserve_worker.drafters.drafter import Accepted, Drafter, Proposal, TargetCaches
from modelserve_worker.engine.engine import Engine
from modelserve_worker.kernels.step import Step
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.runner.model_runner import GPUModelRunner
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.costs.step_costs import StepCosts
from modelserve_worker.scheduling.scheduler import Scheduler
from modelserve_worker.weights.loader import load_assistant

MODELS = Path(__file__).parents[2] / "models"
TARGET, ASSISTANT = MODELS / "gemma4-tiny-keqv", MODELS / "gemma4-tiny-keqv-assistant"


class Around(Drafter):
    """What it is told goes to `inner`, too; what is proposed is its own."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.num_tokens = inner, inner.num_tokens
        self.asked, self.speaks_unasked = inner.asked, inner.speaks_unasked
        self.named: dict[int, str] = {}  # by slot

    def attach(self, caches: TargetCaches) -> None:
        self.inner.attach(caches)

    def store(self, step: Step) -> None:
        self.inner.store(step)

    def capture(self, pool: Any) -> None:
        self.inner.capture(pool)

    def admit(self, admitted: Sequence[AdmittedRequest]) -> None:
        self.named |= {request.slot: request.request_id for request in admitted}


class Between(Around):
    """Hands on what `inner` proposes, seen by `look` first: (request ids, positions, proposals [S, k]) -> proposals."""

    def __init__(self, inner: AssistantDrafter, look: Callable[[list[str], list[int], Tensor], Tensor]) -> None:
        super().__init__(inner)
        self.look = look

    def propose(self, accepted: Accepted, asked: Asked) -> Proposal:
        tokens, counts = self.inner.propose(accepted, asked)
        named = [self.named[slot] for slot in accepted.slots.tolist()]
        return Proposal(self.look(named, accepted.positions.tolist(), tokens.clone()), counts)


def assistant_for(model: Gemma4ForCausalLM, directory: Path, *, num_tokens: int, slots: int) -> AssistantDrafter:
    return AssistantDrafter(load_assistant(directory, model), num_tokens=num_tokens, max_num_seqs=slots)


def damage_checkpoint(directory: Path, into: Path, *, noise: float) -> Path:
    """A copy whose matrices have noise, relative to their own size."""
    shutil.copytree(directory, into)
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() > 1:
            added = noise * torch.randn(tensor.shape, generator=generator) * tensor.float().std()
            tensors[name] = (tensor + added).to(tensor.dtype)
    save_weights(tensors, into)
    return into


def write_assistant(directory: Path, target: Path, *, seed: int, centroids: int = 0, hidden: int = 32) -> None:
    """A random assistant of the target in another directory; `centroids`: groups of the vocabulary, of which the
    nearest quarter are scored."""
    read = json.loads((target / "config.json").read_text())
    text, of = read.get("text_config", read), ModelArchitecture.from_config(read)
    names = ("sliding_attention", "sliding_attention", "sliding_attention", "full_attention")
    own = {
        "num_hidden_layers": 4, "num_kv_shared_layers": 4, "layer_types": list(names), "hidden_size": hidden,
        "intermediate_size": 48, "hidden_size_per_layer_input": 0, "enable_moe_block": False,
        "use_double_wide_mlp": False, "final_logit_softcapping": None, "per_layer_config": None,
        "global_head_dim": of.global_head_dim, "num_global_key_value_heads": of.num_global_key_value_heads,
    }  # fmt: skip
    config = {
        "model_type": "gemma4_assistant", "backbone_hidden_size": text["hidden_size"], "text_config": text | own,
        "use_ordered_embeddings": centroids > 0, "num_centroids": centroids or 2048,
        "centroid_intermediate_top_k": centroids // 4, "dtype": "float32",
    }  # fmt: skip
    architecture, generator = AssistantArchitecture.from_config(config), torch.Generator().manual_seed(seed)
    shapes = [*tensor_shapes(architecture)]
    shapes += [("pre_projection.weight", (hidden, 2 * text["hidden_size"]))]
    shapes += [("post_projection.weight", (text["hidden_size"], hidden))]
    if centroids:
        shapes += [("masked_embedding.centroids.weight", (centroids, hidden))]
    tensors = {name: random_tensor(name, shape, generator) for name, shape in shapes}
    if centroids:
        tensors["masked_embedding.token_ordering"] = torch.randperm(architecture.vocab_size, generator=generator)
    outside = ("pre_projection.", "post_projection.", "masked_embedding.")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_weights({name if name.startswith(outside) else f"model.{name}": t for name, t in tensors.items()}, directory)


def engine_with(
    model: Gemma4ForCausalLM, geometry: CacheGeometry, drafter: Drafter | None, *, chunk: int, slots: int, longest: int,
    pool_of: int, grammars: Any = None, stamps: bool = False, costs: StepCosts | None = None, caching: bool = False,
) -> Engine:  # fmt: skip
    """With pages for `pool_of` of the longest requests, full of NaN at first."""
    pool = pool_of * geometry.held_bytes(longest) // 128 * 128
    cache = KVCache(geometry, pool, device=torch.device("cpu"), debug_stamps=stamps)
    cache.arena.fill_(0xFF)
    runner = GPUModelRunner(
        model, cache, max_num_batched_tokens=chunk, max_num_seqs=slots, max_model_len=longest, drafter=drafter
    )
    limits = SchedulerLimits(chunk, slots, longest, model.architecture.eos_token_ids)
    return Engine(
        Scheduler(
            limits,
            geometry,
            pool,
            draft_tokens=runner.draft_tokens,
            asked_drafts=runner.asked_drafts,
            step_costs=costs,
            prefix_caching=caching,
        ),
        runner,
        grammars,
    )
