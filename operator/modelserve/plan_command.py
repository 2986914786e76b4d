"""`modelserve plan`: what the operator would decide for the ModelServes of a file, without a cluster."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from modelserve.api import KIND, Candidate, ModelServe, ModelServeSpec, PlanStatus
from modelserve.architecture import ModelArchitecture
from modelserve.errors import InvalidInput
from modelserve.hardware import CATALOGUE
from modelserve.inspection import read_architecture, read_weight_format
from modelserve.planning.offers import AcceleratorOffer, offers_from_nodes
from modelserve.planning.planner import candidate_list, consider, plan
from modelserve.published import published_model, published_uris
from modelserve.weight_format import WeightFormat

EXIT_FITS, EXIT_BAD_INPUT, EXIT_NO_PLAN = 0, 2, 3
GPUS_PER_NODE = 8  # of the catalogue's products, when no accelerator is given
OutputForm = Literal["table", "json", "yaml"]
_FILE_PREFIX = "file://"
_HEADINGS = ("ACCELERATOR", "GPUS", "VERDICT", "MAXLEN", "KV", "POOL/GPU", "@8K", "@32K", "@128K", "@MAX", "LIMITED BY")


@dataclass(frozen=True)
class PlannedServe:
    """One entry of the output, with every candidate for the table."""

    name: str
    plan: PlanStatus
    candidates: tuple[Candidate, ...]


def run_plan(*, file: str, accelerators: Sequence[str], nodes: str | None, output: OutputForm) -> tuple[str, int]:
    """The output, one entry per ModelServe, and the exit code: 0 all have a plan that fits, 3 one has none.

    Raises InvalidInput for anything wrong in the documents, flags or node file.
    """
    offers = _offers(accelerators, nodes)
    planned = [_planned(serve, offers) for serve in _model_serves(file)]
    entries = [{"name": entry.name, "plan": entry.plan.to_json()} for entry in planned]
    if output == "json":
        text = json.dumps(entries, indent=2)
    elif output == "yaml":
        text = yaml.safe_dump(entries, sort_keys=False, width=120).rstrip("\n")
    else:
        text = "\n\n".join(_table(entry) for entry in planned)
    return text, EXIT_FITS if all(entry.plan.fits for entry in planned) else EXIT_NO_PLAN


def _planned(serve: ModelServe, offers: Sequence[AcceleratorOffer]) -> PlannedServe:
    spec = serve.spec
    architecture, stored = _model(spec)
    considered = consider(spec, architecture, offers, weight_format=stored)
    return PlannedServe(
        serve.metadata.name,
        plan(spec, architecture, offers, weight_format=stored),
        candidate_list(considered, spec, architecture, weight_format=stored),
    )


def _model(spec: ModelServeSpec) -> tuple[ModelArchitecture, WeightFormat]:
    """Geometry and weight format of a published model, or of a directory of this machine."""
    uri = spec.model.uri
    if uri.startswith(_FILE_PREFIX):
        directory = Path(uri.removeprefix(_FILE_PREFIX))
        return read_architecture(directory), read_weight_format(directory)
    facts = published_model(uri)
    if facts is None:
        raise InvalidInput(
            f"spec.model.uri: {uri} cannot be looked into from here; give its directory as file://DIR, or one of "
            f"{', '.join(published_uris())}"
        )
    return facts.architecture, facts.format


def _model_serves(file: str) -> list[ModelServe]:
    found = [
        ModelServe.parse(document, file_uri=True)
        for document in _documents(file)
        if not isinstance(document, dict) or document.get("kind", KIND) == KIND
    ]
    if not found:
        raise InvalidInput(f"{_shown(file)} holds no {KIND}")
    return found


def _documents(file: str) -> Iterator[Any]:
    """Documents of a YAML file, the items of a List each on its own; empty documents are skipped."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
        documents = list(yaml.safe_load_all(text))
    except OSError as error:
        raise InvalidInput(f"cannot read {file}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{_shown(file)} is not YAML: {' '.join(str(error).split())}") from error
    for document in documents:
        if isinstance(document, dict) and str(document.get("kind", "")).endswith("List"):
            items = document.get("items")
            yield from items if isinstance(items, list) else ()
        elif document is not None:
            yield document


def _offers(accelerators: Sequence[str], nodes: str | None) -> tuple[AcceleratorOffer, ...]:
    """Accelerators of the flags and the node file; without either, every product of the catalogue."""
    offers = [_offer(text) for text in accelerators]
    if nodes is not None:
        bodies = [body for body in _documents(nodes) if isinstance(body, dict) and body.get("kind", "Node") == "Node"]
        if not bodies:
            raise InvalidInput(f"{_shown(nodes)} holds no Node")
        offers.extend(offers_from_nodes(bodies))
    elif not offers:
        offers = [AcceleratorOffer(record, GPUS_PER_NODE) for record in CATALOGUE.values() if not record.is_cpu]
    return tuple(offers)


def _offer(text: str) -> AcceleratorOffer:
    product, separator, number = text.partition(":")
    if product not in CATALOGUE:
        near = difflib.get_close_matches(product, CATALOGUE, n=3, cutoff=0.3)
        raise InvalidInput(f"--accelerator {product!r} is not known; nearest are {', '.join(near or CATALOGUE)}")
    if separator and not (number.isdecimal() and 1 <= int(number) <= 64):
        raise InvalidInput(f"--accelerator {text!r}: the count behind ':' must be 1 to 64 GPUs per node")
    accelerator = CATALOGUE[product]
    return AcceleratorOffer(accelerator, 0 if accelerator.is_cpu else int(number or 1))


def _table(entry: PlannedServe) -> str:
    rows = [_HEADINGS, *(_row(candidate) for candidate in entry.candidates)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    head = f"{entry.name}: " + (f"plan {entry.plan.hash}" if entry.plan.fits else "no plan")
    notes = [f"{c.accelerator} x {c.gpus_per_replica}: {_note(c)}" for c in entry.candidates if _note(c)]
    return "\n".join([head, f"  {entry.plan.message}", *lines, *notes])


def _row(candidate: Candidate) -> tuple[str, ...]:
    cache, memory, at = candidate.kv_cache, candidate.per_gpu, candidate.concurrency
    counts = (at.at8k, at.at32k, at.at128k, at.at_max) if at else (None,) * 4
    return (
        candidate.accelerator,
        str(candidate.gpus_per_replica),
        candidate.verdict,
        str(candidate.max_model_len or "-"),
        f"{cache.dtype}/{cache.layout}" if cache else "-",
        f"{memory.kv_pool_bytes / (1 << 30):.2f}Gi" if memory else "-",
        *(count or "-" for count in counts),
        candidate.limited_by or "-",
    )


def _note(candidate: Candidate) -> str:
    return "; ".join(text for text in (candidate.message, candidate.remedy) if text)


def _shown(file: str) -> str:
    return "standard input" if file == "-" else file
