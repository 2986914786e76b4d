"""How long one step of the engine takes on one rank, as a sum of named terms.

    weights      (W - W_q) / (bandwidth x weight_read) + W_q / (bandwidth x int4_read or fp8_read); experts at
                 expert_read
    linears      A + exposed W' - W' where the arithmetic A takes longer than reading W', else exposed A;
                 experts (with expert_exposed) and all other products each by themselves
    cache        decodes x (g L / read_g + s min(L, window) / read_s) / bandwidth, read_g and read_s of the kernels that
                 the table chooses (cache_time): streamed_read, v_only_read, turned_8_bit_read or cache_read
    attention    4 heads (D_g n_g K_g / rate_g + D_s n_s K_s / rate_s) / TP of the prompts' rows
    elementwise  rows x bytes a row / (bandwidth x elementwise)
    launches     kernels x (launch_seconds + filled_launch_seconds x rows / 32, at most 1), layers of experts x
                 expert_layer_seconds, layers x mixed_layer_seconds where a step has decodes and prompts, and where no
                 prompt is computed dense products that the table gives to a library x library_seconds, and to
                 Hopper's kernel of tens of rows x wide_seconds from 65 rows on
    all_reduces  2 layers x (peer_sum_seconds + 2 (TP - 1) / TP x rows H e / (link x share))

W bytes of the weights that the step reads (embedding tables of inputs not, of experts the share that its rows touch),
W_q those in INT4 or FP8, W' the seconds of that; A = (2 P rows + 2 E samples) / TP / (rate x linear, int4_linear,
fp8_linear or expert_linear), P
parameters that a row is multiplied with, E those of the output head; g and s cache bytes per token over all global and
sliding layers; D head width, n layers of a kind, K keys that the rows of prompts attend to, summed over rows. From the
last layer with a cache of its own on the last row of a prompt is computed alone, so of what prompts cost that layer's
projections are the last. Without NVLink a sum takes all_reduce_seconds. `share` of the link is
peer_link where ranks sum by rows, and then each norms its share of a prompt's rows; it is nvlink where NCCL sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

from modelserve.hardware import CPU, PCIE_LINK, Accelerator
from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve.model.weight_format import StoredType, TextLinear, WeightFormat
from modelserve.planning.learned import AS_EXPECTED, StepFactors
from modelserve.planning.speed.cache_time import decode_kernels, token_seconds
from modelserve.planning.speed.engine_rates import engine_rates
from modelserve.planning.speed.product_time import many_decodes_seconds
from modelserve.sizing.backends.products import FEW_ROWS
from modelserve.sizing.cuda_graphs import kernels_per_step
from modelserve.sizing.pages import CacheGeometry, KVCacheLayout
from modelserve.sizing.rank_sums import sums_by_rows
from modelserve.sizing.weights.text import (
    element_bytes,
    layer_tensors,
    parameters_per_rank,
    weight_tensors,
    weight_terms,
)

# Widths of a row that are moved where it chooses experts: for the router, into and out of their order, and to the sum.
# 404 us a layer of 26B-A4B at 8,192 rows on an H200, less the norm that the sum takes the place of.
EXPERT_MOVES = 28
_FOUR_BITS = (StoredType.INT4, StoredType.NVFP4)


class StepTime(NamedTuple):
    """Seconds by term."""

    weights: float
    linears: float
    cache: float
    attention: float
    elementwise: float
    launches: float
    all_reduces: float
    prompts: float = 0.0  # of a mean token: what it waits for rows of prompts that share its steps
    drafts: float = 0.0  # proposing tokens

    @property
    def seconds(self) -> float:
        return sum(self)

    def times(self, factor: float) -> StepTime:
        return StepTime(*(factor * each for each in self))


class PromptRows(NamedTuple):
    """The part of a step that computes prompts: rows, the keys they attend to, and how many prompts end in it."""

    rows: float
    global_keys: float
    sliding_keys: float
    ends: float

    @classmethod
    def chunk(cls, start: int, rows: int, *, window: int, ends: bool) -> PromptRows:
        """Positions [start, start + rows) of one prompt."""
        end = start + rows
        seen = _window_keys(end, window) - _window_keys(start, window)
        return cls(rows, (end * end - start * start) / 2, seen, float(ends))

    @classmethod
    def at(cls, rows: float, *, keys: float, window: int) -> PromptRows:
        """So many rows, each of which attends to `keys` keys of global layers on average."""
        return cls(rows, rows * keys, rows * min(keys, window), 0.0)

    def of_mean(self, rows: float) -> PromptRows:
        """So many rows, taken evenly from all places of these."""
        share = rows / self.rows
        return PromptRows(rows, self.global_keys * share, self.sliding_keys * share, self.ends * share)


NO_ROWS = PromptRows(0, 0, 0, 0)


def _window_keys(length: float, window: int) -> float:
    """Keys that the rows of a prompt of `length` tokens see in a sliding window, in all."""
    seen = min(length, window)
    return length * seen - seen * seen / 2


class _RowSeconds(NamedTuple):
    """Of one row."""

    products: float  # without those of experts
    experts: float
    elementwise: float


class RankSpeed:
    """Step times of one model on one rank of one accelerator, as planned."""

    def __init__(
        self,
        architecture: ModelArchitecture,
        device: Accelerator,
        geometry: CacheGeometry,
        *,
        tensor_parallel: int,
        weight_format: WeightFormat | None,
        factors: StepFactors = AS_EXPECTED,
        exact: bool = False,
    ) -> None:
        """`factors`: what was measured over what the formulas say, by kind of step. `exact`: under that profile."""
        self._factors = factors
        self.window = architecture.sliding_window
        self.doubling_context = doubling_context(
            architecture, geometry.layout, compute_capability=device.compute_capability
        )
        rates = engine_rates(device.compute_capability, exact=exact)
        linked = device.link != PCIE_LINK
        by_rows = linked and not exact and sums_by_rows(architecture)
        work = _work(architecture, tensor_parallel, weight_format, by_rows=by_rows, narrowed=not exact)
        self._idle_base, self._exposed, self._expert_exposed = work.idle_base, rates.exposed, rates.expert_exposed
        self._drafted = work.layers * rates.drafted_layer_seconds, work.layers * rates.drafted_row_seconds
        packed = _quantised_shares(architecture, tensor_parallel, weight_format)
        read_rates = {stored: rates.int4_read if stored in _FOUR_BITS else rates.fp8_read for stored in packed}
        seconds = sum(share / read_rates[stored] for stored, share in packed.items())
        weight_read = device.bandwidth / ((1 - sum(packed.values())) / rates.weight_read + seconds)
        stored = weight_format.stored if weight_format is not None else None
        rounds = weight_format is not None and stored is StoredType.FP8 and weight_format.fp8_activations
        of_eight = rates.int8_linear if stored is StoredType.INT8 else rates.linear
        unpacked = rates.int4_linear if stored in _FOUR_BITS else of_eight
        linear = device.flops * (rates.fp8_linear if rounds else unpacked)
        expert_linear = linear * rates.expert_linear / rates.linear
        self._every_step = work.read_bytes / weight_read
        self._all_experts = work.expert_bytes / (weight_read * rates.expert_read / rates.weight_read)
        moved = device.bandwidth * rates.elementwise
        self._decode = _RowSeconds(
            work.decode_flop / linear, work.decode_expert_flop / expert_linear, work.decode_moved / moved
        )
        self._prompt = _RowSeconds(
            work.prompt_flop / linear, work.prompt_expert_flop / expert_linear, work.prompt_moved / moved
        )
        self._head = work.head_flop / linear
        global_rate = rates.attention_v_only if geometry.layout is KVCacheLayout.V_ONLY else rates.attention_kv
        self._global_key = work.global_flop / (device.flops * global_rate)
        self._sliding_key = work.sliding_flop / (device.flops * rates.attention_sliding)
        kernels = partial(
            decode_kernels, architecture, geometry.dtype, geometry.layout, device.compute_capability,
            ranks=tensor_parallel, profile="exact" if exact else "fast",
        )  # fmt: skip
        self._token, self._drafted_token = (
            token_seconds(device, rates, geometry, kernels(several_rows=several), readers=work.readers)
            for several in (False, True)
        )
        self._kernels, self._launch = work.kernels, (rates.launch_seconds, rates.filled_launch_seconds)
        self._expert_layers = work.expert_layers * rates.expert_layer_seconds
        self._mixed_layers = work.layers * rates.mixed_layer_seconds
        self._many_decodes = many_decodes_seconds(
            architecture, rates, device.compute_capability, ranks=tensor_parallel, weight_format=weight_format
        )
        link = device.link * (rates.peer_link if by_rows else rates.nvlink) if linked else device.link
        self._sums = work.all_reduces * (rates.peer_sum_seconds if linked else rates.all_reduce_seconds)
        self._summed_row = work.reduced_bytes / link

    def drafted_attention_seconds(self, rows: float) -> float:
        """What attention of requests with several rows, so many in all, takes longer than of one row each."""
        layers, row = self._drafted
        return (layers + rows * row) * self._factors.decode

    def weights_seconds(self, rows: float) -> float:
        """The term of that name of a step of decodes."""
        return (self._every_step + self._experts_seconds(rows)) * self._factors.decode

    def cache_seconds(self, decodes: float, *, context: float, drafted: bool = False) -> float:
        """The same of what is read of the cache; `drafted`: by requests of several rows."""
        return self._cache_seconds(decodes, context, drafted=drafted) * self._factors.decode

    def _experts_seconds(self, rows: float) -> float:
        """Reading those that so many rows choose, who are drawn evenly."""
        idle: float = self._idle_base**rows
        return self._all_experts * (1 - idle)

    @staticmethod
    def _beside_reading(multiply: float, read: float, exposed: float) -> float:
        """What multiplying adds to the seconds of reading the same weights."""
        return exposed * multiply if multiply < read else exposed * read + multiply - read

    def _cache_seconds(self, decodes: float, context: float, *, drafted: bool = False) -> float:
        global_token, sliding_token = self._drafted_token if drafted else self._token
        return decodes * (context * global_token + min(context, self.window) * sliding_token)

    def step(self, *, decodes: float = 0, context: float = 0, prompts: PromptRows = NO_ROWS) -> StepTime:
        """A step of `decodes` requests at a mean length of `context` tokens beside rows of prompts."""
        prompt_rows, global_keys, sliding_keys, ends = prompts
        rows, decode, prompt = decodes + prompt_rows, self._decode, self._prompt
        experts = self._experts_seconds(rows)
        multiply = decodes * decode.products + prompt_rows * prompt.products + (decodes + ends) * self._head
        linears = self._beside_reading(multiply, self._every_step, self._exposed)
        if experts:
            multiply = decodes * decode.experts + prompt_rows * prompt.experts
            linears += self._beside_reading(multiply, experts, self._expert_exposed)
        launch, filled_launch = self._launch
        launches = self._kernels * (launch + filled_launch * min(rows / FEW_ROWS, 1)) + self._expert_layers
        if decodes and prompt_rows:
            launches += self._mixed_layers
        elif decodes:
            launches += next((seconds for rows, seconds in self._many_decodes if decodes > rows), 0.0)
        time = StepTime(
            self._every_step + experts,
            linears,
            self._cache_seconds(decodes, context),
            global_keys * self._global_key + sliding_keys * self._sliding_key,
            decodes * decode.elementwise + prompt_rows * prompt.elementwise,
            launches,
            self._sums + rows * self._summed_row,
        )
        if self._factors is AS_EXPECTED:
            return time
        if not prompt_rows:
            return time.times(self._factors.decode)
        return time.times(self._factors.mixed if decodes else self._factors.prefill)


@dataclass(frozen=True)
class _Work:
    """What one rank reads, multiplies and launches; FLOP and bytes are per row or per key."""

    layers: int
    expert_layers: int
    kernels: int
    read_bytes: float  # weights that every step reads
    expert_bytes: float
    idle_base: float  # share of experts that one row leaves alone
    decode_flop: float  # without experts
    prompt_flop: float  # also without what is computed of the last row alone
    decode_expert_flop: float
    prompt_expert_flop: float
    head_flop: float
    decode_moved: float  # bytes between kernels that only change elements
    prompt_moved: float
    global_flop: float  # of one query row and one key, over the layers that prompts run
    sliding_flop: float
    all_reduces: int
    reduced_bytes: float  # of one row, over all its all-reduces and the ring
    readers: dict[LayerKind, int]


@lru_cache(maxsize=256)
def _work(
    architecture: ModelArchitecture, tensor_parallel: int, weight_format: WeightFormat | None, *, by_rows: bool,
    narrowed: bool = True,
) -> _Work:  # fmt: skip
    """`narrowed`: from the last layer with a cache of its own on, the last row of a prompt is computed alone."""
    tp, layers = tensor_parallel, architecture.num_hidden_layers
    terms = weight_terms(architecture, tensor_parallel_size=tp, weight_format=weight_format)
    terms.pop("per_layer_embedding", None)  # a row per token
    experts = terms.pop("experts", 0)
    whole = _layers_of_all_rows(architecture) if narrowed else architecture
    head = architecture.vocab_size * architecture.hidden_size
    size = element_bytes(architecture)
    idle = 1 - architecture.top_k_experts / architecture.num_experts if architecture.num_experts else 0.0
    last = _last_projections(architecture) if narrowed else 0
    chosen, chosen_whole = (_expert_parameters(each, each.top_k_experts) for each in (architecture, whole))
    return _Work(
        layers=layers,
        expert_layers=layers if architecture.num_experts else 0,
        kernels=kernels_per_step(architecture, weight_format, rows=1, tensor_parallel_size=tp, summed=False),
        read_bytes=sum(terms.values()),
        expert_bytes=experts,
        idle_base=idle,
        decode_flop=2 * (layer_parameters(architecture) - chosen) / tp,
        prompt_flop=2 * (layer_parameters(whole) - chosen_whole + last) / tp,
        decode_expert_flop=2 * chosen / tp,
        prompt_expert_flop=2 * chosen_whole / tp,
        head_flop=2 * head / tp,
        decode_moved=_moved_bytes(architecture, tp),
        prompt_moved=_moved_bytes(whole, tp, norming_ranks=tp if by_rows else 1),
        global_flop=_key_flop(whole, LayerKind.GLOBAL) / tp,
        sliding_flop=_key_flop(whole, LayerKind.SLIDING) / tp,
        all_reduces=2 * layers if tp > 1 else 0,
        reduced_bytes=2 * layers * architecture.hidden_size * size * 2 * (tp - 1) / tp,
        readers={kind: _count(architecture, kind) for kind in LayerKind},
    )


@lru_cache(maxsize=256)  # every candidate asks, and there are few models and numbers of ranks
def _quantised_shares(
    architecture: ModelArchitecture, tensor_parallel: int, weight_format: WeightFormat | None
) -> dict[StoredType, float]:
    """Of the bytes of a rank's weights, without the tables of embeddings that a token takes a row of, by type."""
    if weight_format is None or not weight_format.quantised:
        return {}
    terms = weight_terms(architecture, tensor_parallel_size=tensor_parallel, weight_format=weight_format)
    terms.pop("per_layer_embedding", None)
    packed, element = dict[StoredType, int](), element_bytes(architecture)
    for each in weight_tensors(architecture, tensor_parallel_size=tensor_parallel):
        if (stored := weight_format.matrix(each.linear)).quantised:
            size = sum(each.allocations(weight_format, dense_element=element))
            packed[stored.stored] = packed.get(stored.stored, 0) + size
    return {stored: size / sum(terms.values()) for stored, size in packed.items()}


