"""Where a model and its drafter come from, and where their files lie inside a pod. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from modelserve.api import ModelServeSpec
from modelserve.api.schema_types import SUBDOMAIN_PATTERN
from modelserve.hardware import CPU_PRODUCT
from modelserve_operator import labels

MODELS_PATH, WEIGHTS_VOLUME = "/models", "weights"
DRAFTER_PATH, DRAFTER_VOLUME = "/drafter", "drafter"
HF_PREFIX = "hf://"
PVC_PREFIX = "pvc://"
OCI_PREFIX = "oci://"
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
    drafter: bool = False  # it is an assistant beside a model
    volume: str = WEIGHTS_VOLUME
    mount_path: str = MODELS_PATH

    @property
    def downloaded(self) -> bool:
        return self.uri.startswith(HF_PREFIX)

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


def model_source(spec: ModelServeSpec) -> ModelSource:
    """Resolve model.uri: a directory of a claim or an image, or a download into the storage claim or scratch space."""
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


def unpinned(source: ModelSource) -> Iterator[str]:
    """Why an image that is named by a tag alone is no good address: tomorrow it may be another one."""
    if source.image is not None and "@" not in source.image:
        yield (
            f"{source.uri} is not pinned: the tag may be another image for workers that start later; append "
            "@sha256:DIGEST."
        )


def claims(model_serve: Body) -> tuple[str, ...]:
    """Names of the PersistentVolumeClaims that an (unvalidated) ModelServe uses; what cannot be a name is none."""
    storage = _given(model_serve, "storage", "pvcName")
    found: list[object] = []
    several = _given(model_serve, "drafter", "models")
    named = [each.get("uri") for each in several if isinstance(each, Mapping)] if isinstance(several, list) else []
    drafters = [("drafter", each) for each in (_given(model_serve, "drafter", "uri"), *named)]
    for section, given in (("model", _given(model_serve, "model", "uri")), *drafters):
        uri = str(given)
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
