"""What a spec asks to propose tokens, with what is known of the assistant that it names.

How often a draft is right, where those before it are, follows from the text and from the pair. Given is
workload.draftAcceptance; measured is what workers of this model saw; else it is assumed: 0.75 lies between what was
reported of 26B-A4B (.84, .60, .39 and .27 of the places, so 0.72 of each) and of 31B (5.2 of 7 drafts, 0.92), 0.6 is
that of a model trained for quantisation with the assistant of one that was not (.64, .39, .25).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from modelserve.api.spec import ModelServeSpec
from modelserve.errors import InvalidInput
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.drafters.reading import DrafterArchitecture, drafter_pair_problem
from modelserve.model.model_facts import AssistantFacts
from modelserve.planning.learned import pair_of
from modelserve.published import assistant_uri, lineage_problem, published_assistant
from modelserve.sizing.speculation import AUTO_DRAFTS, NO_DRAFTS, Speculation

ASSUMED_ACCEPTANCE, ACCEPTANCE_OF_ANOTHER_LINEAGE = 0.75, 0.6
DRAFTER_FIELD = "spec.drafter.uri"

AcceptanceSource = Literal["Given", "Measured", "Assumed"]


@dataclass(frozen=True)
class WantedDrafts:
    """`speculation` is what the worker would have; its assistant and `uri` go together."""

    speculation: Speculation
    uri: str | None = None
    revision: str | None = None
    where_it_pays: bool = False  # else wherever there is room
    fixed: bool = False  # all that is proposed is verified
    chances: tuple[float, ...] = ()  # by place, of a draft to be right where those before it are; none: nobody knows
    source: AcceptanceSource = "Assumed"  # of the chances
    notes: tuple[str, ...] = ()  # what is amiss and stops nothing

    @property
    def without_assistant(self) -> WantedDrafts:
        """Prompt lookup alone, if that is asked for: how often a text repeats itself nobody knows."""
        left = self.speculation.without_drafters if self.speculation.prompt_lookup else NO_DRAFTS
        return replace(self, speculation=left, uri=None, revision=None, chances=())

    def of_target(self, architecture: ModelArchitecture) -> WantedDrafts:
        """With the drafters as they compute beside a model. Raises InvalidInput where one is that of another model."""
        speculation = self.speculation
        for drafter in speculation.drafters:
            if problem := drafter_pair_problem(architecture, drafter):
                raise InvalidInput(f"{DRAFTER_FIELD}: {self.uri}: {problem}", field=DRAFTER_FIELD)
            speculation = speculation.with_drafter(_computed(drafter, architecture.dtype), as_many_as_pay=False)
        return replace(self, speculation=speculation)


@lru_cache(maxsize=64)
def _computed(drafter: DrafterArchitecture, dtype: str) -> DrafterArchitecture:
    """As it computes beside a model of this type: one object, which is found again faster than one that is equal."""
    return drafter.model_copy(update={"dtype": dtype})


def named_assistant(spec: ModelServeSpec) -> str | None:
    """Address of the assistant that a spec asks for: its own, or the one that is published with its model."""
    drafter = spec.drafter
    if drafter is None:
        return None
    return drafter.uri or (assistant_uri(spec.model.uri) if drafter.published else None)


def wanted_drafts(
    spec: ModelServeSpec, *, assistant: AssistantFacts | None = None, acceptance: Mapping[str, float] | None = None
) -> WantedDrafts | None:
    """None where nothing is asked for. `assistant`: facts of one that no release ships, as far as they are known;
    `acceptance`: chances as workers saw them, by `pair_of`."""
    drafter = spec.drafter
    if drafter is None or not drafter.asks:
        return None
    most, uri = drafter.num_speculative_tokens or AUTO_DRAFTS, named_assistant(spec)
    known = (published_assistant(uri) or assistant) if uri is not None else None
    notes = []
    if drafter.published and uri is None:
        notes.append(f"no assistant is published with {spec.model.uri}: name one in {DRAFTER_FIELD}")
    elif uri is not None and known is None:
        notes.append(f"the assistant {uri} is not used, since it could not be read")
    elif uri is not None and (problem := lineage_problem(spec.model.uri, uri)):
        notes.append(problem)
    chance, source = _chance(spec, uri, acceptance or {})
    speculation = Speculation(most, prompt_lookup=bool(drafter.prompt_lookup))
    if known is not None:
        auto = drafter.num_speculative_tokens is None
        speculation = speculation.with_drafter(known.assistant, as_many_as_pay=auto)
    chances = (chance,) * speculation.num_tokens
    wanted = WantedDrafts(
        speculation,
        uri,
        (drafter.revision or "main") if uri is not None and uri.startswith("hf://") else None,
        where_it_pays=bool(drafter.published),
        fixed=drafter.num_speculative_tokens is not None,
        chances=chances,
        source=source,
        notes=tuple(notes),
    )
    if known is not None:
        return wanted
    alone = wanted.without_assistant
    return replace(alone, chances=chances) if source == "Given" else alone


def _chance(spec: ModelServeSpec, uri: str | None, acceptance: Mapping[str, float]) -> tuple[float, AcceptanceSource]:
    """Of a draft to be right where those before it are."""
    given = spec.workload.draft_acceptance if spec.workload else None
    if given is not None:
        return float(given), "Given"
    pair = pair_of(spec.model.uri, uri or "")
    if pair in acceptance:
        return acceptance[pair], "Measured"
    other = uri is not None and lineage_problem(spec.model.uri, uri) is not None
    return ACCEPTANCE_OF_ANOTHER_LINEAGE if other else ASSUMED_ACCEPTANCE, "Assumed"
