"""What workers measured, remembered for plans to come: bytes of memory terms per kind of rank. Pure.

A remembered figure only grows: a plan that is made after a bad surprise never repeats it, and two workers that differ
by a little do not overwrite each other for ever. Another engine version starts afresh.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from modelserve.model_facts import ModelFacts
from modelserve.planning.learned import LearnedTerms
from modelserve_operator import labels

MAX_ENTRIES = 512  # of about 400 bytes each, in a ConfigMap of at most 1 MiB
MAX_STEPS = 16  # shapes of a step whose activation one entry remembers
WORTH_WRITING_BYTES = 1 << 20
STEADY_TERMS = ("weights", "context", "nccl")  # do not depend on the shape of a step

TermBytes = Annotated[int, Field(ge=0, lt=1 << 50)]


class Entry(BaseModel):
    """Largest measured bytes of one kind of rank; one value of the ConfigMap, as JSON."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)

    product: str
    engine_version: str
    model: str  # digest of the architecture
    model_uri: str  # where it was first measured, for people
    dtype: str  # of the weights
    tensor_parallel: int
    terms: dict[str, TermBytes]
    activation: dict[str, TermBytes]  # by the shape of the step: "8192x64" is 8,192 tokens, 64 sequences
    measured_at: str

    @property
    def key(self) -> str:
        """Key in the ConfigMap: readable where it may be, unique by a digest."""
        kind = [self.product, self.engine_version, self.model, self.dtype, self.tensor_parallel]
        return f"{self.product}.tp{self.tensor_parallel}.{labels.short_hash(kind)}"


@dataclass(frozen=True)
class LearnedMemory:
    """All entries, by key."""

    entries: Mapping[str, Entry] = field(default_factory=dict)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> LearnedMemory:
        """Read `to_data` back. A value that was edited into something else is dropped: it is measured again."""
        entries = {}
        for text in data.values():
            try:
                entry = Entry.model_validate_json(text)
            except ValidationError:
                continue
            entries[entry.key] = entry
        return cls(entries)

    def to_data(self) -> dict[str, str]:
        """`data` of the ConfigMap."""
        return {
            key: json.dumps(entry.model_dump(by_alias=True), sort_keys=True)
            for key, entry in sorted(self.entries.items())
        }

    def including(self, measured: Iterable[Entry]) -> LearnedMemory:
        """With new measurements; this very object when none of them exceeds what is known by more than 1 MiB."""
        entries = dict(self.entries)
        for entry in measured:
            known = entries.get(entry.key)
            if known is None:
                entries[entry.key] = entry
                continue
            terms, activation = _larger(known.terms, entry.terms), _larger(known.activation, entry.activation)
            if terms != known.terms or activation != known.activation:
                update = {"terms": terms, "activation": activation, "measured_at": entry.measured_at}
                entries[entry.key] = known.model_copy(update=update)
        if entries == self.entries:
            return self
        newest = sorted(entries.values(), key=lambda entry: (entry.measured_at, entry.key))[-MAX_ENTRIES:]
        return LearnedMemory({entry.key: entry for entry in newest})

    def terms_for(self, facts: ModelFacts, *, engine_version: str) -> LearnedTerms:
        """What plans for this model and release may use."""
        model, dtype = geometry_digest(facts), str(facts.format)
        fitting = {
            (entry.product, entry.tensor_parallel): entry
            for entry in self.entries.values()
            if (entry.model, entry.dtype, entry.engine_version) == (model, dtype, engine_version)
        }

        def learned(
            product: str, *, tensor_parallel_size: int, max_num_batched_tokens: int, max_num_seqs: int
        ) -> Mapping[str, int]:
            entry = fitting.get((product, tensor_parallel_size))
            if entry is None:
                return {}
            terms = {name: entry.terms[name] for name in STEADY_TERMS if name in entry.terms}
            activation = entry.activation.get(step_shape(max_num_batched_tokens, max_num_seqs))
            return terms if activation is None else {**terms, "activation": activation}

        return learned


def _larger(known: Mapping[str, int], measured: Mapping[str, int]) -> dict[str, int]:
    """Known figures, replaced by measured ones that exceed them by more than WORTH_WRITING_BYTES; at most MAX_STEPS."""
    found = dict(known)
    for name, size in measured.items():
        if name not in found or size > found[name] + WORTH_WRITING_BYTES:
            found.pop(name, None)  # so that the newest come last
            found[name] = size
    return dict(list(found.items())[-MAX_STEPS:])


def step_shape(max_num_batched_tokens: int, max_num_seqs: int) -> str:
    """Key of `Entry.activation`."""
    return f"{max_num_batched_tokens}x{max_num_seqs}"


def geometry_digest(facts: ModelFacts) -> str:
    """Models of the same geometry need the same memory, whatever they are called and wherever they lie."""
    return _text_digest(facts.architecture.model_dump_json())


@lru_cache(maxsize=256)
def _text_digest(document: str) -> str:
    return labels.short_hash(document)
