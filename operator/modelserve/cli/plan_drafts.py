"""`modelserve plan --drafts`: tokens a second by concurrency without drafts, with each drafter, and with whatever pays.

Steps are those by which a worker chooses (`planning.speed.drafted_steps`), over the caches and captured sizes of a plan
with all drafters that are named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from modelserve.cli.columns import in_columns
from modelserve.cli.plan_text import ShownCandidate
from modelserve.errors import InvalidInput
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.drafters.reading import DrafterKind, drafter_kind
from modelserve.planning.drafts import WantedDrafter, WantedDrafts
from modelserve.planning.drafts_report import SOURCES
from modelserve.planning.evaluation import Fit, evaluate
from modelserve.planning.speed.drafted_steps import DraftedStep
from modelserve.planning.speed.expected_speed import drafted_steps, rank_speed
from modelserve.planning.speed.paying_drafts import CONCURRENCIES
from modelserve.planning.wishes import Wishes

_EXPLAINED = (
    "  tokens/s of so many requests together (and drafts verified of each), in steps of decodes; -: above maxNumSeqs"
)


@dataclass(frozen=True)
class Rate:
    """Of a step of some requests."""

    tokens_per_s: float
    drafts: int  # verified of each request
    kind: DrafterKind | None  # that makes them; None: there are none

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"tokensPerSecond": round(self.tokens_per_s, 1), "drafts": self.drafts}
        return found if self.kind is None else {**found, "kind": self.kind}


@dataclass(frozen=True)
class DraftsRow:
    """Of one number of requests; None where a step has not so many, or the drafter no room."""

    requests: int
    none: Rate | None
    drafters: tuple[Rate | None, ...]
    choice: Rate | None  # the fastest of these

    def to_json(self) -> dict[str, Any]:
        rates = {"none": self.none, "choice": self.choice}
        named = {name: rate.to_json() if rate is not None else None for name, rate in rates.items()}
        return {
            "requests": self.requests, **named,
            "drafters": [rate.to_json() if rate is not None else None for rate in self.drafters],
        }  # fmt: skip


@dataclass(frozen=True)
class DraftsTable:
    """Of one candidate. `held`: requests of the expected length that its pool holds, by the kinds that are loaded."""

    product: str
    tensor_parallel: int
    context: float
    length: int
    drafters: tuple[WantedDrafter, ...]
    held: tuple[tuple[tuple[DrafterKind, ...], int], ...]
    rows: tuple[DraftsRow, ...]  # none on a CPU, where nobody knows

    def to_json(self) -> dict[str, Any]:
        return {
            "accelerator": self.product,
            "tensorParallel": self.tensor_parallel,
            "contextTokens": round(self.context),
            "drafters": [
                {"kind": drafter_kind(each.architecture), "uri": each.named.uri,
                 "acceptance": f"{each.chance:.2f}", "source": each.source}
                for each in self.drafters
            ],
            "held": [{"drafters": list(kinds), "requests": count} for kinds, count in self.held],
            "rows": [row.to_json() for row in self.rows],
        }  # fmt: skip


def drafts_tables(
    shown: Sequence[ShownCandidate], architecture: ModelArchitecture, wished: Wishes
) -> tuple[DraftsTable, ...]:
    """One for each of `shown` that fits. Raises InvalidInput where no drafter is named, or one is that of another
    model."""
    drafts = wished.drafts.of_target(architecture) if wished.drafts is not None else None
    if drafts is None or not drafts.drafters:
        told = f": {'; '.join(drafts.notes)}" if drafts is not None and drafts.notes else ""
        raise InvalidInput(
            f"--drafts: spec.drafter names no drafter that is known{told}; give one, such as published: true",
            field="drafter",
        )
    fits = (each.evaluation for each in shown if isinstance(each.evaluation, Fit))
    return tuple(_table(fit, architecture, replace(wished, drafts=drafts, concurrency=None), drafts) for fit in fits)


def _table(fit: Fit, architecture: ModelArchitecture, wished: Wishes, drafts: WantedDrafts) -> DraftsTable:
    named, length = drafts.drafters, wished.input_tokens + wished.output_tokens
    sets = [(), *((each,) for each in named), *([named] if len(named) > 1 else [])]
    found: dict[tuple[WantedDrafter, ...], tuple[Fit, Wishes]] = {}
    for loaded in sets:
        fewer = replace(wished, drafts=drafts.only(loaded))
        planned = evaluate(fewer, architecture, fit.accelerator, gpus=fit.gpus)
        if isinstance(planned, Fit) and len(planned.speculation.drafters) == len(loaded):
            found[loaded] = planned, fewer
    context = wished.mean_context
    rows: list[DraftsRow] = []
    for requests in CONCURRENCIES if not fit.accelerator.is_cpu else ():
        steps = list[DraftedStep]()
        if named in found:
            steps += _steps(*found[named], architecture, requests, context)
        else:  # each as it is alone
            for number, each in enumerate(named):
                alone = _steps(*found[(each,)], architecture, requests, context) if (each,) in found else []
                steps += [step._replace(drafter=number) for step in alone]
        plain, drafted = ([step for step in steps if bool(step.drafts) is some] for some in (False, True))
        own = ([step for step in drafted if step.drafter == number] for number in range(len(named)))
        rates = tuple(_fastest(each, named, requests) for each in own)
        rows.append(DraftsRow(requests, _fastest(plain, named, requests), rates, _fastest(steps, named, requests)))
    held = tuple(
        (_kinds(loaded), planned.geometry.requests(planned.memory.kv_pool_bytes, length))
        for loaded, (planned, _) in found.items()
    )
    return DraftsTable(fit.accelerator.product, fit.tensor_parallel, context, length, named, held, tuple(rows))


def _steps(
    fit: Fit, wished: Wishes, architecture: ModelArchitecture, requests: int, context: float
) -> list[DraftedStep]:
    """Every step that a candidate might take; none where it has no such steps."""
    steps = drafted_steps(fit, rank_speed(fit, architecture, wished), wished) if requests <= fit.sequences else None
    return steps.every(requests, context=context) if steps is not None else []


def _fastest(steps: Sequence[DraftedStep], named: Sequence[WantedDrafter], requests: int) -> Rate | None:
    if not steps:
        return None
    step = max(steps, key=lambda each: each.rate)
    kind = drafter_kind(named[step.drafter].architecture) if step.drafts else None
    return Rate(requests * step.rate, step.drafts, kind)


def _kinds(drafters: Sequence[WantedDrafter]) -> tuple[DrafterKind, ...]:
    return tuple(drafter_kind(each.architecture) for each in drafters)


def drafts_text(tables: Sequence[DraftsTable]) -> str:
    """A table for each candidate."""
    return "\n\n".join("\n".join(_lines(table)) for table in tables)


def _lines(table: DraftsTable) -> list[str]:
    kinds = _kinds(table.drafters)
    lines = [f"Drafts on {table.product}, tensor parallel size {table.tensor_parallel}, at {table.context:,.0f} tokens"]
    lines += [
        f"  {kind} {each.named.uri}: right with a chance of {each.chance:.2f} ({SOURCES[each.source]})"
        for kind, each in zip(kinds, table.drafters, strict=True)
    ]
    if not table.rows:
        return [*lines, "  what drafts bring on a CPU is not known"]
    lines.append(_EXPLAINED)
    cells = [["REQUESTS", "NONE", *kinds, "CHOICE", "ASKED"]]
    for row in table.rows:
        rates = [row.none, *row.drafters, row.choice]
        asked = "-" if row.choice is None else "none" if row.choice.kind is None else row.choice.kind
        cells.append([str(row.requests), *map(_cell, rates), asked])
    lines += (f"  {line}" for line in in_columns(cells, left=0))
    held = ", ".join(f"{count:,} with {' and '.join(of) or 'none'}" for of, count in table.held)
    return [*lines, f"  requests of {table.length:,} tokens that the pool holds: {held}"]


def _cell(rate: Rate | None) -> str:
    if rate is None:
        return "-"
    return f"{rate.tokens_per_s:,.0f}" + (f" ({rate.drafts})" if rate.drafts else "")
