"""What plans expect of GPUs that nothing was measured on.

    python tests/bench expected_elsewhere

Requests of 8,192 tokens and 256 of answer, alone, alone with the published assistant's drafts, and eight at a time, as
a table in Markdown; below it what the constants of these GPUs' generations assume of our kernels.
docs/expected-speed.md has both, and a test holds them.
"""

from __future__ import annotations

import argparse
from operator import attrgetter
from typing import Any

from modelserve.api import ModelServeSpec
from modelserve.api.speed import ExpectedSpeed
from modelserve.api.status import PlanStatus
from modelserve.hardware import CATALOGUE
from modelserve.model.weight_format import BFLOAT16, WeightFormat, int4
from modelserve.planning import AcceleratorOffer, plan
from modelserve.planning.speed.engine_rates import EngineRates, engine_rates
from modelserve.published import published_model

INPUT, OUTPUT = 8192, 256
INT4 = int4(32)
OFFERS = (
    ("NVIDIA-GeForce-RTX-3090", 1), ("NVIDIA-GeForce-RTX-3090", 2), ("NVIDIA-GeForce-RTX-4090", 1),
    ("NVIDIA-GeForce-RTX-4090", 2), ("NVIDIA-L4", 1), ("NVIDIA-L4", 2), ("NVIDIA-L40S", 1),
    ("NVIDIA-A100-SXM4-80GB", 1),
)  # fmt: skip
FORMS = (("31B", BFLOAT16), ("31B", INT4), ("26B-A4B", BFLOAT16), ("26B-A4B", INT4), ("E4B", BFLOAT16))
COLUMNS = (
    "GPUs", "model", "KV cache", "longest request", "8,192 tokens at once", "first token, ms", "prompt tok/s",
    "tok/s alone", "with drafts", "eight at a time",
)  # fmt: skip


def planned(variant: str, form: WeightFormat, product: str, gpus: int, **fields: Any) -> PlanStatus:
    """A plan for exactly so many GPUs."""
    document = {
        "model": {"uri": f"hf://google/gemma-4-{variant}-it"},
        "parallelism": {"tensor": gpus},
        "workload": {"inputTokens": INPUT, "outputTokens": OUTPUT, "concurrency": fields.pop("concurrency", 1)},
    }
    spec, facts = ModelServeSpec.model_validate(document | fields), published_model(f"hf://google/gemma-4-{variant}-it")
    assert facts is not None
    return plan(spec, facts.architecture, [AcceleratorOffer(CATALOGUE[product], gpus)], weight_format=form)


def row(variant: str, form: WeightFormat, product: str, gpus: int) -> tuple[str, ...] | None:
    """Cells of a line; None where it does not fit, or not such a request."""
    alone = planned(variant, form, product, gpus)
    if not alone.fits or alone.max_model_len < INPUT + OUTPUT:
        return None
    drafted = planned(variant, form, product, gpus, drafter={"published": True})
    one, two, many = (
        each.candidates[0].speed for each in (alone, drafted, planned(variant, form, product, gpus, concurrency=8))
    )
    first = float(one.time_to_first_token_ms)
    return (
        f"{gpus} x {product.removeprefix('NVIDIA-').removeprefix('GeForce-').replace('-', ' ')}",
        f"{variant} {form.stored}", f"{alone.kv_cache.dtype} {alone.kv_cache.layout}", f"{alone.max_model_len:,}",
        alone.concurrency.at8k, f"{first:,.0f}", f"{1e3 * INPUT / first:,.0f}", _rate(one),
        _rate(two) if drafted.drafter is not None else "", f"{float(many.output_tokens_per_second):.1f}",
    )  # fmt: skip


def _rate(speed: ExpectedSpeed) -> str:
    return f"{1e3 / float(speed.time_per_output_token_ms):.1f}"


def assumed(rates: EngineRates) -> str:
    """Of one generation, in per cent of bandwidth and of the dense bfloat16 rate."""
    shares = {
        "weights read at": rates.weight_read, "INT4 at": rates.int4_read, "experts at": rates.expert_read,
        "the cache at": rates.cache_read, "products at": rates.linear, "of INT4 at": rates.int4_linear,
        "chunks of V-only layers at": rates.attention_v_only, "of K and V at": rates.attention_kv,
        "of sliding layers at": rates.attention_sliding,
    }  # fmt: skip
    read = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return f"{read}; {1e6 * rates.launch_seconds:.1f} us a kernel"


def printed() -> str:
    rows = (row(variant, form, product, gpus) for product, gpus in OFFERS for variant, form in FORMS)
    table = [COLUMNS, *(each for each in rows if each is not None)]
    generations = {engine_rates(CATALOGUE[product].compute_capability) for product, _ in OFFERS}
    assumptions = [f"{each.generation}: {assumed(each)}." for each in sorted(generations, key=attrgetter("generation"))]
    heading, *lines = (f"| {' | '.join(each)} |" for each in table)
    return "\n".join([heading, f"|{'---|' * len(COLUMNS)}", *lines, "", *assumptions])


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(printed())
