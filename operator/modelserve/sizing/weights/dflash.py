"""Bytes of a drafter of the DFlash family on one rank, tensor by tensor, as the worker holds them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from modelserve.model.drafters.dflash import DFlashArchitecture
from modelserve.model.weight_format import TextLinear
from modelserve.sizing.draft_pages import DraftCache
from modelserve.sizing.weights.text import WeightTensor

TOKEN_BYTES = 4  # of a token that an own head scores
LAYER_NODES = 22  # kernels of a layer of a block: products, norms, rotations, attention in two, sums and activations
BLOCK_NODES = 16  # of a block: embedding, mask, rotations, norms, head, the largest, and copies
WALK_NODES = 8  # of a token that follows from the one before it
STORE_NODES, STORED_LAYER_NODES = 8, 5  # of a step: taps are projected, and each layer's rows go to pages


def draft_cache(drafter: DFlashArchitecture) -> DraftCache:
    """Rows that a drafter's layers read of the tokens before a block, in its compute type."""
    windowed = sum(window is not None for window in drafter.layer_windows)
    return DraftCache(
        full_layers=drafter.num_hidden_layers - windowed,
        window_layers=windowed,
        window=drafter.window or 0,
        kv_heads=drafter.num_key_value_heads,
        head_dim=drafter.head_dim,
        element_bytes=dflash_element_bytes(drafter),
    )


