"""What a spec asks to propose tokens, with what is known of the drafters that it names.

How often a draft is right, where those before it are, follows from the text and from the pair. Given is
workload.draftAcceptance; measured is what workers of this model saw; else it is assumed: 0.75 lies between what was
reported of 26B-A4B (.84, .60, .39 and .27 of the places, so 0.72 of each) and of 31B (5.2 of 7 drafts, 0.92), 0.6 is
that of a model trained for quantisation with the assistant of one that was not (.64, .39, .25).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from modelserve.api.spec import ModelServeSpec
from modelserve.errors import InvalidInput
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.assistant import AssistantArchitecture
from modelserve.model.drafters.reading import DrafterArchitecture, DrafterKind, drafter_kind, drafter_pair_problem
from modelserve.model.model_facts import AssistantFacts
from modelserve.planning.learned import pair_of
from modelserve.published import assistant_uri, lineage_problem, published_assistant
from modelserve.sizing.speculation import AUTO_DRAFTS, NO_DRAFTS, Speculation

ASSUMED_ACCEPTANCE, ACCEPTANCE_OF_ANOTHER_LINEAGE = 0.75, 0.6
DRAFTER_FIELD, DRAFTERS_FIELD = "spec.drafter.uri", "spec.drafter.models"

AcceptanceSource = Literal["Given", "Measured", "Assumed"]


class NamedDrafter(NamedTuple):
    """A drafter that a spec asks for."""

    uri: str
    revision: str | None  # None: it is not of the Hub
    kind: DrafterKind | None = None  # that it has to be of; None: of any
    field: str = DRAFTER_FIELD  # that names it


@dataclass(frozen=True)
class WantedDrafter:
    """A drafter that is asked for and known."""

    named: NamedDrafter
    architecture: DrafterArchitecture
    chance: float  # of a draft to be right where those before it are
    source: AcceptanceSource  # of the chance


@dataclass(frozen=True)
class WantedDrafts:
    """What the worker would have. `drafters` in its order, an assistant first; none: prompt lookup, or nothing."""

    most: int  # tokens of a proposal, but of what drafts a whole block
    prompt_lookup: bool = False
    drafters: tuple[WantedDrafter, ...] = ()
    where_it_pays: bool = False  # else wherever there is room
    fixed: bool = False  # all that is proposed is verified
    given: float | None = None  # chance of what prompt lookup finds, where that is all there is; None: nobody knows
    notes: tuple[str, ...] = ()  # what is amiss and stops nothing

    @cached_property
    def speculation(self) -> Speculation:
        """As sizing counts it."""
        if not (self.drafters or self.prompt_lookup):
            return NO_DRAFTS
        found = Speculation(self.most, prompt_lookup=self.prompt_lookup)
        for each in self.drafters:
            found = found.with_drafter(each.architecture, as_many_as_pay=not self.fixed)
        return found

    @cached_property
    def chances(self) -> tuple[tuple[float, ...], ...]:
        """Of each drafter, by place in what it proposes, to be right where those before it are; none: nobody knows."""
        most = self.speculation.num_tokens
        if self.drafters:
            return tuple((each.chance,) * min(most, _most_of(each.architecture, most)) for each in self.drafters)
        return ((self.given,) * most,) if self.given is not None and most else ()

    @cached_property
    def without_assistant(self) -> WantedDrafts:
        """Prompt lookup alone, if that is asked for: how often a text repeats itself nobody knows."""
        return self.only(())

    def only(self, drafters: tuple[WantedDrafter, ...]) -> WantedDrafts:
        """With some of its drafters."""
        return self if drafters == self.drafters else replace(self, drafters=drafters, given=None)

    def beside(self, left: WantedDrafter) -> WantedDrafts:
        """Without one of its drafters."""
        return self.only(tuple(each for each in self.drafters if each is not left))

    def kept(self, speculation: Speculation) -> WantedDrafts:
        """With those of its drafters that a candidate has."""
        return self.only(tuple(each for each in self.drafters if each.architecture in speculation.drafters))

    def of_target(self, architecture: ModelArchitecture) -> WantedDrafts:
        """With the drafters as they compute beside a model. Raises InvalidInput where one is that of another model, or
        of another kind than its spec says."""
        drafters = []
        for each in self.drafters:
            named, kind = each.named, drafter_kind(each.architecture)
            if named.kind not in (None, kind):
                raise InvalidInput(
                    f"{named.field}: {named.uri} is of kind {kind}, not {named.kind}: set kind to {kind}, or name one "
                    f"of kind {named.kind}",
                    field=named.field,
                )
            if problem := drafter_pair_problem(architecture, each.architecture):
                raise InvalidInput(f"{named.field}: {named.uri}: {problem}", field=named.field)
            drafters.append(replace(each, architecture=_computed(each.architecture, architecture.dtype)))
        return replace(self, drafters=tuple(drafters))


def left_out(drafts: WantedDrafts, left: WantedDrafter, why: str) -> str:
    """That a plan has not this drafter, in words."""
    which = "assistant" if len(drafts.drafters) == 1 else "drafter"
    return f"the {which} {left.named.uri} is left out: {why}"


def _most_of(drafter: DrafterArchitecture, most: int) -> int:
    """Tokens that a drafter has to propose at most, of `most`."""
    return most if isinstance(drafter, AssistantArchitecture) else drafter.num_drafts


@lru_cache(maxsize=64)
def _computed(drafter: DrafterArchitecture, dtype: str) -> DrafterArchitecture:
    """As it computes beside a model of this type: one object, which is found again faster than one that is equal."""
    return drafter.model_copy(update={"dtype": dtype})


def named_drafters(spec: ModelServeSpec) -> tuple[NamedDrafter, ...]:
    """The drafters that a spec asks for: its own, or the one that is published with its model; an assistant first."""
    drafter = spec.drafter
    if drafter is None:
        return ()
    if drafter.models:
        ordered = sorted(drafter.models, key=lambda each: each.kind != "MTP")
        return tuple(
            NamedDrafter(each.uri, _revision(each.uri, each.revision), each.kind, DRAFTERS_FIELD) for each in ordered
        )
    uri = drafter.uri or (assistant_uri(spec.model.uri) if drafter.published else None)
    return () if uri is None else (NamedDrafter(uri, _revision(uri, drafter.revision)),)


def _revision(uri: str, asked: str | None) -> str | None:
    return (asked or "main") if uri.startswith("hf://") else None


def wanted_drafts(
    spec: ModelServeSpec, *, assistants: Mapping[str, AssistantFacts], acceptance: Mapping[str, float] | None = None
) -> WantedDrafts | None:
    """None where nothing is asked for. `assistants`: facts of drafters that no release ships, by address, as far as
    they are known; `acceptance`: chances as workers saw them, by `pair_of`."""
    drafter = spec.drafter
    if drafter is None or not drafter.asks:
        return None
    named, drafters, notes = named_drafters(spec), list[WantedDrafter](), list[str]()
    if drafter.published and not named:
        notes.append(f"no assistant is published with {spec.model.uri}: name one in {DRAFTER_FIELD}")
    for each in named:
        known = published_assistant(each.uri) or assistants.get(each.uri)
        if known is None:
            which = "assistant" if each.kind is None else "drafter"
            notes.append(f"the {which} {each.uri} is not used, since it could not be read")
            continue
        if problem := lineage_problem(spec.model.uri, each.uri):
            notes.append(problem)
        drafters.append(WantedDrafter(each, known.assistant, *_chance(spec, each.uri, acceptance or {})))
    given = spec.workload.draft_acceptance if spec.workload else None
    return WantedDrafts(
        drafter.num_speculative_tokens or AUTO_DRAFTS,
        bool(drafter.prompt_lookup),
        tuple(drafters),
        where_it_pays=bool(drafter.published),
        fixed=drafter.num_speculative_tokens is not None,
        given=float(given) if given is not None and not drafters else None,
        notes=tuple(notes),
    )


def _chance(spec: ModelServeSpec, uri: str, acceptance: Mapping[str, float]) -> tuple[float, AcceptanceSource]:
    """Of a draft to be right where those before it are."""
    given = spec.workload.draft_acceptance if spec.workload else None
    if given is not None:
        return float(given), "Given"
    pair = pair_of(spec.model.uri, uri)
    if pair in acceptance:
        return acceptance[pair], "Measured"
    other = lineage_problem(spec.model.uri, uri) is not None
    return ACCEPTANCE_OF_ANOTHER_LINEAGE if other else ASSUMED_ACCEPTANCE, "Assumed"
