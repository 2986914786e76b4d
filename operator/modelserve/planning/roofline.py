"""How fast a candidate would be: the larger of the time its bytes and its arithmetic take. For ranking, not promises.

    decode step of B requests at length L, per rank:
        bytes = W + B * (g * L + s * min(L, window))
        FLOP  = B * (2 * P + 4 * heads * (D_g * n_g * L + D_s * n_s * min(L, window)))
        time  = max(bytes / bandwidth, FLOP / flops) + 2 * layers * all-reduce latency when there is more than one rank
    prefill of L tokens: 2 * P * L FLOP, attention left out

W weight bytes read (embedding tables of inputs not, of experts the share that B tokens touch), P parameters a token
uses, g and s cache bytes per token over all global and sliding layers; layers without a cache of their own read their
producer's. Bandwidth and flops are what kernels reach (see hardware).
"""

from __future__ import annotations

from dataclasses import dataclass

from modelserve.architecture import LayerKind, ModelArchitecture
from modelserve.hardware import ACHIEVABLE_BANDWIDTH, ACHIEVABLE_FLOPS
from modelserve.planning.evaluation import Fit
from modelserve.planning.wishes import Wishes
from modelserve.sizing.pages import PageSpec
from modelserve.sizing.weights import element_bytes, parameters_per_rank

ALL_REDUCE_SECONDS = 20e-6  # of one small message between GPUs of a node, without NVLink multicast


@dataclass(frozen=True)
class Speed:
    """Expected decode of one candidate under the expected workload."""

    concurrency: int  # requests decoded together
    meets_concurrency: bool  # the pool holds the expected number of requests at the expected length
    step_seconds: float  # time per output token of each of them
    output_tokens_per_s: float  # of one replica, prefill of the prompts included


def speed(fit: Fit, architecture: ModelArchitecture, wishes: Wishes) -> Speed:
    """Decode and prefill the expected requests on one replica."""
    length = min(wishes.input_tokens + wishes.output_tokens, fit.max_model_len)
    held = fit.geometry.requests(fit.memory.kv_pool_bytes, length)
    wanted = wishes.concurrency or (1 if wishes.objective == "Latency" else wishes.sequences(fit.accelerator))
    batch = max(1, min(held, wanted, wishes.sequences(fit.accelerator)))
    step = _decode_seconds(fit, architecture, batch=batch, length=length)
    flops = fit.accelerator.flops * ACHIEVABLE_FLOPS * fit.tensor_parallel
    prefill = 2 * _token_parameters(architecture) * min(wishes.input_tokens, length) / flops
    seconds = wishes.output_tokens * step + batch * prefill
    meets = held >= (wishes.concurrency or 1) and length == wishes.input_tokens + wishes.output_tokens
    return Speed(batch, meets, step, batch * wishes.output_tokens / seconds)


def _decode_seconds(fit: Fit, architecture: ModelArchitecture, *, batch: int, length: int) -> float:
    tp, e = fit.tensor_parallel, element_bytes(architecture)
    window = min(length, architecture.sliding_window)
    read = _weights_read(architecture, batch=batch, tensor_parallel=tp) * e
    read += batch * length * _token_bytes(architecture, fit.geometry.global_page)
    read += batch * window * _token_bytes(architecture, fit.geometry.sliding_page)
    attended = architecture.global_head_dim * _readers(architecture, LayerKind.GLOBAL) * length
    attended += architecture.head_dim * _readers(architecture, LayerKind.SLIDING) * window
    flop = batch * (2 * _token_parameters(architecture) + 4 * architecture.num_attention_heads * attended) / tp
    device = fit.accelerator
    seconds = max(read / (device.bandwidth * ACHIEVABLE_BANDWIDTH), flop / (device.flops * ACHIEVABLE_FLOPS))
    return seconds + (2 * architecture.num_hidden_layers * ALL_REDUCE_SECONDS if tp > 1 else 0.0)


def _token_bytes(architecture: ModelArchitecture, page: PageSpec) -> float:
    """Cache bytes of one token that all layers of a kind read, KV-shared layers counted like owners."""
    return page.layer_bytes * _readers(architecture, page.kind) / page.page_tokens


def _readers(architecture: ModelArchitecture, kind: LayerKind) -> int:
    """Layers of a kind, with or without a cache of their own."""
    full = len(architecture.full_attention_layers)
    return full if kind is LayerKind.GLOBAL else architecture.num_hidden_layers - full


def _table_parameters(architecture: ModelArchitecture) -> int:
    """Elements of the per-layer embedding table, of which a token reads one row."""
    columns = architecture.num_hidden_layers * architecture.hidden_size_per_layer_input
    return columns * architecture.vocab_size_per_layer_input


def _expert_parameters(architecture: ModelArchitecture) -> int:
    per_expert = 3 * architecture.hidden_size * architecture.moe_intermediate_size
    return architecture.num_hidden_layers * architecture.num_experts * per_expert


def _token_parameters(architecture: ModelArchitecture) -> float:
    """Parameters that one token is multiplied with."""
    total = parameters_per_rank(architecture, tensor_parallel_size=1) - _table_parameters(architecture)
    if not architecture.num_experts:
        return total
    idle = 1 - architecture.top_k_experts / architecture.num_experts
    return total - idle * _expert_parameters(architecture)


def _weights_read(architecture: ModelArchitecture, *, batch: int, tensor_parallel: int) -> float:
    """Elements of one rank's weights that a step of `batch` tokens reads, experts drawn evenly."""
    total = parameters_per_rank(architecture, tensor_parallel_size=tensor_parallel)
    total -= _table_parameters(architecture) // tensor_parallel
    if not architecture.num_experts:
        return total
    untouched = (1 - architecture.top_k_experts / architecture.num_experts) ** batch
    return total - untouched * _expert_parameters(architecture) / tensor_parallel
