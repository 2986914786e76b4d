"""How fast a candidate would be: the larger of the time its bytes and its arithmetic take. For ranking, not promises.

    decode step of B requests at length L, per rank:
        bytes = W + B (g L + s min(L, window))
        FLOP  = B (2 P + 4 heads (D_g n_g L + D_s n_s min(L, window))) / TP
        time  = max(bytes / bandwidth, FLOP / rate) + all-reduces
    prefill of a prompt of L tokens, per rank:
        linear    = (2 (P - E) L + 2 E) / TP
        attention = 4 heads (D_g n_g L^2 / 2 + D_s n_s (L w - w^2 / 2)) / TP, with w = min(L, window)
        time      = linear / rate + attention / attention rate + all-reduces

This release's engine is behind that: each layer costs time between and inside its small kernels, and prefill reaches a
share of the roofline. Both constants are measured.

W weight bytes read (embedding tables of inputs not, of experts the share that B tokens touch), P parameters a token
uses, E those of the output head, D head width, n layers of a kind, g and s cache bytes per token over all global and
sliding layers; layers without a cache of their own read their producer's, and in prefill compute the last row alone, so
they are left out of P and n there. A quantised linear layer is read in its format and multiplied in bfloat16. Bandwidth
and rates are what kernels reach (see hardware).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from modelserve.architecture import LayerKind, ModelArchitecture
from modelserve.hardware import ACHIEVABLE_BANDWIDTH, ACHIEVABLE_FLOPS, attention_share
from modelserve.planning.evaluation import Fit
from modelserve.planning.wishes import Wishes
from modelserve.sizing.pages import PageSpec
from modelserve.sizing.weights import element_bytes, parameters_per_rank, weight_terms
from modelserve.weight_format import WeightFormat

# On an H200 (docs/benchmarks.md). One request at 8,192 tokens: 31B decodes in 17.1 ms, 14.6 by the roofline below, over
# 60 layers; E4B in 4.43, 2.2 by the roofline, over 42. 31B prefills 8,192 tokens in 0.81 s, 0.67 by the roofline, and
# 126,000 in 20.6 s, 19.3; E4B 8,192 in 0.073 s, 0.053.
SECONDS_PER_LAYER = 45e-6
PREFILL_SHARE = 0.83
MIXED_STEP_SECONDS = 0.04  # of matrix products in a step in which requests decode: what a token may wait for its next
LEAST_MIXED_TOKENS = 256
ALL_REDUCE_SECONDS = 20e-6  # of one small message between GPUs of a node, without NVLink multicast


@dataclass(frozen=True)
class Speed:
    """Expected rates of one candidate under the expected workload."""

    concurrency: int  # requests decoded together
    meets_concurrency: bool  # the pool holds the expected number of requests at the expected length
    step_seconds: float  # time per output token of each of them
    prefill_seconds: float  # time to the first token of one prompt, when nothing else runs
    output_tokens_per_s: float  # of one replica, prefill of the prompts included


def speed(fit: Fit, architecture: ModelArchitecture, wishes: Wishes) -> Speed:
    """Decode and prefill the expected requests on one replica."""
    length = min(wishes.input_tokens + wishes.output_tokens, fit.max_model_len)
    held = fit.geometry.requests(fit.memory.kv_pool_bytes, length)
    wanted = wishes.concurrency or (1 if wishes.objective == "Latency" else wishes.sequences(fit.accelerator))
    batch = max(1, min(held, wanted, wishes.sequences(fit.accelerator)))
    step = _decode_seconds(fit, architecture, wishes.weight_format, batch=batch, length=length)
    prefill = _prefill_seconds(fit, architecture, length=min(wishes.input_tokens, length))
    seconds = wishes.output_tokens * step + batch * prefill
    meets = held >= (wishes.concurrency or 1) and length == wishes.input_tokens + wishes.output_tokens
    return Speed(batch, meets, step, prefill, batch * wishes.output_tokens / seconds)


def mixed_step_tokens(fit: Fit, architecture: ModelArchitecture, wishes: Wishes) -> int:
    """Most tokens of a step in which requests decode: as asked, else the power of two that MIXED_STEP_SECONDS compute.

    Smaller steps read the weights more often for the same prompts, larger ones make running requests wait.
    """
    chunk = wishes.chunk(fit.accelerator)
    if wishes.max_num_mixed_tokens:
        return min(wishes.max_num_mixed_tokens, chunk)
    rate = fit.accelerator.flops * ACHIEVABLE_FLOPS * fit.tensor_parallel
    tokens = int(MIXED_STEP_SECONDS * rate / (2 * _layer_parameters(architecture)))
    return min(chunk, max(LEAST_MIXED_TOKENS, 1 << max(0, tokens.bit_length() - 1)))


def _decode_seconds(
    fit: Fit, architecture: ModelArchitecture, weight_format: WeightFormat | None, *, batch: int, length: int
) -> float:
    tp, device = fit.tensor_parallel, fit.accelerator
    window = min(length, architecture.sliding_window)
    read = _weight_bytes_read(architecture, weight_format, batch=batch, tensor_parallel=tp)
    read += batch * length * _token_bytes(architecture, fit.geometry.global_page)
    read += batch * window * _token_bytes(architecture, fit.geometry.sliding_page)
    attended = _attended_columns(architecture, global_keys=length, sliding_keys=window)
    flop = batch * (2 * _token_parameters(architecture) + 4 * architecture.num_attention_heads * attended) / tp
    seconds = max(read / (device.bandwidth * ACHIEVABLE_BANDWIDTH), flop / (device.flops * ACHIEVABLE_FLOPS))
    seconds += _all_reduce_seconds(architecture, tokens=batch, tensor_parallel=tp, link=device.link)
    return seconds + architecture.num_hidden_layers * SECONDS_PER_LAYER


def _prefill_seconds(fit: Fit, architecture: ModelArchitecture, *, length: int) -> float:
    tp, rate = fit.tensor_parallel, fit.accelerator.flops
    head = architecture.vocab_size * architecture.hidden_size
    owning = _owning_layers(architecture)
    linear = 2 * _layer_parameters(owning) * length + 2 * head
    window = min(length, architecture.sliding_window)
    scores = _attended_columns(
        owning, global_keys=length * length / 2, sliding_keys=length * window - window * window / 2
    )
    attention = 4 * architecture.num_attention_heads * scores
    of_rate = attention_share(fit.accelerator.compute_capability)
    seconds = (linear / (rate * ACHIEVABLE_FLOPS) + attention / (rate * of_rate)) / tp
    seconds = seconds / PREFILL_SHARE
    seconds += _all_reduce_seconds(architecture, tokens=length, tensor_parallel=tp, link=fit.accelerator.link)
    return seconds + architecture.num_hidden_layers * SECONDS_PER_LAYER


def _all_reduce_seconds(architecture: ModelArchitecture, *, tokens: int, tensor_parallel: int, link: float) -> float:
    """Two of [tokens, H] per layer: a fixed latency, and the bytes of a ring, 2 (TP - 1) / TP of the message."""
    if tensor_parallel == 1:
        return 0.0
    message = tokens * architecture.hidden_size * element_bytes(architecture)
    ring = 2 * (tensor_parallel - 1) / tensor_parallel * message / link
    return 2 * architecture.num_hidden_layers * (ALL_REDUCE_SECONDS + ring)


def _attended_columns(architecture: ModelArchitecture, *, global_keys: float, sliding_keys: float) -> float:
    """Head columns times keys, over all layers, of one query head."""
    attended = architecture.global_head_dim * _readers(architecture, LayerKind.GLOBAL) * global_keys
    return attended + architecture.head_dim * _readers(architecture, LayerKind.SLIDING) * sliding_keys


def _token_bytes(architecture: ModelArchitecture, page: PageSpec) -> float:
    """Cache bytes of one token that all layers of a kind read, KV-shared layers counted like owners."""
    return page.layer_bytes * _readers(architecture, page.kind) / page.page_tokens


def _readers(architecture: ModelArchitecture, kind: LayerKind) -> int:
    """Layers of a kind, with or without a cache of their own."""
    full = len(architecture.full_attention_layers)
    return full if kind is LayerKind.GLOBAL else architecture.num_hidden_layers - full


def _idle_share(architecture: ModelArchitecture, *, batch: int) -> float:
    """Expected share of experts that no token of `batch` chose, experts drawn evenly."""
    if not architecture.num_experts:
        return 0.0
    return float((1 - architecture.top_k_experts / architecture.num_experts) ** batch)


@lru_cache(maxsize=64)
def _token_parameters(architecture: ModelArchitecture) -> float:
    """Parameters that one token is multiplied with."""
    table = architecture.num_hidden_layers * architecture.hidden_size_per_layer_input
    experts = architecture.num_hidden_layers * architecture.num_experts
    per_expert = 3 * architecture.hidden_size * architecture.moe_intermediate_size
    total = parameters_per_rank(architecture, tensor_parallel_size=1)
    total -= table * architecture.vocab_size_per_layer_input
    return total - _idle_share(architecture, batch=1) * experts * per_expert


def _layer_parameters(architecture: ModelArchitecture) -> float:
    """Parameters that one token is multiplied with, but those of the output head."""
    return _token_parameters(architecture) - architecture.vocab_size * architecture.hidden_size


def _owning_layers(architecture: ModelArchitecture) -> ModelArchitecture:
    """The model without its KV-shared layers, for what is counted by layers."""
    layers = architecture.first_shared_layer
    full = tuple(layer for layer in architecture.full_attention_layers if layer < layers)
    fewer = {"num_hidden_layers": layers, "num_kv_shared_layers": 0, "full_attention_layers": full}
    return architecture.model_copy(update=fewer) if layers < architecture.num_hidden_layers else architecture


def _weight_bytes_read(
    architecture: ModelArchitecture, weight_format: WeightFormat | None, *, batch: int, tensor_parallel: int
) -> float:
    """Bytes of one rank's weights that a step of `batch` tokens reads; of the per-layer table a row per token."""
    terms = weight_terms(architecture, tensor_parallel_size=tensor_parallel, weight_format=weight_format)
    terms.pop("per_layer_embedding", None)
    return sum(terms.values()) - _idle_share(architecture, batch=batch) * terms.get("experts", 0)
