"""Where a model and its drafter come from, and where their files lie inside a pod. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from modelserve.api import ModelServeSpec
from modelserve.api.schema_types import SUBDOMAIN_PATTERN
from modelserve.api.unknown_fields import without_unknown
from modelserve.caches.model_cache import CacheStorage, FilledStatus, ModelCacheSpec
from modelserve.errors import InvalidInput
from modelserve.hardware import CPU_PRODUCT
from modelserve_operator import labels

MODELS_PATH, WEIGHTS_VOLUME = "/models", "weights"
DRAFTER_PATH, DRAFTER_VOLUME = "/drafter", "drafter"
HF_PREFIX = "hf://"
PVC_PREFIX = "pvc://"
OCI_PREFIX = "oci://"
CACHES_FOLDER = "modelserve-caches"  # of a claim
IMAGE_DIRECTORY = "models"  # where images of models have them by custom

Body = Mapping[str, Any]


@dataclass(frozen=True)
class ModelSource:
    """`model` of a spec, or its drafter, resolved. `claim` is None where an hf:// download goes into the pod's own
    scratch space.
    """

    uri: str
    revision: str | None  # of an hf:// checkpoint
    claim: str | None
    directory: str  # inside the worker and inspect containers
    token: tuple[str, str] | None  # Secret name and key, for the download container alone
    image: str | None = None  # reference of an oci:// image, which the pod mounts
    cached: bool = False  # a ModelCache has it, and pods fetch nothing
    drafter: bool = False  # it is an assistant beside a model
    volume: str = WEIGHTS_VOLUME
    mount_path: str = MODELS_PATH

    @property
    def downloaded(self) -> bool:
        return self.uri.startswith(HF_PREFIX) and not self.cached

    @property
    def moves(self) -> bool:
        """Whether another commit may stand behind it tomorrow: a branch or a tag of the Hub."""
        return self.downloaded and not re.fullmatch(r"[0-9a-f]{40}", self.revision or "")

    @property
    def hash(self) -> str:
        """Names what an inspection found: the address and the revision."""
        where = [] if self.image is None else [self.directory]
        return labels.short_hash([*(["drafter"] if self.drafter else []), self.uri, self.revision, *where])

    def beside(self, *others: ModelSource) -> ModelSource:
        """A drafter as pods of the model have it, the first of `others`, and drafters before it: in a volume that is
        there where that is the same one (a claim is not mounted twice, and scratch space is one), else in its own."""
        for other in others:
            same = (self.claim, self.image) == (other.claim, other.image)
            if same and (self.claim or self.image or other.downloaded):
                return self._in(other.volume, other.mount_path)
        own = len({other.volume for other in others})
        return self._in(nth(DRAFTER_VOLUME, own), nth(DRAFTER_PATH, own))

    def _in(self, volume: str, path: str) -> ModelSource:
        directory = path + self.directory.removeprefix(MODELS_PATH)
        return replace(self, directory=directory, volume=volume, mount_path=path)


def nth(name: str, number: int) -> str:
    """The name of one of several: the first has it as it is, the second NAME-2."""
    return name if number < 2 else f"{name}-{number}"


def model_source(spec: ModelServeSpec, cached: CachedModel | None = None) -> ModelSource:
    """Resolve model.uri: a directory of a claim or an image, or a download into the storage claim or scratch space.

    `cached`: what the ModelCache of the spec holds. Without it the files of such a model are nowhere yet.
    """
    if spec.model.cache is not None:
        revision, claim = spec.model.revision or "main", cached.claim if cached is not None else None
        directory = cached.directory if cached is not None else MODELS_PATH
        return ModelSource(spec.model.uri, revision, claim, directory, None, cached=True)
    return _source(spec, spec.model.uri, spec.model.revision, image_path=spec.model.image_path)


def drafter_source(spec: ModelServeSpec, uri: str, revision: str | None) -> ModelSource:
    """The same of an assistant, as a pod of its own has it."""
    return replace(_source(spec, uri, revision), drafter=True)


def _source(spec: ModelServeSpec, uri: str, revision: str | None, *, image_path: str | None = None) -> ModelSource:
    storage, secret = spec.storage, spec.model.auth_secret_ref
    if uri.startswith(PVC_PREFIX):
        claim, _, path = uri.removeprefix(PVC_PREFIX).partition("/")
        return ModelSource(uri, None, claim, "/".join(filter(None, (MODELS_PATH, path))), None)
    if uri.startswith(OCI_PREFIX):
        directory = f"{MODELS_PATH}/{image_path or IMAGE_DIRECTORY}"
        return ModelSource(uri, None, None, directory, None, uri.removeprefix(OCI_PREFIX))
    revision = revision or "main"
    parts = (MODELS_PATH, storage.sub_path if storage else None, uri.removeprefix(HF_PREFIX), revision)
    token = (secret.name, secret.key) if secret else None
    return ModelSource(uri, revision, storage.pvc_name if storage else None, "/".join(filter(None, parts)), token)


@dataclass(frozen=True)
class CachedModel:
    """What a ModelCache holds: a commit, in a folder of a claim."""

    uri: str
    revision: str  # as it was asked for
    claim: str
    folder: str  # of the claim
    commit: str | None  # None: it is not there yet

    @property
    def directory(self) -> str:
        """Where the commit lies inside a pod."""
        return f"{MODELS_PATH}/{self.folder}/{self.commit}"


def cache_claim(name: str, storage: CacheStorage) -> str:
    """The claim that a ModelCache of this name has its files on."""
    named = storage.persistent_volume_claim
    return named.name if named is not None else labels.cache_claim_name(name)


def cache_folder(name: str) -> str:
    """Its folder on the claim, which others may use for other things."""
    return f"{CACHES_FOLDER}/{name}"


def filled_status(cache: Body) -> FilledStatus | None:
    """What the status of a ModelCache says is there; None for nothing, or what no release of ours wrote."""
    status = cache.get("status")
    found = status.get("filled") if isinstance(status, Mapping) else None
    if not isinstance(found, Mapping):
        return None
    try:
        return FilledStatus.model_validate(without_unknown(FilledStatus, found)[0])
    except ValidationError:
        return None


def cached_model(cache: Body) -> CachedModel | None:
    """Read a ModelCache; None where its spec is invalid. The claim follows from the spec alone, so that no status sends
    pods anywhere else."""
    try:
        spec, _ = ModelCacheSpec.parse(cache.get("spec"))
    except InvalidInput:
        return None
    name, filled = str(cache["metadata"]["name"]), filled_status(cache)
    revision = spec.revision or "main"
    commit = filled.commit if filled is not None and filled.revision == revision else None
    return CachedModel(spec.uri, revision, cache_claim(name, spec.storage), cache_folder(name), commit)


def cache_named(model_serve: Body) -> str | None:
    """Name of the ModelCache that an (unvalidated) ModelServe refers to."""
    reference = _given(model_serve, "model", "cache")
    name = reference.get("name") if isinstance(reference, Mapping) else None
    return name if isinstance(name, str) and re.fullmatch(SUBDOMAIN_PATTERN, name) else None


def unpinned(source: ModelSource) -> Iterator[str]:
    """Why an image that is named by a tag alone is no good address: tomorrow it may be another one."""
    if source.image is not None and "@" not in source.image:
        yield (
            f"{source.uri} is not pinned: the tag may be another image for workers that start later; append "
            "@sha256:DIGEST."
        )


def claims(model_serve: Body, cache: Body | None = None) -> tuple[str, ...]:
    """Names of the PersistentVolumeClaims that an (unvalidated) ModelServe uses, that of its ModelCache included; what
    cannot be a name is none."""
    storage = _given(model_serve, "storage", "pvcName")
    found: list[object] = []
    several = _given(model_serve, "drafter", "models")
    named = [each.get("uri") for each in several if isinstance(each, Mapping)] if isinstance(several, list) else []
    drafters = [("drafter", each) for each in (_given(model_serve, "drafter", "uri"), *named)]
    for section, given in (("model", _given(model_serve, "model", "uri")), *drafters):
        uri = str(given)
        if section == "model" and cache_named(model_serve) is not None:
            held = cached_model(cache) if cache is not None else None
            found.append(held.claim if held is not None else None)
            continue
        if uri.startswith(PVC_PREFIX):
            found.append(uri.removeprefix(PVC_PREFIX).partition("/")[0])
        elif (section == "model" or given is not None) and not uri.startswith(OCI_PREFIX):
            found.append(storage)
    names = (name for name in found if isinstance(name, str) and re.fullmatch(SUBDOMAIN_PATTERN, name))
    return tuple(dict.fromkeys(names))


def cpu_only(model_serve: Body) -> bool:
    """Whether an (unvalidated) ModelServe allows no accelerator but the CPU, so that no node can change its plan."""
    products = _given(model_serve, "accelerators", "products")
    return isinstance(products, list) and products != [] and all(product == CPU_PRODUCT for product in products)


def surges_first(model_serve: Body) -> bool:
    """Whether an (unvalidated) ModelServe wants another worker ready before one has to leave its node."""
    return _given(model_serve, "rollout", "onEviction") == "SurgeFirst"


def _given(model_serve: Body, section: str, field: str) -> object:
    """A field of a section of the spec; None where something else stands there than the schema allows."""
    spec = model_serve.get("spec")
    part = spec.get(section) if isinstance(spec, Mapping) else None
    return part.get(field) if isinstance(part, Mapping) else None
