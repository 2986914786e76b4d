"""What captured steps take on a GPU: their nodes in the driver, and the buffers of their results."""

from __future__ import annotations

from functools import lru_cache

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.weight_format import WeightFormat
from modelserve.sizing.adapters import adapted_matrices
from modelserve.sizing.backends.generations import FP8_CAPABILITY, HOPPER, LEAST_CAPABILITY
from modelserve.sizing.backends.launches import decode_launches
from modelserve.sizing.backends.resolve import Formats, resolve, takes_model
from modelserve.sizing.pages import KVCacheLayout
from modelserve.sizing.rank_settings import Profile, RankSettings
from modelserve.sizing.speculation import NO_DRAFTS, Speculation
from modelserve.sizing.weights.assistant import FIRST_DRAFT_NODES, kernels_per_draft
from modelserve.sizing.weights.dflash import kernels_per_block, kernels_per_store
from modelserve.sizing.weights.text import element_bytes
from modelserve.units import MIB

_COUNTED = (LEAST_CAPABILITY, FP8_CAPABILITY, HOPPER)  # between them no table launches anything else
CUDA_GRAPH_NODE_BYTES = 12 << 10  # of the driver, per kernel of a captured step
NODES_PER_SPLIT_PRODUCT = 1  # cuBLAS's sum of a product in parts: behind o and down
NODES_PER_STEP = 30  # what is in no layer: tokens, embeddings, rotations, the head, selections and copies of rows
NODES_PER_SUMMED_STEP = 8  # an embedding that is split over the vocabulary
LAUNCHES_PER_ADAPTED_MATRIX = 2  # of its additive term: A x, and B times that
LAUNCHES_OF_ADAPTED_EXPERTS = 4  # of a layer: rows dealt out in two, grouped by adapter, and GELU by itself
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
    drafted = {min(size * speculation.rows, speculation.step_rows(max_num_seqs)) for size in sizes}
    alone = tuple((size, 1) for size in sizes)
    return (*alone, *((rows, speculation.rows) for rows in sorted(drafted))) if speculation.num_tokens else alone


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


@lru_cache(maxsize=1024)
def kernels_per_step(
    architecture: ModelArchitecture,
    weight_format: WeightFormat | None,
    *,
    rows: int,
    tensor_parallel_size: int,
    profile: Profile = "fast",
    summed: bool = True,
) -> int:
    """Kernels that one step of `rows` rows launches on each rank: the most of any generation's table. Without what sums
    over ranks where not `summed`.

    Counted of a step of decodes. One with chunks has chunk attention and commit where this has sums of products in
    parts. A model that kernels do not take counts as on plain PyTorch, where nothing is captured.
    """
    ranks = tensor_parallel_size
    layout = KVCacheLayout.least(architecture)
    formats = Formats(weight_format, kv_layout=layout)
    tables = (resolve(gpu, architecture, formats, profile, ranks=ranks) for gpu in _COUNTED)
    launched = max(
        decode_launches(table, architecture, rows=rows, ranks=ranks, summed=summed).total() for table in tables
    )
    layers = architecture.num_hidden_layers * 2 * NODES_PER_SPLIT_PRODUCT
    return launched + layers + NODES_PER_STEP + (NODES_PER_SUMMED_STEP if summed and ranks > 1 else 0)


def graphs_bytes(architecture: ModelArchitecture, settings: RankSettings) -> int:
    """Bytes of all graphs of one rank; 0 where none is captured: without attention kernels.

    The tensors of a step lie in one pool that all graphs share, which is as large as the activation term that it takes
    the place of. Beside it: the driver's nodes, and the buffers in which graphs leave logits or the hidden states of
    requests' last rows.
    """
    if not takes_model(architecture):
        return 0
    few, speculation, ranks = settings.decode_rows, settings.speculation, settings.tensor_parallel_size
    mixed = mixed_graph_sizes(settings.step_rows) * len(last_row_sizes(architecture, few))
    decodes = decode_graph_rows(settings.max_num_seqs, speculation)
    nodes = nodes_of_steps = sum(
        kernels_per_step(
            architecture, settings.weight_format, rows=size, tensor_parallel_size=ranks, profile=settings.profile
        )
        for size in (*(rows for rows, _ in decodes), *mixed)
    )
    if speculation.assistant is not None:
        nodes += sum(
            FIRST_DRAFT_NODES + 2 * kernels_per_draft(speculation.assistant, rows=size)  # the first and any other
            for size in decode_graph_sizes(settings.max_num_seqs)
        )
    if (block := speculation.block) is not None:
        nodes += len(decode_graph_sizes(settings.max_num_seqs)) * kernels_per_block(block)
        nodes += (len(decodes) + len(mixed)) * kernels_per_store(block)
    if (adapters := settings.adapters) is not None:  # each step once more, with two launches a matrix that is adapted
        matrices = tuple(adapted_matrices(architecture, adapters.targets, tensor_parallel_size=ranks))
        launches = LAUNCHES_PER_ADAPTED_MATRIX * len(matrices) + architecture.num_hidden_layers  # GELU by itself
        if any(matrix.experts for matrix in matrices):
            launches += LAUNCHES_OF_ADAPTED_EXPERTS * architecture.num_hidden_layers
        nodes += nodes_of_steps + launches * (len(decodes) + len(mixed))
    logits = few * architecture.vocab_size // ranks
    hidden = few * architecture.hidden_size * (2 if speculation.num_tokens else 1)  # a drafter reads those of decodes
    if settings.profile == "exact":  # hidden states of all rows outlive a captured step
        hidden += settings.step_rows * architecture.hidden_size
    outputs = (logits + hidden) * element_bytes(architecture)
    return nodes * CUDA_GRAPH_NODE_BYTES + outputs + SEGMENT_BYTES
