"""What a GPU's own driver and communicator take: of each product, from its multiprocessors and its link."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from modelserve.api.spec import ModelServeSpec
from modelserve.hardware import CATALOGUE, joined_by_nvlink
from modelserve.planning.evaluation import FEW_SEQUENCES, Fit, Refusal, evaluate
from modelserve.planning.other_settings import tokens
from modelserve.planning.planner import plan
from modelserve.planning.pools.offers import AcceleratorOffer
from modelserve.planning.wishes import Wishes
from modelserve.published import published_model
from modelserve.sizing.communicator import OVER_PCIE, communicator_bytes, communicator_source, environment
from modelserve.sizing.cuda_context import context_bytes, context_source
from modelserve.sizing.pages import KVCacheDtype
from modelserve.units import MIB

INT4 = "hf://google/gemma-4-31B-it-qat-w4a16-ct"
TWO_3090 = (CATALOGUE["NVIDIA-GeForce-RTX-3090"], 2)
GPUS = [record for record in CATALOGUE.values() if not record.is_cpu]


def _evaluated(wishes: Wishes, *, uri: str = INT4, place: Any = TWO_3090) -> Fit | Refusal:
    facts = published_model(uri)
    assert facts is not None
    accelerator, gpus = place
    return evaluate(replace(wishes, weight_format=facts.format), facts.architecture, accelerator, gpus=gpus)


def _fit(wishes: Wishes, **where: Any) -> Fit:
    found = _evaluated(wishes, **where)
    assert isinstance(found, Fit)
    return found


@pytest.mark.parametrize(("dtype", "places", "least"), [("bfloat16", 4, 500_000), ("int8", 8, 940_000)])
def test_two_3090_hold_what_their_own_stack_leaves(dtype: str, places: int, least: int) -> None:
    asked = Wishes(
        tensor_parallel=2,
        max_model_len=131_072,
        kv_dtype=KVCacheDtype(dtype),
        utilization=Decimal("0.96"),
        max_num_batched_tokens=2048,
        max_num_seqs=places,
    )
    assert tokens(_fit(asked)) >= least


@pytest.mark.parametrize("record", GPUS, ids=lambda record: record.product)
def test_a_figure_says_measured_only_where_it_was(record: Any) -> None:
    hopper = record.compute_capability == (9, 0)
    assert ("measured" in context_source(record)) == hopper
    assert ("measured" in communicator_source(record)) == (hopper and joined_by_nvlink(record.product, (9, 0)))
    if hopper:
        assert context_bytes(record) == 704 * MIB
    threads = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}.get(record.compute_capability, 2048)
    stacks = record.multiprocessors * threads * 1024
    assert 0 <= context_bytes(record) - stacks - 425 * MIB < 64 * MIB
    assert communicator_bytes(record, 1) == 0
    if joined_by_nvlink(record.product, record.compute_capability):
        assert communicator_bytes(record, 2) == communicator_bytes(record, 8) == 896 * MIB
        assert environment(record.product, record.compute_capability) == {}
    else:
        assert (
            communicator_bytes(record, 2) < communicator_bytes(record, 4) <= communicator_bytes(record, 8) < 896 * MIB
        )


def test_a_communicator_over_pcie_is_charged_what_the_worker_lets_it_have() -> None:
    """By NCCL's own sizes: a channel has buffers of 4 MiB, 512 KiB and 120 x 640 x 8 x 8 bytes for each neighbour."""
    card = CATALOGUE["NVIDIA-GeForce-RTX-3090"]
    found = environment(card.product, card.compute_capability)
    channels = int(found["NCCL_MAX_NCHANNELS"])
    buffers = sum(int(found[name]) for name in ("NCCL_BUFFSIZE", "NCCL_LL_BUFFSIZE", "NCCL_LL128_BUFFSIZE"))
    assert found["NCCL_LL128_BUFFSIZE"] == str(120 * 640 * 8 * 8)
    for ranks in (2, 4, 8):
        least = channels * min(ranks - 1, 4) * buffers + 82 * 1536 * (1760 - 1024)
        charged = communicator_bytes(card, ranks)
        assert least + 176 * MIB < charged < least + 320 * MIB, ranks
    more = replace(OVER_PCIE, most=8)
    assert more.bytes(2, card.resident_threads) > OVER_PCIE.bytes(2, card.resident_threads)
    assert more.environment["NCCL_MAX_NCHANNELS"] == "8"


