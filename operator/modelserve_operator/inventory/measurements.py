"""What workers measured, remembered for plans to come: bytes of memory terms, and times of steps over what was
expected of them, per kind of rank. Pure.

A remembered figure grows with the next worker that needs more, so that a plan made after a bad surprise never repeats
it, and comes down with a newer worker that needs clearly less (WORTH_LOWERING_BYTES). What an older worker reports
again takes nothing back: two that differ do not overwrite each other for ever. A factor of speed follows the newest
worker too, once it has moved by more than a tenth, and so does the share of an assistant's drafts that were right, by
the pair of model and assistant, and what an 8-bit cache costs, by the weights. Another engine version starts afresh.

What is measured is a worker's own word, and who may create pods in a namespace writes it: so it counts in that
namespace alone, but where the installation lets a namespace teach all of them (decision 0022).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic.alias_generators import to_camel

from modelserve.api.schema_types import GpuCount, Product
from modelserve.api.status import KVCachePlan, SpeedFactors
from modelserve.measured_drafts import Chance
from modelserve.measured_speed import STEP_KINDS
from modelserve.model.model_facts import ModelFacts
from modelserve.planning.learned import NOTHING_LEARNED, Learned
from modelserve.quality.cache_quality import CacheQuality
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_format
from modelserve_operator import labels

MAX_ENTRIES = 512  # of about 400 bytes each, in a ConfigMap of at most 1 MiB
MAX_OF_NAMESPACE = 64  # of those that count in one namespace alone
MAX_STEPS = 16  # shapes of a step whose activation one entry remembers; kinds of steps whose speed it does
WORTH_WRITING_BYTES = 1 << 20
WORTH_LOWERING_BYTES = 64 << 20
WORTH_TELLING = 0.1  # of a figure of speed: less is the formulas' own error, and noise
WORTH_TELLING_CHANCE = 0.05
WORTH_TELLING_KL = 0.001  # nats
LEAST_FACTOR, MOST_FACTOR = 0.5, 3.0  # beyond that something else is amiss than the formulas
STEADY_TERMS = ("weights", "context", "nccl")  # do not depend on the shape of a step

_SPEED_KEY = f"^({'|'.join(KVCacheDtype)})/({'|'.join(KVCacheLayout)}) ({'|'.join(STEP_KINDS)})$"
_QUALITY_KEY = f"^[0-9a-f]{{10}} ({'|'.join(KVCacheDtype)})/({'|'.join(KVCacheLayout)})$"
QualityKey = Annotated[str, StringConstraints(pattern=_QUALITY_KEY)]
SpeedKey = Annotated[str, StringConstraints(pattern=_SPEED_KEY)]
Factor = Annotated[float, Field(ge=LEAST_FACTOR, le=MOST_FACTOR)]
TermBytes = Annotated[int, Field(ge=0, lt=1 << 50)]


class MeasuredQuality(CacheQuality):
    """What a worker measured that was made at `measured_at`, a time of its own: memory is known long before."""

    measured_at: str

    def replaces(self, other: MeasuredQuality) -> bool:
        moved = self.holds != other.holds or abs(self.kl - other.kl) > WORTH_TELLING_KL
        worse = other.holds and not self.holds
        return moved and (self.measured_at > other.measured_at or (self.measured_at == other.measured_at and worse))


class Entry(BaseModel):
    """Measured bytes of one kind of rank; one value of the ConfigMap, as JSON."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)

    namespace: str  # where it counts; empty: everywhere
    product: Product
    engine_version: str
    model: str  # digest of the architecture
    model_uri: str  # where it was first measured, for people
    dtype: str  # of the weights
    tensor_parallel: GpuCount
    terms: dict[str, TermBytes]
    activation: dict[str, TermBytes]  # by `step_shape`
    speed: dict[SpeedKey, Factor] = {}  # measured over expected time, by `speed_of`
    acceptance: dict[str, Chance] = {}  # of drafts, by pair_of
    cache_quality: dict[QualityKey, MeasuredQuality] = {}  # by `quality_of`
    measured_at: str  # when the pod of the newest worker was made

    @property
    def key(self) -> str:
        """Key in the ConfigMap: readable where it may be, unique by a digest."""
        kind = [self.namespace, self.product, self.engine_version, self.model, self.dtype, self.tensor_parallel]
        name = f"{self.product}.tp{self.tensor_parallel}.{labels.short_hash(kind)}"
        return f"{self.namespace}.{name}" if self.namespace else name


