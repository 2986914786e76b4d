"""Sizes of captured steps, and what sizing sets aside for them."""

from __future__ import annotations

import pytest
from architecture_of import architecture_of
from rank_of import rank_of

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.weight_format import TextLinear, int4
from modelserve.published import published_model, published_uris
from modelserve.sizing.cuda_graphs import (
    decode_graph_sizes,
    graphs_bytes,
    kernels_per_step,
    last_row_sizes,
    mixed_graph_sizes,
)

MIB = 1 << 20
LIMIT_MIB = 0.4 * 1024
UP_TO_2048 = (64, 128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048)


def _graphs(architecture: ModelArchitecture, *, chunk: int = 2048, sequences: int = 64, ranks: int = 1) -> int:
    settings = rank_of(architecture, tensor_parallel_size=ranks, max_num_batched_tokens=chunk, max_num_seqs=sequences)
    return graphs_bytes(architecture, settings)


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (64, (64,)),
        (65, (64, 65)),
        (512, (64, 128, 256, 512)),
        (2048, UP_TO_2048),
        (2049, (*UP_TO_2048, 2049)),
        (3072, (*UP_TO_2048, 3072)),
        (8192, (*UP_TO_2048, 3072, 4096, 5120, 6144, 7168, 8192)),
        (8200, (*UP_TO_2048, 3072, 4096, 5120, 6144, 7168, 8192, 8200)),
    ],
)
def test_steps_with_chunks_are_captured_up_to_the_largest_each_once(most: int, sizes: tuple[int, ...]) -> None:
    assert mixed_graph_sizes(most) == sizes


@pytest.mark.parametrize("most", [1, 100, 2048, 2300, 8192, 16_384])
def test_every_step_has_a_size_and_few_rows_of_it_are_padding(most: int) -> None:
    sizes = mixed_graph_sizes(most)
    for rows in range(1, most + 1):
        padding = next(size for size in sizes if size >= rows) - rows
        assert padding < (64 if rows <= 128 else 256 if rows <= 2048 else 1024)


@pytest.mark.parametrize(
    ("variant", "sequences", "sizes"),
    [
        ("E4B", 64, (32, 64)),
        ("E2B", 33, (32, 33)),
        ("E4B", 32, (32,)),
        ("E2B", 1, (1,)),
        ("31B", 64, (64,)),
        ("26B-A4B", 256, (256,)),
    ],
)
def test_few_last_rows_have_steps_of_their_own_where_layers_share_a_cache(
    variant: str, sequences: int, sizes: tuple[int, ...]
) -> None:
    assert last_row_sizes(architecture_of(variant), sequences) == sizes


@pytest.mark.parametrize("chunk", [2048, 8192])
@pytest.mark.parametrize("uri", published_uris())
def test_the_default_batch_stays_below_the_limit(uri: str, chunk: int) -> None:
    facts = published_model(uri)
    assert facts is not None
    assert 0 < _graphs(facts.architecture, chunk=chunk) / MIB < LIMIT_MIB


def test_both_kinds_of_graphs_and_both_results_are_counted() -> None:
    architecture = architecture_of("31B")
    per_graph = (60 * 12 + 30) * (12 << 10)
    base = _graphs(architecture)
    logits, states = 64 * 262_144 * 2, 64 * 5376 * 2
    assert base == (len(decode_graph_sizes(64)) + len(mixed_graph_sizes(2048))) * per_graph + logits + states + 20 * MIB
    assert _graphs(architecture, sequences=128) - base == 4 * per_graph + logits + states, "80, 96, 112 and 128"
    assert _graphs(architecture, chunk=3072) - base == per_graph
    assert _graphs(architecture, chunk=32) == _graphs(architecture, chunk=64), "a step of 64 decodes has 64 rows"


@pytest.mark.parametrize("variant", ["E2B", "E4B"])
def test_steps_with_chunks_are_counted_for_each_number_of_last_rows(variant: str) -> None:
    architecture = architecture_of(variant)
    alone = architecture.model_copy(update={"num_kv_shared_layers": 0})
    per_graph = (architecture.num_hidden_layers * (12 + 4) + 30) * (12 << 10)
    for chunk in (2048, 8192):
        more = _graphs(architecture, chunk=chunk) - _graphs(alone, chunk=chunk)
        assert more == len(mixed_graph_sizes(chunk)) * per_graph
    assert _graphs(architecture, sequences=32) == _graphs(alone, sequences=32)


def test_per_layer_embeddings_and_experts_add_kernels() -> None:
    """E4B has 11 + 2 x 10 graphs. 5 of 26B-A4B's 21 have 16 rows or fewer: 2 kernels more for dense experts, as
    the router norms; 7 have 64 or fewer, 3 more with a router of its own; the others 6."""
    for variant, field, kernels in (
        ("E4B", "hidden_size_per_layer_input", 31 * 4),
        ("26B-A4B", "num_experts", 5 * 2 + 7 * 3 + 9 * 6),
    ):
        architecture = architecture_of(variant)
        without = architecture.model_copy(update={field: 0})
        more = architecture.num_hidden_layers * kernels * (12 << 10)
        assert _graphs(architecture) - _graphs(without) == more, variant


def test_quantised_experts_are_sorted_at_any_row_count() -> None:
    architecture, sorted_too = architecture_of("26B-A4B"), int4(32)
    dense_experts = sorted_too.model_copy(update={"dense": (TextLinear.EXPERT_GATE_UP, TextLinear.EXPERT_DOWN)})
    formats = None, dense_experts, sorted_too
    few, many = (
        [kernels_per_step(architecture, each, rows=rows, tensor_parallel_size=1) for each in formats]
        for rows in (64, 65)
    )
    assert [after - before for before, after in zip(few, many, strict=True)] == [30 * 3, 30 * 3, 0]


def test_several_ranks_capture_their_sums_and_hold_a_share_of_the_logits() -> None:
    architecture = architecture_of("31B")
    sums = (len(decode_graph_sizes(64)) + len(mixed_graph_sizes(2048))) * (60 * 2 + 8) * (12 << 10)
    assert _graphs(architecture, ranks=2) - _graphs(architecture) == sums - 64 * 262_144 * 2 // 2


def test_models_without_kernels_have_none() -> None:
    architecture = architecture_of("31B")
    assert _graphs(architecture.model_copy(update={"head_dim": 32, "global_head_dim": 64})) == 0
