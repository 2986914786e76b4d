"""The static workspace of one rank: what a step of T tokens needs beside weights and pages, phase by phase.

Follows the worker's own tensors in bytes: on GPUs the kernels (`kernel_attention`, `layers`, the kernels of the
sampler), on the CPU, and for a model whose heads fill no matrix tiles, plain PyTorch (`paged_attention`). T tokens of a
step, S sequences, H hidden size, e bytes of an element, V vocabulary, P per-layer width of all layers together.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve.sizing.adapters import scratch_bytes
from modelserve.sizing.backends.resolve import takes_model
from modelserve.sizing.backends.workspace import product_bytes
from modelserve.sizing.kernel_buffers import FLOAT32, INT32, kernel_buffers
from modelserve.sizing.media.audio_embedder import audio_rows_bytes, kept_sounds_bytes
from modelserve.sizing.media.embedder import image_rows_bytes, kept_rows_bytes
from modelserve.sizing.pages import GLOBAL_PAGE_TOKENS, KVCacheDtype
from modelserve.sizing.rank_settings import RankSettings
from modelserve.sizing.weights.assistant import drafter_buffer_bytes
from modelserve.sizing.weights.dequantisation import dequantised_bytes
from modelserve.sizing.weights.dflash import block_buffer_bytes
from modelserve.sizing.weights.text import element_bytes
from modelserve.units import MIB

KEYS_PER_PASS = 16_384  # keys of global layers that plain attention reads (and, for v_only, expands) at a time
SCORES_PER_PASS = 1 << 25  # attention scores of one matrix product
PROMPT_SCORE_ROWS = 32  # rows of logits that are scored at a time for log probabilities of a prompt
ROWS_PER_SORT = 16  # rows of logits that plain PyTorch sorts at a time
FILTERED_ROWS = 64  # rows of logits that kernels filter at a time; they hold less than ROWS_PER_SORT that are sorted
TOP_K_CAPACITY = 128  # largest top-k of the sampling kernels, a power of two
VOCABULARY_CHUNK = 4096  # logits that one program of the sampling kernels reduces to TOP_K_CAPACITY, a power of two
CUBLAS_WORKSPACE_BYTES = 64 * MIB  # cuBLAS and cuBLASLt, 32 MiB each on Hopper, taken from PyTorch's allocator
SEGMENT_SLACK_BYTES = 80 * MIB  # the allocator cuts blocks of 1 to 10 MiB out of segments of 20; four are part empty

PHASES = ("embedding", "attention", "mlp", "sampling")


def activation_bytes(architecture: ModelArchitecture, settings: RankSettings) -> int:
    """Bytes that the allocator holds at the peak of a step: what lives throughout, and the largest phase."""
    always, phases = activation_terms(architecture, settings)
    return sum(always.values()) + sum(phases[name] for name in largest_phase(phases))


def largest_phase(phases: Mapping[str, int]) -> tuple[str, ...]:
    """Names of the phases that set the peak: `embedding`, `sampling`, or `attention` and `mlp` together.

    Only one phase lives at a time. But attention and MLP alternate layer by layer in blocks of different sizes, and
    PyTorch's caching allocator keeps the blocks of both: what one has cut up does not serve the other.
    """
    groups = (("attention", "mlp"), ("embedding",), ("sampling",) if "sampling" in phases else ())
    return max(groups, key=lambda names: sum(phases[name] for name in names))


@lru_cache(maxsize=256)  # a plan asks for each size many times
def activation_terms(
    architecture: ModelArchitecture, settings: RankSettings
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """(terms that live throughout a step, terms of its phases), in bytes of one rank.

    The format of the cache decides what chunks expand, on GPUs; the CPU's terms hold for all formats of it.
    """
    scratch = _product_scratch(architecture, settings)
    tokens, e, tp = settings.max_num_batched_tokens, element_bytes(architecture), settings.tensor_parallel_size
    sequences, on_cpu, speculation = settings.max_num_seqs, settings.on_cpu, settings.speculation
    per_layer = tokens * architecture.num_hidden_layers * architecture.hidden_size_per_layer_input
    rope = tokens * (architecture.head_dim + architecture.global_head_dim)  # cos and sin of half a head, both kinds
    penalties = sequences * architecture.vocab_size * 4  # int32 counts
    rows = settings.decode_rows  # that get a token
    masks = rows * -(-architecture.vocab_size // 32) * 4  # a bit per token, of every row that may be bound
    sampling = sampling_bytes(architecture, rows=rows, tensor_parallel_size=tp)
    beside: dict[str, int] = {}
    if speculation.prompt_lookup:
        beside["prompt_lookup"] = sequences * architecture.max_position_embeddings * INT32
    if speculation.assistant is not None:
        beside["drafts"] = drafter_buffer_bytes(
            speculation.assistant, num_tokens=speculation.num_tokens, max_num_seqs=sequences
        )
    if (block := speculation.block) is not None:
        beside["drafts"] = beside.get("drafts", 0) + block_buffer_bytes(
            block, num_tokens=speculation.num_tokens, max_num_seqs=sequences, step_rows=settings.step_rows
        )
    if (images := settings.images) is not None:
        beside["image_rows"] = image_rows_bytes(images, architecture, max_num_batched_tokens=tokens)
        if kept := kept_rows_bytes(images, architecture, max_num_seqs=sequences):
            beside["image_cache"] = kept
    if (audio := settings.audio) is not None:
        made = audio_rows_bytes(audio, architecture, max_num_batched_tokens=tokens)
        beside["audio_rows"] = max(0, made - beside.get("image_rows", 0))  # one after the other
        if kept := kept_sounds_bytes(audio, architecture, max_num_seqs=sequences):
            beside["audio_cache"] = kept
    if not on_cpu and takes_model(architecture):
        always = {
            "residual": tokens * architecture.hidden_size * _residual_copies(architecture, tp) * e,
            # Of three blocks of this size in the embedding phase one stays, and one is cut up for the layers' tensors.
            "per_layer_inputs": 2 * per_layer * e,
            "rope": rope * FLOAT32,
            "penalties": penalties,
            "token_masks": masks,
            "cublas": CUBLAS_WORKSPACE_BYTES,
            "segments": SEGMENT_SLACK_BYTES,
            **scratch,
            **kernel_buffers(architecture, settings),
            **beside,
            "sampling": sampling,  # not captured: it finds no room in the graphs' pool
        }
        phases = {
            "embedding": per_layer * e,
            "attention": max(
                _kernel_attention_bytes(
                    architecture, kind, tokens=tokens, tensor_parallel_size=tp, kv_dtype=settings.kv_dtype
                )
                for kind in LayerKind
            ),
            "mlp": _mlp_bytes(architecture, tokens=tokens, tensor_parallel_size=tp, kernels=True),
        }
        return MappingProxyType(always), MappingProxyType(phases)
    pages = -(-architecture.max_position_embeddings // GLOBAL_PAGE_TOKENS)
    always = {
        "residual": tokens * architecture.hidden_size * 2 * e,
        "per_layer_inputs": per_layer * e,
        "rope": rope * e,
        "penalties": penalties,
        "token_masks": masks,
        "block_tables": sequences * pages * 8,  # int64 page numbers
        **({} if on_cpu else {"cublas": CUBLAS_WORKSPACE_BYTES}),
        **beside,
        **scratch,
    }
    phases = {
        # The projection as its norm sees it: two float32 copies; the other two e are its input and the counted result.
        "embedding": per_layer * 2 * FLOAT32,
        "attention": max(
            _attention_bytes(architecture, kind, tokens=tokens, tensor_parallel_size=tp) for kind in LayerKind
        ),
        "mlp": _mlp_bytes(architecture, tokens=tokens, tensor_parallel_size=tp, kernels=False),
        "sampling": sampling,
    }
    return MappingProxyType(always), MappingProxyType(phases)


def _product_scratch(architecture: ModelArchitecture, settings: RankSettings) -> dict[str, int]:
    """What products hold: `products` of kernels, `dequantised` of plain PyTorch, `adapter_sums`; nothing where that is
    nothing."""
    on_kernels = not settings.on_cpu and takes_model(architecture)
    counts = {
        "products": product_bytes(architecture, settings) if on_kernels else 0,
        "dequantised": dequantised_bytes(
            architecture,
            tensor_parallel_size=settings.tensor_parallel_size,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            weight_format=settings.weight_format,
            on_kernels=on_kernels,
        ),
    }
    if (adapters := settings.adapters) is not None:
        counts["adapter_sums"] = scratch_bytes(
            architecture, adapters, tensor_parallel_size=settings.tensor_parallel_size, rows=settings.step_rows,
            requests=settings.max_num_seqs,
        )  # fmt: skip
    return {name: count for name, count in counts.items() if count}


def _residual_copies(architecture: ModelArchitecture, tensor_parallel_size: int) -> int:
    """Blocks [T, H] that the allocator holds for the residual stream and what is added to it.

    Six live at the end of a layer: the stream, the norms of three sub-layers' inputs, two results. On one rank four of
    them lie in blocks that attention has left; a share of the heads, or what experts take, leaves none of that size.
    """
    return 2 if tensor_parallel_size == 1 and not architecture.num_experts else 6


def _kernel_attention_bytes(
    architecture: ModelArchitecture,
    kind: LayerKind,
    *,
    tokens: int,
    tensor_parallel_size: int,
    kv_dtype: KVCacheDtype,
) -> int:
    """Fused projection, rotated queries, output, and the step's rows of sliding layers that wait to be stored.

    A layer whose cache others read keeps its rows until the last of them, beside those of the layer at work.
    """
    shares = architecture.first_shared_layer < architecture.num_hidden_layers
    sliding = architecture.kv_heads_per_rank(LayerKind.SLIDING, tensor_parallel_size)
    row = architecture.head_dim * kv_dtype.element_bytes + kv_dtype.scale_bytes
    waiting = int(shares) + (kind is LayerKind.SLIDING)
    width = architecture.global_head_dim if kind is LayerKind.GLOBAL else architecture.head_dim
    heads = architecture.num_attention_heads // tensor_parallel_size
    kv_heads = architecture.kv_heads_per_rank(kind, tensor_parallel_size)
    stored = 1 if kind is LayerKind.GLOBAL and architecture.attention_k_eq_v else 2
    columns = (3 * heads + stored * kv_heads) * width
    return tokens * (columns * element_bytes(architecture) + waiting * 2 * sliding * row)


def _attention_bytes(
    architecture: ModelArchitecture, kind: LayerKind, *, tokens: int, tensor_parallel_size: int
) -> int:
    """Projections and their rotated copies, then the larger of normalising the queries and attending.

    Attending holds the output, the packed queries and float32 numerators; beside them one pass of keys and values,
    first while keys are expanded from values (four float32 temporaries), then with the scores and their copy in the
    compute type.
    """
    e = element_bytes(architecture)
    width = architecture.global_head_dim if kind is LayerKind.GLOBAL else architecture.head_dim
    heads = architecture.num_attention_heads // tensor_parallel_size
    kv_heads = architecture.kv_heads_per_rank(kind, tensor_parallel_size)
    query, fresh = tokens * heads * width, tokens * kv_heads * width
    projections = 2 * e * (query + 2 * fresh)
    normalising = query * 2 * FLOAT32
    longest = architecture.max_position_embeddings
    if kind is LayerKind.GLOBAL:
        keys = min(KEYS_PER_PASS, longest)
        expanding = keys * kv_heads * width * (4 * FLOAT32 + e) if architecture.attention_k_eq_v else 0
        scores = min(SCORES_PER_PASS, tokens * heads * keys)
    else:
        keys, expanding = min(architecture.sliding_window + tokens, longest), 0
        scores = min(SCORES_PER_PASS, tokens * heads * keys)
    reading = keys * kv_heads * width * (2 * e + FLOAT32)  # one float32 copy of either while it is decoded
    attending = query * (2 * e + FLOAT32) + max(expanding, reading + scores * (FLOAT32 + e))
    return projections + max(normalising, attending)


def _mlp_bytes(architecture: ModelArchitecture, *, tokens: int, tensor_parallel_size: int, kernels: bool) -> int:
    """Gate and up and their product, and in plain PyTorch the activated gate: three or four of the width.

    Experts, beside the dense MLP, hold the same per (token, expert), and their inputs, whose place their results take;
    weight, index and place of each (token, expert), and the norm that they read. Plain PyTorch has results beside
    inputs, two float32 copies while they are weighted, int64 indices, and their sum.
    """
    e, hidden = element_bytes(architecture), architecture.hidden_size
    copies = 3 if kernels else 4
    widest = max(architecture.layer_intermediate_size(layer) for layer in range(architecture.num_hidden_layers))
    dense = tokens * (widest // tensor_parallel_size) * copies * e
    routed = tokens * architecture.top_k_experts
    width = architecture.moe_intermediate_size // tensor_parallel_size
    held = hidden * e + FLOAT32 + 2 * INT32 if kernels else hidden * (2 * e + 2 * FLOAT32) + 2 * 8
    experts = routed * (width * copies * e + held)
    return dense + experts + (tokens * hidden * (e if kernels else FLOAT32 + e) if routed else 0)


def sampling_bytes(architecture: ModelArchitecture, *, rows: int, tensor_parallel_size: int) -> int:
    """Of rows that get a token: logits in e of this rank's tokens; candidates of the kernels; one pass of sorted rows.

    At its peak a row of such a pass holds its logits, adjusted and scaled values, sorted values and 8-byte indices, and
    of the sort's own 32 bytes (two copies of the values, three of 8-byte words).
    A block of prompt rows that are scored holds its logits, two float32 copies, and one byte for each comparison with
    the token's own; it is gone before the step samples.
    On several ranks the rows of either have their logits gathered: their share, and all shares before they are put
    together. Of the other rows candidates alone are: the share's, all ranks', and these put together.
    """
    e, vocabulary, ranks = element_bytes(architecture), architecture.vocab_size, tensor_parallel_size
    share = vocabulary // ranks
    gathered = 0 if ranks == 1 else (share + vocabulary) * e
    lists = -(-share // VOCABULARY_CHUNK) + (0 if ranks == 1 else 1 + 2 * ranks)
    sorting = e + 2 * FLOAT32 + (FLOAT32 + 8) + (2 * FLOAT32 + 3 * 8)
    drawing = rows * (share * e + lists * TOP_K_CAPACITY * 8)
    drawing += min(rows, ROWS_PER_SORT) * (vocabulary * sorting + gathered)
    scoring = PROMPT_SCORE_ROWS * (vocabulary * (e + 2 * FLOAT32 + 1) + gathered)
    return max(drawing, scoring)