def dflash_tensors(drafter: DFlashArchitecture, *, tensor_parallel_size: int) -> Iterator[WeightTensor]:
    """Every tensor of one rank but the tokens of an own head. Heads, MLPs, an own embedding and an own head are split
    over ranks, and so is what a Markov head adds to its scores; the projection of taps, norms, convolutions and what is
    looked up by a token are whole on each. Keys and values of all layers are one matrix, as one product makes them."""
    tp, hidden, layers = tensor_parallel_size, drafter.hidden_size, drafter.num_hidden_layers
    query, inner = drafter.num_attention_heads // tp * drafter.head_dim, drafter.intermediate_size // tp
    yield WeightTensor("linear", hidden, len(drafter.taps) * hidden, linear=TextLinear.OUTPUT)
    yield WeightTensor("linear", layers * key_value_rows(drafter, tp), hidden, linear=TextLinear.QKV)
    convolved = 4 * drafter.conv_kernel_size * hidden
    norms = (4 * hidden + 1 if drafter.stack == "gemma4" else 2 * hidden) + 2 * drafter.head_dim
    for _ in range(layers):
        yield WeightTensor("linear", query, hidden, linear=TextLinear.QKV)
        yield WeightTensor("linear", hidden, query, linear=TextLinear.OUTPUT)
        yield WeightTensor("linear", 2 * inner, hidden, linear=TextLinear.GATE_UP, parts=(inner, inner))
        yield WeightTensor("linear", hidden, inner, linear=TextLinear.DOWN)
        if drafter.conv_kernel_size:
            yield WeightTensor("linear", convolution_rows(drafter), hidden, 2, linear=TextLinear.QKV)
        yield WeightTensor("other", norms + convolved, 1)
    yield WeightTensor("other", 2 * hidden, 1)
    if drafter.own_embedding:
        yield WeightTensor("table", drafter.vocab_size // tp, hidden)
    if drafter.draft_vocab_size is not None:
        yield WeightTensor("embedding", drafter.draft_vocab_size // tp, hidden)
    if rank := drafter.markov_rank:
        yield WeightTensor("table", drafter.vocab_size, rank)
        yield WeightTensor("embedding", (drafter.draft_vocab_size or drafter.vocab_size) // tp, rank)
    if drafter.has_confidence_head:
        yield WeightTensor("other", hidden + drafter.markov_rank * drafter.confidence_with_markov + 1, 1)
    if rank := drafter.selector_rank:
        yield WeightTensor("table", drafter.vocab_size, rank, 2)
        yield WeightTensor("embedding", rank, hidden)


def key_value_rows(drafter: DFlashArchitecture, tensor_parallel_size: int) -> int:
    """Rows of one layer's projections to keys and values, on one rank."""
    return drafter.values_per_row * drafter.kv_heads_per_rank(tensor_parallel_size) * drafter.head_dim


def convolution_rows(drafter: DFlashArchitecture) -> int:
    """What the projection of one convolution says of a row: of both its ends, by tap and group of channels."""
    groups = drafter.hidden_size // drafter.conv_group_size if drafter.conv_group_size else 0
    return 2 * drafter.conv_kernel_size * groups


def dflash_products(
    drafter: DFlashArchitecture, *, tensor_parallel_size: int
) -> Iterator[tuple[TextLinear | None, int, int]]:
    """(linear layer, None of a head, outputs, inputs) of every matrix that rows are multiplied by on one rank."""
    for tensor in dflash_tensors(drafter, tensor_parallel_size=tensor_parallel_size):
        if tensor.linear is not None or tensor.term == "embedding":
            yield tensor.linear, tensor.rows, tensor.columns
    yield TextLinear.QKV, key_value_rows(drafter, tensor_parallel_size), drafter.hidden_size


@lru_cache(maxsize=64)
def dflash_weight_bytes(drafter: DFlashArchitecture, *, tensor_parallel_size: int) -> int:
    """Bytes of one rank's weights."""
    tensors = dflash_tensors(drafter, tensor_parallel_size=tensor_parallel_size)
    tokens = (drafter.draft_vocab_size or 0) * TOKEN_BYTES if drafter.has_token_map else 0
    return sum(tensor.parameters for tensor in tensors) * dflash_element_bytes(drafter) + tokens


def dflash_element_bytes(drafter: DFlashArchitecture) -> int:
    """Bytes of one activation element, and of one weight."""
    return 4 if drafter.dtype == "float32" else 2


def dflash_ranks_problem(drafter: DFlashArchitecture, tensor_parallel_size: int) -> str | None:
    """What keeps a drafter from so many ranks, or None: they share its heads, its MLP and an own head's tokens."""
    for name, value in (
        ("query heads", drafter.num_attention_heads),
        ("intermediate channels", drafter.intermediate_size),
        ("rows of the embedding", drafter.vocab_size),
        ("tokens of its head", drafter.draft_vocab_size or tensor_parallel_size),
    ):
        if value % tensor_parallel_size:
            return f"its {value} {name} are not shared evenly by {tensor_parallel_size} GPUs"
    kv_heads = drafter.num_key_value_heads
    if kv_heads % tensor_parallel_size and tensor_parallel_size % kv_heads:
        return f"its {kv_heads} KV heads are neither shared evenly by {tensor_parallel_size} GPUs nor shared by several"
    return None


def block_buffer_bytes(drafter: DFlashArchitecture, *, num_tokens: int, max_num_seqs: int, step_rows: int) -> int:
    """What a drafter holds at fixed addresses: of each row of a step what the target leaves behind the tapped layers;
    of each sequence its slot, token and position, its drafts, and how many these are by what is asked for."""
    tapped = step_rows * len(drafter.taps) * drafter.hidden_size * dflash_element_bytes(drafter)
    return tapped + max_num_seqs * (4 + 2 * num_tokens) * 4


def kernels_per_block(drafter: DFlashArchitecture) -> int:
    """Kernels of a captured launch that drafts a block for each of some requests."""
    walks = drafter.num_drafts if drafter.markov_rank or drafter.selector_rank else 0
    return LAYER_NODES * drafter.num_hidden_layers + BLOCK_NODES + WALK_NODES * walks


def kernels_per_store(drafter: DFlashArchitecture) -> int:
    """Kernels that each step of the target has more, behind its layers and for their taps."""
    return len(drafter.taps) + STORE_NODES + STORED_LAYER_NODES * drafter.num_hidden_layers
