"""What captured steps take on a GPU: their nodes in the driver, and the buffers of their results."""

from __future__ import annotations

from modelserve.architecture import ModelArchitecture
from modelserve.sizing.activation import MIB
from modelserve.sizing.assistant import kernels_per_proposal
from modelserve.sizing.dequantisation import dequantising_kernels
from modelserve.sizing.kernel_buffers import taken_by_kernels
from modelserve.sizing.quantised_tiles import multiplied_by_kernels, product_kernels
from modelserve.sizing.speculation import NO_DRAFTS, Speculation
from modelserve.sizing.weights import element_bytes
from modelserve.weight_format import StoredType, TextLinear, WeightFormat

CUDA_GRAPH_NODE_BYTES = 12 << 10  # of the driver, per kernel of a captured step
NODES_PER_LAYER = 12  # four projections, prepare, decode attention in two, two norms, GeGLU, and split products
NODES_PER_LAYER_INPUT = 4  # of a per-layer embedding: two projections, their product, one more norm
NODES_PER_EXPERT_LAYER = 9  # router and its norm, rows put in order in two, GeGLU, two products of two each
NODES_PER_FEW_ROWS_OF_EXPERTS = 3  # router and two products
NODES_PER_STEP = 30  # embeddings, rotations, the head
EXPERT_FEW_ROWS = 64  # rows up to which kernels find the experts of a row by themselves
EXPERT_LINEARS = (TextLinear.EXPERT_GATE_UP, TextLinear.EXPERT_DOWN)
QUANTISED = {StoredType.INT4, StoredType.FP8}
NODES_PER_SUMMED_LAYER = 2  # sums over ranks that are not part of a norm
NODES_PER_SUMMED_STEP = 8  # an embedding that is split over the vocabulary
ROWS_APART = 256  # of captured steps with chunks, up to 2,048
FEW_LAST_ROWS = 32  # that kernels of few rows multiply, near the speed of memory
SEGMENT_BYTES = 20 * MIB  # least that the allocator takes for blocks of 1 to 10 MiB


def decode_graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes that are captured: 1, 2, 4, 8, then every 8, from 64 on every 16, from 128 on every 32, from 256 on
    every 64, and the largest batch itself: a step pads less than a fifth of its rows, where there are many."""
    sizes = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, max_num_seqs, 64))
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def decode_graph_rows(max_num_seqs: int, speculation: Speculation = NO_DRAFTS) -> tuple[tuple[int, int], ...]:
    """(rows, most rows of a segment) of captured steps without chunks: of one row each, and with all drafts. A step in
    which nobody drafts is so the one that there would be without a drafter."""
    sizes = decode_graph_sizes(max_num_seqs)
    return tuple((size * rows, rows) for rows in sorted({1, speculation.rows}) for size in sizes)


def mixed_graph_sizes(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Rows of steps with chunks that are captured: 64, 128, every 256, past 2,048 every 1,024, and the largest step."""
    sizes = (64, 128, *range(ROWS_APART, 2049, ROWS_APART), *range(3072, max_num_batched_tokens, 1024))
    return (*(size for size in sizes if size < max_num_batched_tokens), max_num_batched_tokens)


def last_row_sizes(architecture: ModelArchitecture, max_num_seqs: int) -> tuple[int, ...]:
    """Last rows of requests that each step with chunks is captured for, rising.

    Few of them are worth graphs of their own where layers share another's cache: all of those run on last rows alone.
    """
    if architecture.num_kv_shared_layers and max_num_seqs > FEW_LAST_ROWS:
        return FEW_LAST_ROWS, max_num_seqs
    return (max_num_seqs,)


def kernels_per_step(
    architecture: ModelArchitecture, weight_format: WeightFormat | None, *, rows: int, tensor_parallel_size: int
) -> int:
    """Kernels that one step of `rows` rows launches on each rank."""
    summed = tensor_parallel_size > 1
    per_layer = NODES_PER_LAYER + NODES_PER_SUMMED_LAYER * summed
    if architecture.hidden_size_per_layer_input:
        per_layer += NODES_PER_LAYER_INPUT
    if architecture.num_experts:
        dense = weight_format is None or not {weight_format.of(each) for each in EXPERT_LINEARS} & QUANTISED
        few = dense and rows <= EXPERT_FEW_ROWS
        per_layer += NODES_PER_FEW_ROWS_OF_EXPERTS if few else NODES_PER_EXPERT_LAYER
    count = architecture.num_hidden_layers * per_layer + NODES_PER_STEP + NODES_PER_SUMMED_STEP * summed
    if weight_format is not None and multiplied_by_kernels(architecture, weight_format):
        return count + product_kernels(architecture, weight_format, rows=rows)
    return count + dequantising_kernels(architecture, weight_format)


def graphs_bytes(
    architecture: ModelArchitecture,
    *,
    tensor_parallel_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    weight_format: WeightFormat | None = None,
    speculation: Speculation = NO_DRAFTS,
) -> int:
    """Bytes of all graphs of one rank; 0 where none is captured: without attention kernels.

    The tensors of a step lie in one pool that all graphs share, which is as large as the activation term that it takes
    the place of. Beside it: the driver's nodes, and the buffers in which graphs leave logits or the hidden states of
    requests' last rows.
    """
    if not taken_by_kernels(architecture):
        return 0
    few = max_num_seqs * speculation.rows
    mixed = mixed_graph_sizes(max(max_num_batched_tokens, few)) * len(last_row_sizes(architecture, few))
    decodes = decode_graph_rows(max_num_seqs, speculation)
    nodes = sum(
        kernels_per_step(architecture, weight_format, rows=size, tensor_parallel_size=tensor_parallel_size)
        for size in (*(rows for rows, _ in decodes), *mixed)
    )
    if speculation.assistant is not None:
        nodes += sum(
            kernels_per_proposal(speculation.assistant, rows=size, num_tokens=speculation.num_tokens)
            for size in decode_graph_sizes(max_num_seqs)
        )
    logits = few * architecture.vocab_size // tensor_parallel_size
    hidden = few * architecture.hidden_size * (2 if speculation.num_tokens else 1)  # a drafter reads those of decodes
    outputs = (logits + hidden) * element_bytes(architecture)
    return nodes * CUDA_GRAPH_NODE_BYTES + outputs + SEGMENT_BYTES
