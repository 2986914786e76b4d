"""`modelserve plan`: what the operator would decide for the ModelServes of a file, without a cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import yaml

from modelserve.api import KIND, ModelServe, ModelServeSpec, PlanStatus
from modelserve.api.schema_types import QUANTITY_PATTERN, quantity_value
from modelserve.cli.comparison import (
    ComparedPool,
    PeerCurve,
    compare,
    compared_pool,
    compared_versions,
    comparison_text,
    peer_curves,
)
from modelserve.cli.plan_drafts import DraftsTable, drafts_tables, drafts_text
from modelserve.cli.plan_formats import FormatRow, compared_formats, formats_text
from modelserve.cli.plan_kernels import kernels_json, kernels_text
from modelserve.cli.plan_sources import Inventory, documents, inventory, shown_name
from modelserve.cli.plan_text import ShownCandidate, best_of_each_product, plan_text, pools_text
from modelserve.cli.plot import concurrency_figure, write_figure
from modelserve.errors import InvalidInput
from modelserve.hardware import IMAGE_ARCHITECTURES
from modelserve.inspection import (
    inspect_assistant,
    read_architecture,
    read_audio_architecture,
    read_image_architecture,
    read_unused_parts,
    read_weight_format,
)
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.audio import AudioArchitecture
from modelserve.model.images import ImageArchitecture
from modelserve.model.model_facts import AssistantFacts, ModelFacts
from modelserve.model.weight_format import WeightFormat
from modelserve.planning.drafts import named_drafters
from modelserve.planning.evaluation import Fit
from modelserve.planning.learned import Learned
from modelserve.planning.planner import candidate_list, consider, plan
from modelserve.planning.pools.offers import AcceleratorOffer
from modelserve.planning.wishes import Wishes, wishes
from modelserve.published import published_assistant, published_model, published_uris
from modelserve.sizing.memory import check_overrides

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXIT_FITS, EXIT_BAD_INPUT, EXIT_NO_PLAN = 0, 2, 3
GPUS_PER_NODE = 8  # of the catalogue's products, when no accelerator is given
OutputForm = Literal["table", "json", "yaml"]
_FILE_PREFIX = "file://"


class _Sized(TypedDict):
    """What candidates are sized with."""

    learned: Learned
    weight_format: WeightFormat
    assistants: Mapping[str, AssistantFacts]
    image_architectures: tuple[str, ...]
    images: ImageArchitecture | None
    audio: AudioArchitecture | None


@dataclass(frozen=True)
class PlanOptions:
    """The flags of `modelserve plan`."""

    file: str
    accelerators: tuple[str, ...] = ()
    nodes: str | None = None
    catalogue: str | None = None  # file with further products
    output: OutputForm = "table"
    compare: str | None = None  # vllm or vllm:VERSION
    pool: str | None = None  # a quantity that takes the place of the planned pool in the comparison
    assume: tuple[str, ...] = ()  # TERM=QUANTITY
    image_architectures: tuple[str, ...] = IMAGE_ARCHITECTURES  # CPUs that the worker's image is built for
    plot: str | None = None  # PNG file of concurrency against context
    every: bool = False  # in the table: all candidates, where no accelerator is named
    kernels: bool = False  # that each candidate shown launches
    compare_formats: bool = False  # the plan's accelerator, or those named, with the weights in each format
    drafts: bool = False  # what each drafter brings there by concurrency


@dataclass(frozen=True)
class PlannedServe:
    """One entry of the output, with every candidate."""

    name: str
    plan: PlanStatus
    shown: tuple[ShownCandidate, ...]
    left_out: tuple[str, ...]  # nodes, with why
    wishes: Wishes
    compared: ComparedPool | None
    comparison: list[dict[str, Any]]
    architecture: ModelArchitecture
    peers: tuple[PeerCurve, ...] = ()
    unused: tuple[str, ...] = ()  # of what the checkpoint states
    formats: tuple[FormatRow, ...] = ()
    drafts: tuple[DraftsTable, ...] = ()

    def figure(self) -> Figure:
        """Requests at once by context, of every candidate that fits. Raises InvalidInput."""
        fits = [each.evaluation for each in self.shown if isinstance(each.evaluation, Fit)]
        return concurrency_figure(fits, peers=self.peers, title=f"{self.name}: requests at once against context")

    def to_json(self, *, kernels: bool = False) -> dict[str, Any]:
        entry: dict[str, Any] = {"name": self.name, "plan": self.plan.to_json()}
        if kernels:
            entry["kernels"] = kernels_json(best_of_each_product(self.shown), self.architecture, self.wishes)
        if self.formats:
            entry["formats"] = [row.to_json() for row in self.formats]
        if self.drafts:
            entry["drafts"] = [table.to_json() for table in self.drafts]
        return entry | ({"comparison": self.comparison} if self.comparison else {})

    def to_text(self, *, every: bool, kernels: bool) -> str:
        """The table, of `every` candidate or of the best of each product, whose kernels are shown if `kernels`."""
        shown = self.shown if every else best_of_each_product(self.shown)
        page = plan_text(
            self.name,
            self.plan,
            shown,
            wishes=self.wishes,
            nodes_left_out=self.left_out,
            rows_left_out=len(self.shown) - len(shown),
        )
        page += "".join(f"\n\nnote: {each}" for each in self.unused)
        if kernels:
            page += f"\n\n{kernels_text(best_of_each_product(self.shown), self.architecture, self.wishes)}"
        page += f"\n\n{formats_text(self.formats)}" if self.formats else ""
        page += f"\n\n{drafts_text(self.drafts)}" if self.drafts else ""
        return f"{page}\n\n{comparison_text(self.compared, self.comparison)}" if self.compared else page


def run_plan(options: PlanOptions) -> tuple[str, int]:
    """The output, one entry per ModelServe, and the exit code: 0 all have a plan that fits, 3 one has none.

    Raises InvalidInput for anything wrong in the documents, flags or node file.
    """
    if options.pool is not None and options.compare is None:
        raise InvalidInput(f"--pool {options.pool[:32]!r} is the pool of a comparison; give --compare vllm with it")
    where = inventory(options.accelerators, node_file=options.nodes, catalogue_file=options.catalogue)
    return planned_output(plan_serves(_model_serves(options.file), where, options), where, options)


def plan_serves(
    serves: Sequence[ModelServe],
    where: Inventory,
    options: PlanOptions,
    *,
    inspected: Mapping[str, ModelFacts] | None = None,
    assistants: Mapping[str, AssistantFacts] | None = None,
) -> list[PlannedServe]:
    """Plans of ModelServes over an inventory. `inspected`: facts of models by their address, which no release
    ships; `assistants`: the same of drafters.

    Raises InvalidInput.
    """
    assumed = _assumed(options.assume)
    return [_planned(serve, where, options, assumed, inspected or {}, assistants or {}) for serve in serves]


def planned_output(planned: Sequence[PlannedServe], where: Inventory, options: PlanOptions) -> tuple[str, int]:
    """The output and the exit code, as of `run_plan`."""
    if options.plot is not None:
        _plot(planned, options.plot)
    entries = [entry.to_json(kernels=options.kernels) for entry in planned]
    if options.output == "json":
        text = json.dumps(entries, indent=2)
    elif options.output == "yaml":
        text = yaml.safe_dump(entries, sort_keys=False, width=120).rstrip("\n")
    else:
        pools = [pools_text(found)] if where.of_cluster and (found := where.pools()) else []
        every = options.every or bool(options.accelerators)
        text = "\n\n".join([*pools, *(entry.to_text(every=every, kernels=options.kernels) for entry in planned)])
    return text, EXIT_FITS if all(entry.plan.fits for entry in planned) else EXIT_NO_PLAN


def _planned(
    serve: ModelServe,
    where: Inventory,
    options: PlanOptions,
    assumed: Learned,
    inspected: Mapping[str, ModelFacts],
    assistants: Mapping[str, AssistantFacts],
) -> PlannedServe:
    spec = serve.spec
    architecture, stored, unused, images, audio = _model(spec, inspected)
    sized: _Sized = {
        "learned": assumed,
        "weight_format": stored,
        "assistants": _assistants(spec, assistants),
        "image_architectures": options.image_architectures,
        "images": images,
        "audio": audio,
    }
    offers = where.offers(spec)
    made = plan(spec, architecture, offers, **sized)
    if not made.fits and (trusted := where.on_trust(spec, offers)):
        offers = (*offers, *trusted)
        made = plan(spec, architecture, offers, **sized)
    rows = _shown(spec, architecture, offers, sized)
    formats: tuple[FormatRow, ...] = ()
    if options.compare_formats:
        fixed = made.accelerator if made.fits and not options.accelerators else None
        on = [each for each in offers if fixed in (None, each.accelerator.product)]
        formats = compared_formats(
            architecture, stored, lambda each: _shown(spec, architecture, on, {**sized, "weight_format": each})
        )
    wished = wishes(spec, **sized)
    drafts: tuple[DraftsTable, ...] = ()
    if options.drafts:
        fixed = made.accelerator if made.fits and not options.accelerators else None
        on_these = [each for each in best_of_each_product(rows) if fixed in (None, each.candidate.accelerator)]
        drafts = drafts_tables(on_these, architecture, wished)
    pool, compared, peers = None, list[dict[str, Any]](), tuple[PeerCurve, ...]()
    if options.compare is not None:
        versions = compared_versions(options.compare)
        pool_bytes = _bytes("--pool", options.pool) if options.pool else None
        pool = compared_pool(spec, made, architecture, pool_bytes=pool_bytes)
        if pool is None:
            name = serve.metadata.name
            raise InvalidInput(f"{name}: nothing fits, so there is no pool to compare; give one with --pool")
        compared = compare(architecture, pool, versions)
        peers = peer_curves(architecture, pool, versions) if options.plot is not None else ()
    return PlannedServe(
        serve.metadata.name, made, rows, tuple(where.left_out(spec)), wished, pool, compared,
        architecture, peers, unused, formats, drafts,
    )  # fmt: skip


def _shown(
    spec: ModelServeSpec, architecture: ModelArchitecture, offers: Sequence[AcceleratorOffer], sized: _Sized
) -> tuple[ShownCandidate, ...]:
    """Every candidate, best first."""
    considered = consider(spec, architecture, offers, **sized)
    candidates = candidate_list(considered, spec, architecture, **sized)
    return tuple(ShownCandidate(c, each.evaluation) for c, each in zip(candidates, considered, strict=True))


def _plot(planned: Sequence[PlannedServe], file: str) -> None:
    if len(planned) != 1:
        raise InvalidInput(f"--plot draws one {KIND}; the file holds {len(planned)}")
    (entry,) = planned
    write_figure(entry.figure(), Path(file))


def _assumed(texts: Sequence[str]) -> Learned:
    """`--assume TERM=QUANTITY` as the terms every rank is planned with."""
    terms: dict[str, int] = {}
    for text in texts:
        name, separator, quantity = text.partition("=")
        if not separator:
            raise InvalidInput(f"--assume {text[:64]!r} is not TERM=QUANTITY, such as context=512Mi")
        terms[name] = _bytes(f"--assume {name}", quantity)
    check_overrides(terms)
    return Learned(terms=lambda *_, **__: terms)


def _bytes(flag: str, quantity: str) -> int:
    if len(quantity) > 32 or not re.fullmatch(QUANTITY_PATTERN, quantity):
        raise InvalidInput(f"{flag}: {quantity[:32]!r} is not a quantity of bytes, such as 11.54Gi")
    value = int(quantity_value(quantity))
    if not 0 <= value < 1 << 50:
        raise InvalidInput(f"{flag}: {quantity} is out of range; it must be below 1 PiB")
    return value


def _model(
    spec: ModelServeSpec, inspected: Mapping[str, ModelFacts]
) -> tuple[ModelArchitecture, WeightFormat, tuple[str, ...], ImageArchitecture | None, AudioArchitecture | None]:
    """Geometry, weight format, what of it is not used, and how it sees and hears, of a published or inspected model,
    or of a directory of this machine."""
    uri = spec.model.uri
    if uri.startswith(_FILE_PREFIX):
        directory = Path(uri.removeprefix(_FILE_PREFIX))
        stored = read_weight_format(directory)
        unused = read_unused_parts(directory, stored)
        senses = read_image_architecture(directory), read_audio_architecture(directory)
        return read_architecture(directory), stored, unused, *senses
    facts = published_model(uri) or inspected.get(uri)
    if facts is None:
        raise InvalidInput(
            f"spec.model.uri: {uri} cannot be looked into from here; give its directory as file://DIR, or one of "
            f"{', '.join(published_uris())}"
        )
    return facts.architecture, facts.format, facts.unused, facts.images, facts.audio


def _assistants(spec: ModelServeSpec, inspected: Mapping[str, AssistantFacts]) -> dict[str, AssistantFacts]:
    """Facts of drafters that no release ships, by address: inspected, or in a directory of this machine."""
    found = dict[str, AssistantFacts]()
    for uri, field in ((each.uri, each.field) for each in named_drafters(spec)):
        if published_assistant(uri) is not None:
            continue
        if uri.startswith(_FILE_PREFIX):
            found[uri] = inspect_assistant(Path(uri.removeprefix(_FILE_PREFIX)))
        elif uri in inspected:
            found[uri] = inspected[uri]
        else:
            raise InvalidInput(
                f"{field}: {uri} cannot be looked into from here; give its directory as file://DIR, or the one "
                "that is published with the model as published: true"
            )
    return found


def _model_serves(file: str) -> list[ModelServe]:
    found = [
        ModelServe.parse(document, file_uri=True)
        for document in documents(file)
        if not isinstance(document, dict) or document.get("kind", KIND) == KIND
    ]
    if not found:
        raise InvalidInput(f"{shown_name(file)} holds no {KIND}")
    return found
