"""The table form of `modelserve plan`: every candidate with its arithmetic, set for a terminal of 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from modelserve.api import Candidate, PlanStatus
from modelserve.api.spec import Objective
from modelserve.planning.evaluation import Evaluation, Fit
from modelserve.planning.pools.node_labels import PRODUCT_LABEL
from modelserve.planning.pools.offers import AcceleratorOffer
from modelserve.planning.speed.engine_rates import engine_rates
from modelserve.planning.wishes import Wishes
from modelserve.sizing.memory import MemoryPlan
from modelserve.units import GIB, MIB

WIDTH = 100
MOST_NODES = 8
_RIGHT = frozenset({"GPUS", "MAX LEN", "8K", "32K", "128K", "MAX", "TTFT", "TPOT", "PLAIN", "BATCH", "$/H", "$/1M"})


@dataclass(frozen=True)
class ShownCandidate:
    """A candidate as status has it, with the evaluation that its memory terms come from."""

    candidate: Candidate
    evaluation: Evaluation


_OBJECTIVES: dict[Objective, str] = {
    "Throughput": "most output tokens per second and GPU",
    "Latency": "least time per output token, then to the first",
    "MaxContext": "longest maxModelLen, then most requests of it",
    "Cost": "lowest price of a replica-hour ($/H, from accelerators.costPerHour); without a price last, by memory; "
    "$/1M, the price of a million output tokens at the expected rate, is shown and decides nothing",
}


def best_of_each_product(shown: Sequence[ShownCandidate]) -> tuple[ShownCandidate, ...]:
    """The first candidate of each product; they come best first."""
    best: dict[str, ShownCandidate] = {}
    for each in shown:
        best.setdefault(each.candidate.accelerator, each)
    return tuple(best.values())


def plan_text(
    name: str,
    plan: PlanStatus,
    shown: Sequence[ShownCandidate],
    *,
    wishes: Wishes,
    nodes_left_out: Sequence[str] = (),
    rows_left_out: int = 0,
) -> str:
    """The whole page of one ModelServe. `nodes_left_out` say which nodes offer nothing to it, and why; so many
    candidates, `rows_left_out`, are not among `shown`.
    """
    head = f"{name}: " + (f"plan {plan.hash}" if plan.fits else "no plan")
    parts = [head, _wrapped(plan.message or "", indent="  ")]
    if plan.target_concurrency is not None:
        full = f"One replica is full at {plan.target_concurrency:,} requests, running and waiting"
        parts.append(_wrapped(f"{full}: autoscaling's target.", indent="  "))
    if shown:
        tokens = f"{wishes.input_tokens:,} + {wishes.output_tokens:,}"
        told = [
            f"Best first by objective {wishes.objective}: {_OBJECTIVES[wishes.objective]}.",
            "8K to MAX: requests at once, by context length.",
            f"TTFT: milliseconds to the first token of one prompt of {wishes.input_tokens:,} tokens, alone.",
            f"TPOT: mean milliseconds between tokens while BATCH requests of {tokens} tokens are open at a time.",
        ]
        if any(each.candidate.speed and each.candidate.speed.drafts for each in shown):
            told.append("PLAIN: the same without drafts.")
        parts += ["", *(_wrapped(line, indent="") for line in told)]
        parts += _grouped(shown, _choice_rows(shown))
        parts += ["", "Memory of one GPU, GiB: the pool is what the terms leave of the budget"]
        parts += _grouped(shown, _memory_rows(shown))
        if any(each.candidate.reuse for each in shown):
            parts += ["", *(_wrapped(line, indent="") for line in _REUSE)]
            parts += _grouped([each for each in shown if each.candidate.reuse], _reuse_rows(shown))
    chosen = next((each.evaluation for each in shown if each.candidate.verdict == "Chosen"), None)
    if isinstance(chosen, Fit):
        parts += ["", f"Terms of the chosen plan, MiB of each {'container' if chosen.gpus == 0 else 'GPU'}"]
        parts += _term_lines(chosen.memory)
        parts += _time_lines(plan, chosen)
    notes = [_note(each.candidate) for each in shown if each.candidate.message or each.candidate.remedy]
    notes += [_wrapped(each, indent="  ") for each in nodes_left_out[:MOST_NODES]]
    if len(nodes_left_out) > MOST_NODES:
        notes.append(f"  and {len(nodes_left_out) - MOST_NODES} nodes more are left out")
    if rows_left_out:
        rest = f"The best candidate of each product is shown; --all shows {rows_left_out} more."
        notes.append(_wrapped(rest, indent="  "))
    return "\n".join([*parts, *(["", "Notes", *notes] if notes else [])])


def pools_text(offers: Sequence[AcceleratorOffer]) -> str:
    """The pools that were found: GPUs per node, the labels that name them, taints a pod must tolerate."""
    lines = ["Pools"]
    for offer in offers:
        labels = [
            f"{each.key}{'>' if each.operator == 'Gt' else '='}{'|'.join(each.values)}"
            for term in offer.node_selector_terms[:1]  # the second is the same before the product label is there
            for each in term.match_expressions
            if each.values
        ] or [f"{PRODUCT_LABEL}={offer.accelerator.product}"]
        parts = [f"{offer.count} x {offer.accelerator.product} a node", f"named by {', '.join(labels)}"]
        parts += [f"taints {', '.join(offer.taints)}"] if offer.taints else []
        parts += ["may grow from nothing"] if offer.declared else []
        lines.append(_wrapped("; ".join(parts), indent="  "))
    return "\n".join(lines)


def _grouped(shown: Sequence[ShownCandidate], rows: Sequence[Sequence[str]]) -> list[str]:
    """`rows` (headings first) under a line with their product, products in the order of their best candidate."""
    headings, *cells = rows
    kept = [c for c in range(len(headings)) if any(row[c] != "-" for row in cells)]
    widths = {c: max(len(row[c]) for row in rows) for c in kept}

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            row[c].rjust(widths[c]) if headings[c] in _RIGHT or headings[0] == "GPUS*" else row[c].ljust(widths[c])
            for c in kept
        ).rstrip()

    lines = ["  " + line(headings).replace("GPUS*", "GPUS ")]
    products = dict.fromkeys(each.candidate.accelerator for each in shown)
    for product in products:
        lines.append(product)
        of_product = [
            (each.candidate.gpus_per_replica, row)
            for each, row in zip(shown, cells, strict=True)
            if each.candidate.accelerator == product
        ]
        lines += ["  " + line(row) for _, row in sorted(of_product, key=lambda entry: entry[0])]
    return lines


def _choice_rows(shown: Iterable[ShownCandidate]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (
            "GPUS",
            "VERDICT",
            "KV CACHE",
            "MAX LEN",
            "8K",
            "32K",
            "128K",
            "MAX",
            "TTFT",
            "TPOT",
            "PLAIN",
            "BATCH",
            "$/H",
            "$/1M",
            "LIMIT",
        )
    ]
    for each in shown:
        candidate = each.candidate
        cache, at, speed = candidate.kv_cache, candidate.concurrency, candidate.speed
        rows.append(
            (
                str(candidate.gpus_per_replica),
                candidate.verdict,
                f"{cache.dtype} {cache.layout}" if cache else "-",
                f"{candidate.max_model_len:,}" if candidate.max_model_len else "-",
                *((value or "-") for value in ((at.at8k, at.at32k, at.at128k, at.at_max) if at else (None,) * 4)),
                f"{float(speed.time_to_first_token_ms):,.0f}" if speed else "-",
                f"{float(speed.time_per_output_token_ms):,.1f}" if speed else "-",
                f"{float(speed.drafts.time_per_output_token_ms):,.1f}" if speed and speed.drafts else "-",
                str(speed.concurrency) if speed else "-",
                candidate.cost_per_hour or "-",
                candidate.cost_per_million_tokens or "-",
                candidate.limited_by or "-",
            )
        )
    return rows


_REUSE = """\
Prefix cache under workload.turns, sharedPrefixTokens and sessions: % of prompt tokens found in the pool, in host \
memory, and computed.
SESSION: GiB of one GPU that a session keeps while its user thinks; POOL and HOST: such sessions that there is room \
for beside the requests in progress.
NEXT: milliseconds to the first token of a turn in the middle of a session, alone: found in the pool, in host memory, \
or computed.""".splitlines()


def _reuse_rows(shown: Iterable[ShownCandidate]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("GPUS*", "POOL%", "HOST%", "COMPUTED%", "SESSION", "POOL", "HOST", "NEXT", "NEXT, HOST", "NEXT, COMPUTED")
    ]
    for each in shown:
        reuse = each.candidate.reuse
        if reuse is None:
            continue
        times = (reuse.next_turn_ms, reuse.next_turn_from_host_ms, reuse.next_turn_computed_ms)
        held = reuse.sessions_in_host if float(reuse.sessions_in_host) else "-"
        rows.append(
            (
                str(each.candidate.gpus_per_replica),
                reuse.gpu_percent,
                reuse.host_percent if float(reuse.sessions_in_host) else "-",
                reuse.computed_percent,
                _gib(reuse.session_bytes),
                reuse.sessions_on_gpu,
                held,
                *(f"{float(time):,.0f}" if time else "-" for time in times),
            )
        )
    return rows


def _memory_rows(shown: Sequence[ShownCandidate]) -> list[tuple[str, ...]]:
    """Columns of the groups, with the terms that are not of the workspace named one by one, but for what ranks send
    each other through: that is one column."""
    columns = ("parameters", "allocator", "drafter", "weights", "workspace", "context", "process", "headroom", "graphs",
               "links", "overhead")  # fmt: skip
    rows: list[tuple[str, ...]] = [("GPUS*", "BUDGET", *(name.upper() for name in columns), "POOL", "REQUEST", "SHORT")]
    for each in shown:
        memory, short = each.evaluation.memory, each.candidate.shortfall_bytes
        if memory is None:
            rows.append((str(each.candidate.gpus_per_replica), *("-",) * (len(columns) + 4)))
            continue
        sizes = {term.name: term.bytes for term in memory.terms} | {"workspace": memory.activation_bytes}
        sizes["links"] = sizes.get("nccl", 0) + sizes.get("peers", 0)
        request = None
        if isinstance(each.evaluation, Fit):
            request = each.evaluation.geometry.held_bytes(each.evaluation.max_model_len)
        rows.append(
            (
                str(each.candidate.gpus_per_replica),
                _gib(memory.budget_bytes),
                *(_gib(sizes[name]) if sizes.get(name) else "-" for name in columns),
                _gib(memory.kv_pool_bytes),
                _gib(request) if request else "-",
                _gib(short) if short else "-",
            )
        )
    return rows


def _term_lines(memory: MemoryPlan) -> list[str]:
    width = max(len(term.name) for term in memory.terms)
    rows: list[tuple[str, str, str, str]] = [
        (t.group, t.name, f"{t.bytes / MIB:,.0f}", t.source) for t in memory.terms if t.bytes or t.group != "activation"
    ]
    rows.append(("pool", "kv_pool", f"{memory.kv_pool_bytes / MIB:,.0f}", "what the budget leaves"))
    return [f"  {group:<10}  {name:<{width}}  {size:>9}  {source}" for group, name, size, source in rows]


_TIMES = {
    "weights": "bytes that a step reads / bandwidth",
    "linears": "matrix products that reading weights does not hide",
    "cache": "pages of the requests that decode / bandwidth",
    "attention": "the prompt's rows",
    "elementwise": "norms, activations and the like / bandwidth",
    "launches": "kernels x start and gap",
    "all_reduces": "two sums a layer over the GPUs",
    "prompts": "other requests' prompts in the steps of a token",
    "drafts": "proposing what the model verifies",
}


def _time_lines(plan: PlanStatus, chosen: Fit) -> list[str]:
    """TTFT and TPOT of the chosen candidate, term by term, and where the constants come from."""
    speed = next((each.speed for each in plan.candidates if each.verdict == "Chosen"), None)
    if speed is None or speed.first_token is None or speed.output_token is None:
        return []
    rates = engine_rates(chosen.accelerator.compute_capability)
    known = "measured on H200" if rates.measured else "assumed, not measured"
    rows = [("", "TTFT", "TPOT", "")]
    for name, source in _TIMES.items():
        first, token = getattr(speed.first_token, name), getattr(speed.output_token, name)
        if first or token:
            rows.append((name, first or "-", token or "-", source))
    rows.append(("sum", speed.time_to_first_token_ms, speed.time_per_output_token_ms, ""))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"  {name:<{widths[0]}}  {first:>{widths[1]}}  {token:>{widths[2]}}  {source}".rstrip()
        for name, first, token, source in rows
    ]
    return ["", f"Where the time goes, ms; constants of {rates.generation}: {known}", *lines]


def _note(candidate: Candidate) -> str:
    label = f"{candidate.gpus_per_replica} x {candidate.accelerator}" if candidate.gpus_per_replica else "CPU"
    texts = "; ".join(filter(None, (candidate.message, candidate.remedy)))
    return _wrapped(f"{label}: {texts}", indent="  ")


def _wrapped(text: str, *, indent: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
