"""The ModelCache resource: a model of the Hub on a volume, fetched once for all ModelServes that name it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from modelserve.api.model_source import HF_URI_PATTERN, HubRevision, SecretKeyRef
from modelserve.api.pod import EnvVar, LocalObjectReference, Toleration
from modelserve.api.schema_types import (
    BY_TYPE,
    MAX_NAME_LENGTH,
    NAME_PATTERN,
    UNOBSERVED,
    ApiModel,
    Bytes,
    Condition,
    Count,
    DnsName,
    Generation,
    Quantity,
    Timestamp,
    cel_rules,
)
from modelserve.api.unknown_fields import parsed_spec

CACHE_KIND = "ModelCache"
CACHE_PLURAL = "modelcaches"
CACHE_SINGULAR = "modelcache"
CACHE_SHORT_NAMES = ("mc",)
MAX_CACHE_NAME_LENGTH, CACHE_NAME_PATTERN = MAX_NAME_LENGTH, NAME_PATTERN

HubUri = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=f"^{HF_URI_PATTERN}$")]
CommitId = Annotated[str, StringConstraints(min_length=40, max_length=40, pattern=r"^[0-9a-f]{40}$")]
AccessMode = Literal["ReadWriteOnce", "ReadWriteMany"]
MOST_COMMITS = 16
DEFAULT_CONNECTIONS = 4

_ONE_STORAGE = "storage is one of persistentVolumeClaim and volume"
_STORAGE_RULE = "has(self.persistentVolumeClaim) != has(self.volume)"
_URI_IS_FIXED = "uri cannot be changed: make another ModelCache"
_STORAGE_IS_FIXED = "storage cannot be changed: make another ModelCache"
_BY_NAME: dict[str, Any] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}


class ClaimStorage(ApiModel):
    """A claim that is there."""

    name: DnsName = Field(
        description="PersistentVolumeClaim of the same namespace that pods can write: ReadWriteMany, or ReadWriteOnce "
        "for one worker at a time."
    )


class VolumeStorage(ApiModel):
    """A claim that the operator makes, and that goes with the cache."""

    storage_class_name: DnsName | None = Field(default=None, description="StorageClass; left out: the cluster's own.")
    size: Quantity = Field(description="Its size: the model's bytes, twice where a branch may move.")
    access_modes: tuple[AccessMode, ...] = Field(
        default=("ReadWriteMany",),
        min_length=1,
        max_length=2,
        json_schema_extra={"x-kubernetes-list-type": "set"},
        description="As the StorageClass has them. ReadWriteOnce: for one worker at a time.",
    )


class CacheStorage(ApiModel):
    """Where the files lie: give exactly one."""

    model_config = cel_rules((_STORAGE_RULE, _ONE_STORAGE))

    persistent_volume_claim: ClaimStorage | None = Field(default=None, description="A claim that is there.")
    volume: VolumeStorage | None = Field(default=None, description="A claim that the operator makes.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.persistent_volume_claim is None) == (self.volume is None):
            raise ValueError(_ONE_STORAGE)
        return self


class CachePod(ApiModel):
    """Additions to the pods that fetch."""

    env: tuple[EnvVar, ...] = Field(
        default=(),
        max_length=32,
        json_schema_extra=_BY_NAME,
        description="Environment variables, such as HF_ENDPOINT of a mirror, HTTPS_PROXY or SSL_CERT_FILE.",
    )
    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=16, description="Taints that they tolerate.")
    image_pull_secrets: tuple[LocalObjectReference, ...] = Field(
        default=(), max_length=8, json_schema_extra=_BY_NAME, description="Secrets for pulling the worker's image."
    )


class ModelCacheSpec(ApiModel):
    """A model, and where to keep it."""

    model_config = cel_rules(
        ("self.uri == oldSelf.uri", _URI_IS_FIXED),
        ("self.storage == oldSelf.storage", _STORAGE_IS_FIXED),
    )

    uri: HubUri = Field(description="hf://OWNER/NAME, or hf://OWNER/NAME/FILE.gguf, as model.uri of its ModelServes.")
    revision: HubRevision | None = Field(
        default=None,
        description="Branch, tag or commit, as model.revision of its ModelServes; left out: main. Another one is "
        "fetched beside what is read.",
    )
    secret_ref: SecretKeyRef | None = Field(
        default=None, description="Secret of the same namespace with the access token; the fetching pod alone sees it."
    )
    storage: CacheStorage = Field(description="Where the files lie.")
    refresh_minutes: int | None = Field(
        default=None,
        ge=5,
        le=43_200,
        description="How often to look whether the branch has moved; left out: when somebody asks (annotation "
        "serving.modelserve.dev/retry). ModelServes follow it as if model.revision were edited.",
    )
    connections: int = Field(default=DEFAULT_CONNECTIONS, ge=1, le=16, description="Files that are fetched at a time.")
    pod: CachePod = Field(default=CachePod(), description="Additions to the pods that fetch.")

    @classmethod
    def parse(cls, spec: object) -> tuple[Self, tuple[str, ...]]:
        """See `parsed_spec`."""
        return parsed_spec(cls, spec)


class FilledStatus(ApiModel):
    """What the last Job that ended well has left. A ModelServe's pods read the commit."""

    commit: CommitId = Field(description="What the revision stood for.")
    revision: HubRevision = Field(description="That it stood for.")
    bytes: Bytes = Field(description="Of its files.")
    asked: Annotated[str, StringConstraints(max_length=64)] = Field(description="Digest of what was asked for.")
    retry: Annotated[str, StringConstraints(max_length=256)] | None = Field(
        default=None, description="Annotation that asked for another look, as it was then."
    )
    at: Timestamp = Field(description="When it ended.")
    fetched_bytes: Bytes = Field(default=0, description="That came over the network that time.")
    repaired: Count = Field(default=0, description="Files that were there, damaged, and fetched anew that time.")
    held: tuple[CommitId, ...] = Field(
        default=(), max_length=MOST_COMMITS, description="Commits on the volume: older ones stay while they are read."
    )


class FetchStatus(ApiModel):
    """How far a download is."""

    commit: Annotated[str, StringConstraints(max_length=40)] = Field(default="", description="What is fetched.")
    bytes: Bytes = Field(description="That are there.")
    total_bytes: Bytes = Field(description="Of all files.")
    bytes_per_second: Bytes = Field(description="Over the last half minute.")
    seconds_left: Bytes | None = Field(default=None, description="At that rate; absent while nothing moves.")


class ModelCacheStatus(ApiModel):
    """What became of it. The operator's alone."""

    observed_generation: Generation | None = Field(default=None, description="Generation of the spec this is about.")
    conditions: tuple[Condition, ...] = Field(
        default=(UNOBSERVED,),
        max_length=16,
        json_schema_extra=BY_TYPE,
        description="Ready (ModelServes can read it), Accepted, Reconciling and Stalled.",
    )
    claim_name: DnsName | None = Field(default=None, description="The claim that ModelServes' pods mount.")
    filled: FilledStatus | None = Field(default=None, description="What is there and complete.")
    fetch: FetchStatus | None = Field(default=None, description="The download that is under way.")
    progress: Annotated[str, StringConstraints(max_length=64)] | None = Field(
        default=None, description="What of the model is there, in words."
    )
    users: Count | None = Field(default=None, description="ModelServes that name it, or whose pods read it.")