@dataclass(frozen=True)
class Measurements:
    """All entries, or those that count in one namespace, by key."""

    entries: Mapping[str, Entry] = field(default_factory=dict)
    view: str = ""  # the namespace, where entries count that count in no other

    def seen_from(self, namespace: str) -> Measurements:
        """What counts in a namespace."""
        return self._views.get(namespace) or self._views[""]

    @cached_property
    def _views(self) -> dict[str, Measurements]:
        found: dict[str, dict[str, Entry]] = {"": {}}
        for key, entry in self.entries.items():
            found.setdefault(entry.namespace, {})[key] = entry
        return {view: Measurements({**found[""], **entries}, view) for view, entries in found.items()}

    @property
    def proposing(self) -> dict[str, tuple[Mapping[str, int], Mapping[str, int], Mapping[str, CacheQuality]]]:
        """What makes proposals beside committed plans, by key of the entry: bytes of terms and of activation, and what
        8-bit caches cost."""
        return {key: (each.terms, each.activation, each.cache_quality) for key, each in self.entries.items()}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Measurements:
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

    def including(self, measured: Iterable[Entry]) -> Measurements:
        """With new measurements, the largest of those given together; this very object when none of them is worth
        writing: more than 1 MiB above what is known, or more than 64 MiB below it and newer; a tenth of a speed."""
        together: dict[str, Entry] = {}
        for entry in measured:
            other = together.get(entry.key, entry)
            terms, activation = _largest(other.terms, entry.terms), _largest(other.activation, entry.activation)
            latest = max(other.measured_at, entry.measured_at)
            speed, drafts = {**other.speed, **entry.speed}, {**other.acceptance, **entry.acceptance}
            quality = _renewed_quality(other.cache_quality, entry.cache_quality)
            update = {"terms": terms, "activation": activation, "speed": speed, "acceptance": drafts}
            update |= {"cache_quality": quality, "measured_at": latest}
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
            speed = _renewed_speed(known.speed, entry.speed, age=age)
            drafts = _renewed_chances(known.acceptance, entry.acceptance, age=age)
            quality = _renewed_quality(known.cache_quality, entry.cache_quality)
            update = {"terms": terms, "activation": activation, "speed": speed, "acceptance": drafts}
            update["cache_quality"] = quality
            if any(getattr(known, name) != figures for name, figures in update.items()):
                update["measured_at"] = max(known.measured_at, entry.measured_at)
                entries[entry.key] = known.model_copy(update=update)
        if entries == self.entries:
            return self
        kept = {entry.key: entry for entry in _fair(entries.values())}
        return self if kept == self.entries else Measurements(kept)

    def learned_for(self, facts: ModelFacts, *, weights: str, engine_version: str) -> Learned:
        """What plans for this model and release may use; `weights` by `weights_digest`."""
        model, dtype = geometry_digest(facts), str(facts.format)
        fitting = {
            (entry.product, entry.tensor_parallel): entry
            for entry in sorted(self.entries.values(), key=lambda entry: entry.namespace)  # a namespace's own win
            if (entry.model, entry.dtype, entry.engine_version) == (model, dtype, engine_version)
        }

        if not fitting:
            return NOTHING_LEARNED
        newest = sorted(fitting.values(), key=lambda entry: (bool(entry.namespace), entry.measured_at))
        acceptance = {pair: chance for entry in newest for pair, chance in entry.acceptance.items()}

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

        factors = [found for _, entry in sorted(fitting.items()) for found in _speed_factors(entry)]
        qualities: dict[tuple[str, str], tuple[str, CacheQuality]] = {}
        for (product, _), entry in sorted(fitting.items()):
            for key, found in sorted(entry.cache_quality.items()):
                known = qualities.get((product, key))
                if key.split()[0] == weights and (known is None or known[1].holds):  # of several, one that fails
                    qualities[product, key] = product, found
        return Learned(learned, tuple(factors), acceptance, tuple(qualities.values()))