def _layers_of_all_rows(architecture: ModelArchitecture) -> ModelArchitecture:
    """The model up to the last layer with a cache of its own, without it, for what is counted by layers."""
    layers = architecture.last_owning_layer
    full = tuple(layer for layer in architecture.full_attention_layers if layer < layers)
    fewer = {"num_hidden_layers": layers, "num_kv_shared_layers": 0, "full_attention_layers": full}
    return architecture.model_copy(update=fewer)


def _last_projections(architecture: ModelArchitecture) -> int:
    """Parameters of the projections of the last layer with a cache of its own, which all rows pass."""
    tensors = layer_tensors(architecture, architecture.last_owning_layer, 1)
    return next(each.parameters for each in tensors if each.linear is TextLinear.QKV)


def _count(architecture: ModelArchitecture, kind: LayerKind) -> int:
    """Layers of a kind, with or without a cache of their own."""
    full = len(architecture.full_attention_layers)
    return full if kind is LayerKind.GLOBAL else architecture.num_hidden_layers - full


def doubling_context(
    architecture: ModelArchitecture, layout: KVCacheLayout, *, compute_capability: tuple[int, int]
) -> float:
    """Tokens of context at which a row of a prompt takes twice what the first row takes: products and attention to
    global layers alone, both at the rates of the GPU's generation. Infinite on the CPU, whose rates are not known."""
    work, rates = _work(architecture, 1, None, by_rows=False), engine_rates(compute_capability)
    attention = rates.attention_v_only if layout is KVCacheLayout.V_ONLY else rates.attention_kv
    if not work.global_flop or compute_capability == CPU.compute_capability:
        return math.inf
    products = work.prompt_flop / rates.linear + work.prompt_expert_flop / rates.expert_linear
    return products / (work.global_flop / attention)


