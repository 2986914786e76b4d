"""What workers measured, remembered for plans to come: bytes of memory terms per kind of rank. Pure.

A remembered figure grows with the next worker that needs more, so that a plan made after a bad surprise never repeats
it, and comes down with a newer worker that needs clearly less (WORTH_LOWERING_BYTES). What an older worker reports
again takes nothing back: two that differ do not overwrite each other for ever. Another engine version starts afresh.
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
from modelserve.planning.learned import LearnedTerms, nothing_learned
from modelserve_operator import labels

MAX_ENTRIES = 512  # of about 400 bytes each, in a ConfigMap of at most 1 MiB
MAX_STEPS = 16  # shapes of a step whose activation one entry remembers
WORTH_WRITING_BYTES = 1 << 20
WORTH_LOWERING_BYTES = 64 << 20
STEADY_TERMS = ("weights", "context", "nccl")  # do not depend on the shape of a step

TermBytes = Annotated[int, Field(ge=0, lt=1 << 50)]


class Entry(BaseModel):
    """Measured bytes of one kind of rank; one value of the ConfigMap, as JSON."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)

    product: str
    engine_version: str
    model: str  # digest of the architecture
    model_uri: str  # where it was first measured, for people
    dtype: str  # of the weights
    tensor_parallel: int
    terms: dict[str, TermBytes]
    activation: dict[str, TermBytes]  # by `step_shape`
    measured_at: str  # when the pod of the newest worker was made

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
        """With new measurements, the largest of those given together; this very object when none of them is worth
        writing: more than 1 MiB above what is known, or more than 64 MiB below it and newer."""
        together: dict[str, Entry] = {}
        for entry in measured:
            other = together.get(entry.key, entry)
            terms, activation = _largest(other.terms, entry.terms), _largest(other.activation, entry.activation)
            latest = max(other.measured_at, entry.measured_at)
            update = {"terms": terms, "activation": activation, "measured_at": latest}
            together[entry.key] = entry.model_copy(update=update)
        entries = dict(self.entries)
        for entry in together.values():
            known = entries.get(entry.key)
            if known is None:
                entries[entry.key] = entry
                continue
            age = (entry.measured_at > known.measured_at) - (entry.measured_at < known.measured_at)
            terms = _renewed(known.terms, entry.terms, age=age)
            activation = _renewed(known.activation, entry.activation, age=age)
            if terms != known.terms or activation != known.activation:
                latest = max(known.measured_at, entry.measured_at)
                update = {"terms": terms, "activation": activation, "measured_at": latest}
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

        if not fitting:
            return nothing_learned

        def learned(
            product: str,
            *,
            tensor_parallel_size: int,
            max_num_batched_tokens: int,
            max_num_seqs: int,
            cache_format: str,
        ) -> Mapping[str, int]:
            entry = fitting.get((product, tensor_parallel_size))
            if entry is None:
                return {}
            terms = {name: entry.terms[name] for name in STEADY_TERMS if name in entry.terms}
            activation = entry.activation.get(step_shape(max_num_batched_tokens, max_num_seqs, cache_format))
            return terms if activation is None else {**terms, "activation": activation}

        return learned


def _largest(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}


def _renewed(known: Mapping[str, int], measured: Mapping[str, int], *, age: int) -> dict[str, int]:
    """Known figures, replaced by measured ones; at most MAX_STEPS.

    `age` -1, measured before them: only what is not known. 0, at the same time: also what is above by more than
    WORTH_WRITING_BYTES. 1, later: also what is below by more than WORTH_LOWERING_BYTES.
    """
    found = dict(known)
    for name, size in measured.items():
        before = found.get(name)
        grown = before is not None and age >= 0 and size > before + WORTH_WRITING_BYTES
        shrunk = before is not None and age > 0 and size < before - WORTH_LOWERING_BYTES
        if before is None or grown or shrunk:
            found.pop(name, None)  # so that the newest come last
            found[name] = size
    return dict(list(found.items())[-MAX_STEPS:])


def step_shape(max_num_batched_tokens: int, max_num_seqs: int, cache_format: str) -> str:
    """Key of `Entry.activation`: "8192x64 int8/v_only" is 8,192 tokens and 64 sequences over a cache of that format."""
    return f"{max_num_batched_tokens}x{max_num_seqs} {cache_format}"


def geometry_digest(facts: ModelFacts) -> str:
    """Models of the same geometry need the same memory, whatever they are called and wherever they lie."""
    return _text_digest(facts.architecture.model_dump_json())


@lru_cache(maxsize=256)
def _text_digest(document: str) -> str:
    return labels.short_hash(document)