def _fair(entries: Iterable[Entry]) -> Iterator[Entry]:
    """MAX_ENTRIES of them: those that count everywhere, and of each namespace the newest, as many of one as of another
    while it has more. So nobody drives out what others have learned, however many namespaces are theirs."""
    newest = sorted(entries, key=lambda entry: (entry.measured_at, entry.key), reverse=True)
    counts, places = Counter[str](), list[tuple[int, Entry]]()
    for entry in newest:
        counts[entry.namespace] += bool(entry.namespace)
        places.append((counts[entry.namespace], entry))
    places.sort(key=lambda each: each[0])  # stable: of equal places the newest first
    yield from (entry for place, entry in places[:MAX_ENTRIES] if place <= MAX_OF_NAMESPACE)


def _speed_factors(entry: Entry) -> Iterator[SpeedFactors]:
    """One for each format of the cache. A kind of step that was not measured has the mean of those that were; what is
    within WORTH_TELLING is 1."""
    formats = dict.fromkeys(name.split()[0] for name in entry.speed)
    for stored in formats:
        dtype, _, layout = stored.partition("/")
        known = {kind: entry.speed.get(speed_of(stored, kind)) for kind in STEP_KINDS}
        measured = [factor for factor in known.values() if factor is not None]
        shown = {
            kind.lower(): factor if factor is not None else sum(measured) / len(measured)
            for kind, factor in known.items()
        }
        if any(abs(factor - 1) > WORTH_TELLING for factor in shown.values()):
            yield SpeedFactors(
                accelerator=entry.product,
                tensor_parallel=entry.tensor_parallel,
                kv_cache=KVCachePlan(dtype=KVCacheDtype(dtype), layout=KVCacheLayout(layout)),
                **{kind: f"{f if abs(f - 1) > WORTH_TELLING else 1:.2f}" for kind, f in shown.items()},
            )


def _renewed_speed(known: Mapping[str, float], measured: Mapping[str, float], *, age: int) -> dict[str, float]:
    """Known factors, replaced by measured ones that are no older and differ by more than WORTH_TELLING."""
    found = dict(known)
    for name, factor in measured.items():
        before = found.get(name)
        if before is None or (age >= 0 and abs(factor / before - 1) > WORTH_TELLING):
            found.pop(name, None)  # so that the newest come last
            found[name] = factor
    return dict(list(found.items())[-MAX_STEPS:])


def _renewed_chances(known: Mapping[str, float], measured: Mapping[str, float], *, age: int) -> dict[str, float]:
    """Known chances, replaced by measured ones that are no older and differ by more than WORTH_TELLING_CHANCE."""
    found = dict(known)
    for pair, chance in measured.items():
        before = found.get(pair)
        if before is None or (age >= 0 and abs(chance - before) > WORTH_TELLING_CHANCE):
            found.pop(pair, None)  # so that the newest come last
            found[pair] = chance
    return dict(list(found.items())[-MAX_STEPS:])


def _renewed_quality(
    known: Mapping[str, MeasuredQuality], measured: Mapping[str, MeasuredQuality]
) -> dict[str, MeasuredQuality]:
    """Known qualities, replaced where a newer worker found another verdict or clearly another divergence; of two
    verdicts at one time the worse counts."""
    found = dict(known)
    for name, quality in measured.items():
        before = found.get(name)
        if before is None or quality.replaces(before):
            found.pop(name, None)  # so that the newest come last
            found[name] = quality
    return dict(list(found.items())[-MAX_STEPS:])


def quality_of(weights: str, quality: CacheQuality) -> str:
    """Key of `Entry.cache_quality`: "0123456789 int8/v_only"."""
    return f"{weights} {cache_format(quality.dtype, quality.layout)}"


def weights_digest(source: str, facts: ModelFacts) -> str:
    """Names weights: ten hex digits over `ModelSource.hash` and, where an inspection read them, the files' index, names
    and sizes. Weights that change under all of these are measured anew by the next worker."""
    return labels.short_hash(["weights", source, facts.identity])


def speed_of(stored: str, kind: str) -> str:
    """Key of `Entry.speed`: "bfloat16/v_only Decode"."""
    return f"{stored} {kind}"


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
