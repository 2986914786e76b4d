"""Where a model comes from, and where its files lie inside a pod. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from modelserve.api import ModelServeSpec
from modelserve.api.schema_types import SUBDOMAIN_PATTERN
from modelserve.hardware import CPU_PRODUCT
from modelserve_operator import labels

MODELS_PATH = "/models"
HF_PREFIX = "hf://"
PVC_PREFIX = "pvc://"
OCI_PREFIX = "oci://"
IMAGE_DIRECTORY = "models"  # where images of models have them by custom

Body = Mapping[str, Any]


@dataclass(frozen=True)
class ModelSource:
    """`model` of a spec, resolved. `claim` is None where an hf:// download goes into the pod's own scratch space."""

    uri: str
    revision: str | None  # of an hf:// checkpoint
    claim: str | None
    directory: str  # inside the worker and inspect containers
    token: tuple[str, str] | None  # Secret name and key, for the download container alone
    image: str | None = None  # reference of an oci:// image, which the pod mounts

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
        return labels.short_hash([self.uri, self.revision, *where])


def model_source(spec: ModelServeSpec) -> ModelSource:
    """Resolve model.uri: a directory of a claim or an image, or a download into the storage claim or scratch space."""
    model, storage = spec.model, spec.storage
    if model.uri.startswith(PVC_PREFIX):
        claim, _, path = model.uri.removeprefix(PVC_PREFIX).partition("/")
        return ModelSource(model.uri, None, claim, "/".join(filter(None, (MODELS_PATH, path))), None)
    if model.uri.startswith(OCI_PREFIX):
        directory = f"{MODELS_PATH}/{model.image_path or IMAGE_DIRECTORY}"
        return ModelSource(model.uri, None, None, directory, None, model.uri.removeprefix(OCI_PREFIX))
    revision = model.revision or "main"
    parts = (MODELS_PATH, storage.sub_path if storage else None, model.uri.removeprefix(HF_PREFIX), revision)
    token = (model.auth_secret_ref.name, model.auth_secret_ref.key) if model.auth_secret_ref else None
    return ModelSource(model.uri, revision, storage.pvc_name if storage else None, "/".join(filter(None, parts)), token)


def unpinned(source: ModelSource) -> Iterator[str]:
    """Why an image that is named by a tag alone is no good address: tomorrow it may be another one."""
    if source.image is not None and "@" not in source.image:
        yield (
            f"{source.uri} is not pinned: the tag may be another image for workers that start later; append "
            "@sha256:DIGEST."
        )


def claims(model_serve: Body) -> tuple[str, ...]:
    """Names of the PersistentVolumeClaims that an (unvalidated) ModelServe uses; what cannot be a name is none."""
    uri = str(_given(model_serve, "model", "uri"))
    named = uri.removeprefix(PVC_PREFIX).partition("/")[0] if uri.startswith(PVC_PREFIX) else None
    name = named or (None if uri.startswith(OCI_PREFIX) else _given(model_serve, "storage", "pvcName"))
    return (name,) if isinstance(name, str) and re.fullmatch(SUBDOMAIN_PATTERN, name) else ()


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