@lru_cache(maxsize=64)
def layer_parameters(architecture: ModelArchitecture) -> float:
    """Parameters that one token is multiplied with, but those of the output head."""
    table = architecture.num_hidden_layers * architecture.hidden_size_per_layer_input
    total: float = parameters_per_rank(architecture, tensor_parallel_size=1)
    total -= table * architecture.vocab_size_per_layer_input
    total -= _expert_parameters(architecture, architecture.num_experts - architecture.top_k_experts)
    return total - architecture.vocab_size * architecture.hidden_size


def _expert_parameters(architecture: ModelArchitecture, experts: int) -> int:
    """Of so many experts of every layer."""
    return architecture.num_hidden_layers * experts * 3 * architecture.hidden_size * architecture.moe_intermediate_size


def _key_flop(architecture: ModelArchitecture, kind: LayerKind) -> int:
    """Of one query row against one key, over all layers of a kind: two products of two operations a column."""
    width = architecture.global_head_dim if kind is LayerKind.GLOBAL else architecture.head_dim
    return 4 * architecture.num_attention_heads * width * _count(architecture, kind)


def _moved_bytes(architecture: ModelArchitecture, tensor_parallel: int, *, norming_ranks: int = 1) -> float:
    """Bytes of one row that elementwise kernels read and write: 8 H of two norms with their sums, 3 I of GeGLU, what
    `prepare` reads and writes of queries, keys and values, 4 widths of a per-layer embedding, and EXPERT_MOVES H where
    rows choose experts. `norming_ranks` share the norms."""
    moved = 0.0
    for layer in range(architecture.num_hidden_layers):
        kind, width = architecture.kind(layer), architecture.layer_head_dim(layer)
        heads = architecture.num_attention_heads / tensor_parallel
        heads += 2 * architecture.kv_heads_per_rank(kind, tensor_parallel)
        moved += 8 * architecture.hidden_size / norming_ranks + 2 * heads * width
        moved += 3 * architecture.layer_intermediate_size(layer) / tensor_parallel
        moved += 4 * architecture.hidden_size_per_layer_input
        moved += EXPERT_MOVES * architecture.hidden_size * bool(architecture.num_experts)
    return moved * element_bytes(architecture)
