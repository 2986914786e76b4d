"""On one GPU, in bfloat16 and at real widths: our logits and transformers' logits, both against a float32 reference.

    python tests/bench logits_against_transformers --variant 31B --layers 12 --variant E4B --layers 42

Weights are random, of unit gain, with every norm, scalar and scale random; they are rounded to bfloat16 first, so that
all three models hold the same numbers. Our side runs through the paged cache: prefill in chunks, the last tokens one by
one. Exits 1 when our mean |delta logit| exceeds 1.25 times transformers'.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from full_logits import teacher_forced_logits
from safetensors.torch import save_file
from torch import Tensor
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from modelserve.engine_args import EngineArgs
from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve.published import published_model
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve_worker.batch import AdmittedRequest, ScheduledBatch, TableUpdates
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.kernels.operations import Operations
from modelserve_worker.layers.placement import Placement
from modelserve_worker.request import SamplingParams
from modelserve_worker.runner.model_runner import GPUModelRunner
from modelserve_worker.startup.device import device_facts, kernel_table
from modelserve_worker.weights.loader import load_model

LIMIT = 1.25
DECODED = 16  # tokens at the end that are fed one by one
CUDA = torch.device("cuda", 0)


def reduced_config(variant: str, layers: int) -> Gemma4TextConfig:
    """The published geometry with its first `layers` layers; as many layers share as are left of those that do."""
    facts = published_model(f"hf://google/gemma-4-{variant}")
    assert facts is not None, f"{variant} is not published"
    full = facts.architecture
    moe = {
        "enable_moe_block": True,
        "num_experts": full.num_experts,
        "top_k_experts": full.top_k_experts,
        "moe_intermediate_size": full.moe_intermediate_size,
    }
    return Gemma4TextConfig(
        vocab_size=full.vocab_size,
        hidden_size=full.hidden_size,
        intermediate_size=full.intermediate_size,
        num_hidden_layers=layers,
        layer_types=[full.kind(layer).value for layer in range(layers)],
        num_attention_heads=full.num_attention_heads,
        num_key_value_heads=full.num_key_value_heads,
        num_global_key_value_heads=full.num_global_key_value_heads if full.attention_k_eq_v else None,
        head_dim=full.head_dim,
        global_head_dim=full.global_head_dim,
        attention_k_eq_v=full.attention_k_eq_v,
        num_kv_shared_layers=max(0, layers - full.first_shared_layer),
        use_double_wide_mlp=full.use_double_wide_mlp,
        hidden_size_per_layer_input=full.hidden_size_per_layer_input,
        vocab_size_per_layer_input=full.vocab_size_per_layer_input or full.vocab_size,
        sliding_window=full.sliding_window,
        final_logit_softcapping=full.final_logit_softcapping,
        **(moe if full.num_experts else {}),
    )


def randomise(model: torch.nn.Module, *, seed: int) -> None:
    """Unit-gain matrices, everything else 1 +- 0.2, attention scores of variance about 1; rounded to bfloat16."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            noise = torch.empty(tensor.shape, device=device).normal_(generator=generator)
            if tensor.dim() > 1:
                noise.mul_(tensor.shape[-1] ** -0.5)
            else:
                is_qk = name.endswith(("q_norm.weight", "k_norm.weight"))
                noise.mul_(0.2).add_(1.0).mul_(tensor.shape[0] ** -0.25 if is_qk else 1.0)
            tensor.copy_(noise.bfloat16())


def round_weights(model: torch.nn.Module) -> None:
    """What loading in bfloat16 gives: saved tensors in bfloat16, position tables still float32."""
    saved = set(model.state_dict())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in saved:
            tensor.data = tensor.data.bfloat16()


def reference(model: torch.nn.Module, ids: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([ids], device=CUDA), use_cache=False).logits[0]
    return logits.float()


def first_updates(count: int, *, seed: int) -> TableUpdates:
    """Pages 0..count - 1 of one kind in random order, for table entries 0..count - 1 of slot 0."""
    order = np.random.default_rng(seed).permutation(count).astype(np.int32)
    return TableUpdates(np.zeros(count, np.int32), np.arange(count, dtype=np.int32), order)