@pytest.mark.parametrize(
    ("channels", "buffer_mib", "mib"), [(2, 4, 398), (4, 4, 434), (8, 4, 506), (16, 4, 650), (8, 1, 490)]
)
def test_the_sum_is_what_two_h200_took(channels: int, buffer_mib: int, mib: int) -> None:
    """2 x H200 over NVLink, NCCL 2.28, 28 November 2026: python tests/bench nccl_memory."""
    bounds = replace(OVER_PCIE, most=channels, simple_bytes=buffer_mib * MIB)
    assert 0 <= bounds.exact_bytes(2, CATALOGUE["NVIDIA-H200"].resident_threads) - mib * MIB <= 4 * MIB


@pytest.mark.parametrize(
    ("product", "capability", "joined"),
    [
        ("NVIDIA-GB200", (10, 0), True),
        ("NVIDIA-B300", (10, 3), True),
        ("NVIDIA-A100-SXM-64GB", (8, 0), True),
        ("NVIDIA-L20", (8, 9), False),
        ("NVIDIA-RTX-A5000", (8, 6), False),
        ("NVIDIA-GeForce-RTX-5080", (12, 0), False),
        ("NVIDIA-A30", (8, 0), False),
    ],
)
def test_an_unknown_product_is_charged_as_its_generation(
    product: str, capability: tuple[int, int], joined: bool
) -> None:
    assert joined_by_nvlink(product, capability) == joined
    made = replace(CATALOGUE["NVIDIA-L4"], product=product, compute_capability=capability, multiprocessors=0)
    assert (communicator_bytes(made, 2) == 896 * MIB) == joined
    largest = max(context_bytes(each) for each in GPUS if each.compute_capability == capability) if capability in {
        each.compute_capability for each in GPUS
    } else 0  # fmt: skip
    assert context_bytes(made) >= largest


def test_places_that_the_pool_cannot_fill_are_the_pools() -> None:
    open_number = Wishes(tensor_parallel=2, max_model_len=131_072, kv_dtype=KVCacheDtype.BFLOAT16)
    planned, asked = _fit(open_number), _fit(replace(open_number, max_num_seqs=64))
    assert asked.sequences == 64
    assert planned.sequences < 64
    assert planned.geometry.requests(planned.memory.kv_pool_bytes, 512) >= planned.sequences
    next_larger = _fit(replace(open_number, max_num_seqs=planned.sequences + 8))
    assert next_larger.geometry.requests(next_larger.memory.kv_pool_bytes, 512) < next_larger.sequences
    assert tokens(planned) > tokens(asked)
    assert _fit(replace(open_number, concurrency=60)).sequences >= 60
    plenty = _fit(Wishes(max_num_seqs=None), uri="hf://google/gemma-4-E4B-it", place=(CATALOGUE["NVIDIA-L4"], 1))
    assert plenty.sequences >= 64


def test_fewer_places_where_only_so_the_asked_length_fits() -> None:
    open_number = Wishes(tensor_parallel=2, kv_dtype=KVCacheDtype.BFLOAT16, utilization=Decimal("0.66"))
    few = _fit(replace(open_number, max_num_seqs=FEW_SEQUENCES))
    many = _fit(replace(open_number, max_num_seqs=64))
    assert few.max_model_len > many.max_model_len
    asked = _fit(replace(open_number, max_model_len=few.max_model_len))
    assert (asked.max_model_len, asked.sequences) == (few.max_model_len, FEW_SEQUENCES)
    longest = _fit(replace(open_number, objective="MaxContext"))
    assert longest.max_model_len == few.max_model_len
    numbered = _evaluated(replace(open_number, max_model_len=few.max_model_len, max_num_seqs=64))
    assert isinstance(numbered, Refusal)


def test_the_plan_shows_what_other_settings_would_hold() -> None:
    facts = published_model(INT4)
    assert facts is not None
    spec = ModelServeSpec.model_validate(
        {
            "model": {"uri": INT4},
            "context": {"maxModelLen": 131_072},
            "parallelism": {"tensor": 2},
            "kvCache": {"dtype": "bfloat16"},
        }
    )
    offers = [AcceleratorOffer(*TWO_3090)]
    message = plan(spec, facts.architecture, offers, weight_format=facts.format).message or ""
    asked = Wishes(tensor_parallel=2, max_model_len=131_072, kv_dtype=KVCacheDtype.BFLOAT16)
    planned = _fit(asked)
    others = {
        "maxNumSeqs 4": replace(asked, max_num_seqs=4),
        "an int8 cache": replace(asked, kv_dtype=KVCacheDtype.INT8, max_num_seqs=planned.sequences),
        "maxNumBatchedTokens 512": replace(asked, max_num_batched_tokens=512, max_num_seqs=planned.sequences),
    }
    shown = ", ".join(f"with {name}: {tokens(_fit(other)):,}" for name, other in others.items())
    assert f"requests of 131,072 tokens have {tokens(planned):,} in all; {shown}" in message
    assert f"a step has {planned.sequences} of them at most, and not 64" in message
