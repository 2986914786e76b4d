"""`spec.model` of a ModelServe: where the checkpoint comes from."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import AfterValidator, Field, StringConstraints, ValidationInfo, model_validator

from modelserve.api.schema_types import (
    MAX_NAME_LENGTH,
    NAME_PATTERN,
    ApiModel,
    DnsName,
    PathSegments,
    cel_rules,
)

HF_URI_PATTERN = (  # a repository, or one GGUF file in it
    r"hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*((/[A-Za-z0-9_][A-Za-z0-9._-]*){1,4}\.gguf)?"
)
PVC_URI_PATTERN = r"pvc://[a-z0-9]([a-z0-9.-]*[a-z0-9])?(/[A-Za-z0-9_][A-Za-z0-9._-]*)*"
OCI_URI_PATTERN = (  # registry with an optional port, repository, and a tag, a digest, or both
    r"oci://[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+"
    r"(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@sha256:[0-9a-f]{64})?"
)
MODEL_URI_PATTERN = f"^({HF_URI_PATTERN}|{PVC_URI_PATTERN}|{OCI_URI_PATTERN})$"
_FORMS = "hf://OWNER/NAME, hf://OWNER/NAME/FILE.gguf, pvc://CLAIM/PATH or oci://REGISTRY/NAME@sha256:DIGEST"


def _model_uri(uri: str, info: ValidationInfo) -> str:
    if re.fullmatch(MODEL_URI_PATTERN, uri):
        return uri
    if uri.startswith("file://"):
        if info.context and info.context.get("file_uri"):
            return uri
        raise ValueError(f"file:// is for the command line only; use {_FORMS}")
    raise ValueError(f"{uri!r} is not a model address; use {_FORMS}")


ModelUri = Annotated[
    str,
    Field(min_length=1, max_length=512, json_schema_extra={"pattern": MODEL_URI_PATTERN}),
    AfterValidator(_model_uri),
]
HubRevision = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")]


class SecretKeyRef(ApiModel):
    """One key of a Secret of the same namespace."""

    name: DnsName = Field(description="Name of the Secret.")
    key: str = Field(
        default="token", min_length=1, max_length=253, pattern=r"^[-._A-Za-z0-9]+$", description="Key in the Secret."
    )


class CacheReference(ApiModel):
    """A ModelCache of the same namespace."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME_LENGTH, pattern=NAME_PATTERN)] = Field(
        description="Name of the ModelCache, whose uri and revision must be those of the model."
    )


_CACHED_OF_HUB = "a cache holds hf:// models alone: leave model.cache out, or give an hf:// address"


class ModelSource(ApiModel):
    """The checkpoint to serve."""

    model_config = cel_rules(("!has(self.cache) || self.uri.startsWith('hf://')", _CACHED_OF_HUB))

    uri: ModelUri = Field(
        description="Address of the checkpoint: hf://OWNER/NAME (Hugging Face hub), hf://OWNER/NAME/FILE.gguf (a GGUF "
        "file of it), pvc://CLAIM/PATH (a directory or GGUF file on a PersistentVolumeClaim of the same namespace) or "
        "oci://REGISTRY/NAME@sha256:DIGEST (an image, mounted)."
    )
    image_path: PathSegments | None = Field(
        default=None, description="Directory or GGUF file of the checkpoint inside an oci:// image; left out: models."
    )
    served_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$",
        description="Model name in the HTTP API; left out: the last part of uri.",
    )
    revision: HubRevision | None = Field(
        default=None, description="Branch, tag or commit of an hf:// checkpoint; left out: main."
    )
    auth_secret_ref: SecretKeyRef | None = Field(
        default=None, description="Secret with the access token for hf://; only the download container sees it."
    )
    cache: CacheReference | None = Field(
        default=None,
        description="Pods mount it read-only and fetch nothing; they wait until it is filled; left out: each fetches.",
    )

    @model_validator(mode="after")
    def _cached(self) -> Self:
        if self.cache is not None and not self.uri.startswith("hf://"):
            raise ValueError(f"{_CACHED_OF_HUB}; uri is {self.uri}")
        return self