def ours(directory: Path, config: dict[str, Any], ids: list[int], *, chunk: int) -> tuple[Tensor, str]:
    architecture = ModelArchitecture.from_config(config)
    layout = KVCacheLayout.V_ONLY if architecture.attention_k_eq_v else KVCacheLayout.KV
    geometry = cache_geometry(architecture, dtype=KVCacheDtype.BFLOAT16, layout=layout, tensor_parallel_size=1)
    pool_bytes = -(-geometry.held_bytes(len(ids)) // 128) * 128
    table = kernel_table(device_facts(CUDA), architecture, geometry, EngineArgs(model=str(directory)))
    model = load_model(architecture, directory, Placement(CUDA, torch.bfloat16, operations=Operations(table, CUDA)))
    cache = KVCache(geometry, pool_bytes, device=CUDA, debug_stamps=False)
    runner = GPUModelRunner(model, cache, max_num_batched_tokens=chunk, max_num_seqs=1, max_model_len=len(ids))
    ends = [*range(chunk, len(ids) - DECODED, chunk), *range(len(ids) - DECODED, len(ids) + 1)]
    pages = {LayerKind.GLOBAL: geometry.global_pages(len(ids)), LayerKind.SLIDING: geometry.sliding_pages(len(ids))}
    parts, start = [], 0
    for step, end in enumerate(ends):
        updates = {kind: first_updates(count if step == 0 else 0, seed=len(ids)) for kind, count in pages.items()}
        batch = ScheduledBatch(
            step=step,
            slots=np.zeros(1, np.int32),
            starts=np.array([start], np.int32),
            lengths=np.array([end - start], np.int32),
            sampled=np.zeros(1, np.int32),
            output_counts=np.zeros(1, np.int32),
            token_ids=np.array(ids[start:end], np.int32),
            admitted=(AdmittedRequest(0, "r", SamplingParams(seed=0, max_tokens=1), tuple(ids), ()),)
            if step == 0
            else (),
            page_moves=(),
            global_updates=updates[LayerKind.GLOBAL],
            sliding_updates=updates[LayerKind.SLIDING],
        )
        parts.append(teacher_forced_logits(runner, batch))
        start = end
    return torch.cat(parts), f"{geometry.layout.value}, {len(ends)} steps"


def compare(variant: str, *, layers: int, length: int, chunk: int, seed: int) -> bool:
    config = reduced_config(variant, layers)
    config._attn_implementation = "eager"
    ids = torch.randint(3, config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        with torch.device(CUDA):
            model = Gemma4ForCausalLM(config).eval()
        randomise(model, seed=seed)
        exact = reference(model, ids)
        round_weights(model)
        theirs = reference(model, ids)
        weights = {n: t.contiguous() for n, t in model.state_dict().items() if n != "lm_head.weight"}
        save_file(weights, directory / "model.safetensors")
        del model, weights
        gc.collect()
        torch.cuda.empty_cache()
        mine, how = ours(directory, config.to_dict() | {"dtype": "bfloat16"}, ids, chunk=chunk)
    finally:
        shutil.rmtree(directory)
    their_error, our_error = (float((x - exact).abs().mean()) for x in (theirs, mine))
    ratio = our_error / their_error
    agree = float((mine.argmax(-1) == exact.argmax(-1)).float().mean())
    their_agree = float((theirs.argmax(-1) == exact.argmax(-1)).float().mean())
    print(
        f"{variant:8} layers {layers:3} tokens {length:5} | mean |delta| ours {our_error:.4e} "
        f"transformers {their_error:.4e} ratio {ratio:.3f} | "
        f"top-1 equal to float32: ours {agree:.3f} transformers {their_agree:.3f} | "
        f"rms logit {float(exact.square().mean().sqrt()):.2f} | {how}",
        flush=True,
    )
    return ratio <= LIMIT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", action="append", required=True)
    parser.add_argument("--layers", action="append", type=int, required=True)
    parser.add_argument("--length", type=int, default=1500)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    passed = [
        compare(variant, layers=layers, length=args.length, chunk=args.chunk, seed=args.seed)
        for variant, layers in zip(args.variant, args.layers, strict=True)
    ]
    return 0 if all(passed) else 1
