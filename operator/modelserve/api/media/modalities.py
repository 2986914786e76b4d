"""What a model takes beside text, and what of it a plan has."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints, field_validator

from modelserve.api.schema_types import ApiModel, Bytes
from modelserve.model.images import BUDGETS, trained_budget
from modelserve.sizing.media.audio_input import MOST_PER_REQUEST as MOST_SOUNDS
from modelserve.sizing.media.audio_input import MOST_SECONDS
from modelserve.sizing.media.image_input import MOST_PER_REQUEST
from modelserve.sizing.media.image_urls import HOST_PATTERN, LONGEST_HOST, MOST_HOSTS, url_hosts

SoftTokens = Annotated[
    int,
    Field(ge=BUDGETS[0], le=BUDGETS[-1], json_schema_extra={"enum": list(BUDGETS)}),
    AfterValidator(trained_budget),
]
ImageHost = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_HOST, pattern=HOST_PATTERN)]


class ImageSpec(ApiModel):
    """Images of requests."""

    per_request: int = Field(ge=1, le=MOST_PER_REQUEST, description="Images of one request at most.")
    max_soft_tokens: SoftTokens | None = Field(
        default=None,
        description="Rows of a prompt that one image becomes at most: 70, 140, 280, 560 or 1120; left out: 280.",
    )
    urls: tuple[ImageHost, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=MOST_HOSTS,
        json_schema_extra={"x-kubernetes-list-type": "set"},
        description="Hosts that workers fetch images from by https: images.example.com, or *.example.com for all names "
        "below it; behind http:// by plain http. Left out: nothing is fetched, images come as data: URLs.",
    )

    @field_validator("urls", mode="after")
    @classmethod
    def _hosts(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        url_hosts(value or ())
        return value


class AudioSpec(ApiModel):
    """Sounds of requests, and recordings to be transcribed."""

    per_request: int = Field(ge=1, le=MOST_SOUNDS, description="Sounds of one request at most.")
    seconds: int | None = Field(
        default=None,
        ge=1,
        le=MOST_SECONDS,
        description="Of one sound at most; left out: 30, which is all that E2B and E4B hear at a time. Recordings to "
        "be transcribed may be longer.",
    )


class ModalitiesSpec(ApiModel):
    """What requests may hold beside text. Left out, nothing of it is loaded or counted."""

    image: ImageSpec | None = Field(default=None, description="Images, from safetensors; a GGUF file takes none.")
    audio: AudioSpec | None = Field(
        default=None, description="Sounds, of E2B, E4B and 12B, from safetensors; a GGUF file takes none."
    )


class ImagePlan(ApiModel):
    """Room for images as planned; a setting that was left out is the plan's."""

    per_request: int = Field(ge=1, le=MOST_PER_REQUEST, description="Images of one request at most.")
    max_soft_tokens: int = Field(ge=1, le=BUDGETS[-1], description="Rows of a prompt that one image becomes at most.")
    embedder_bytes: Bytes = Field(
        description="Of what makes rows of patches, such as a tower, whole on each GPU; a part of weightsBytes."
    )
    rows_bytes: Bytes = Field(
        description="Of making them, in a step all of whose rows are images', on one GPU; of activationBytes."
    )
    cache_bytes: Bytes = Field(
        default=0, description="Of rows that later chunks of a prompt take, on one GPU; of activationBytes."
    )
    host_bytes: Bytes = Field(description="Of decoding and of pixels, in the pod's request, or in the CPU's container.")
    urls: tuple[ImageHost, ...] | None = Field(
        default=None, max_length=MOST_HOSTS, description="Hosts that they are fetched from; left out: none."
    )
    decoders: int = Field(ge=1, le=8, description="Images that are decoded at a time, each with a processor.")


class AudioPlan(ApiModel):
    """Room for sounds as planned; a setting that was left out is the plan's."""

    per_request: int = Field(ge=1, le=MOST_SOUNDS, description="Sounds of one request at most.")
    seconds: int = Field(ge=1, le=MOST_SECONDS, description="Of one sound at most.")
    embedder_bytes: Bytes = Field(
        description="Of what makes rows of frames, such as a tower, whole on each GPU; a part of weightsBytes."
    )
    rows_bytes: Bytes = Field(
        description="Of making them, in a step all of whose rows are sounds', on one GPU, beyond what images take; of "
        "activationBytes."
    )
    cache_bytes: Bytes = Field(
        default=0, description="Of rows that later chunks of a prompt take, on one GPU; of activationBytes."
    )
    host_bytes: Bytes = Field(
        description="Of decoding and of spectra, beyond what images take, in the pod's request, or in the CPU's "
        "container."
    )
    decoders: int | None = Field(
        default=None,
        ge=1,
        le=8,
        description="Sounds that are decoded at a time, each with a processor; left out: images' do.",
    )
