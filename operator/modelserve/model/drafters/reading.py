"""Which drafter a config.json is of: an MTP assistant, or one of the DFlash family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.assistant import ASSISTANT_TYPES, AssistantArchitecture, pair_problem
from modelserve.model.drafters.configs import dflash_architecture, is_dflash
from modelserve.model.drafters.dflash import DFlashArchitecture, dflash_pair_problem

DrafterArchitecture = AssistantArchitecture | DFlashArchitecture
DrafterKind = Literal["MTP", "DFlash", "DSpark"]

_SERVED = "MTP assistants (gemma4_assistant, gemma4_unified_assistant), DFlash (z-lab's and speculators'), DSpark "
_SERVED += "(speculators' and DeepSpec's) and DFlash2"


def drafter_architecture(config: Mapping[str, Any]) -> DrafterArchitecture:
    """Read a parsed config.json of a drafter. Raises UnsupportedModel for another one, with what is served, and
    InvalidInput for a broken config."""
    if not isinstance(config, Mapping):
        raise InvalidInput(f"drafter: config.json must hold a JSON object, not {type(config).__name__}")
    if is_dflash(config):
        return dflash_architecture(config)
    if config.get("model_type") in ASSISTANT_TYPES and config.get("speculators_model_type") is None:
        return AssistantArchitecture.from_config(config)
    kind, named = config.get("speculators_model_type"), config.get("architectures")
    if "eagle" in f"{kind} {named}".lower():
        raise UnsupportedModel(
            "drafter: EAGLE-3 is not served: it drafts one token after another as an MTP assistant does, keeps a cache "
            "of its own, and of three drafts 1.3 are right where the assistant's are 2 and more. Use the MTP assistant "
            f"that is published with the model, or a DFlash drafter; served are {_SERVED}"
        )
    told = f"speculators_model_type {kind!r}" if kind is not None else f"model_type {config.get('model_type')!r}"
    raise UnsupportedModel(
        f"drafter: {told} (architectures {named!r}) is not served; this release drafts with {_SERVED}"
    )


def drafter_kind(drafter: DrafterArchitecture) -> DrafterKind:
    """DFlash2 is a DFlash; what has a Markov head is a DSpark."""
    if isinstance(drafter, AssistantArchitecture):
        return "MTP"
    return "DSpark" if drafter.markov_rank else "DFlash"


def drafters_problem(named: Sequence[tuple[str, DrafterArchitecture]]) -> str | None:
    """What keeps drafters from drafting for one worker, by their names, or None."""
    for kind, which in ((AssistantArchitecture, "MTP assistants"), (DFlashArchitecture, "drafters of blocks")):
        alike = [name for name, drafter in named if isinstance(drafter, kind)]
        if len(alike) > 1:
            return (
                f"{' and '.join(alike)} are both {which}, of which a worker has one: leave one of them out, or name "
                "one of the other kind beside it"
            )
    return None


def drafter_pair_problem(target: ModelArchitecture, drafter: DrafterArchitecture) -> str | None:
    """What keeps a drafter from drafting for a target, or None."""
    if isinstance(drafter, DFlashArchitecture):
        return dflash_pair_problem(target, drafter)
    return pair_problem(target, drafter)
