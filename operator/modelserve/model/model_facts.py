"""What a plan must know of a checkpoint: its geometry, its size on disk and its storage format."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.audio import AudioArchitecture
from modelserve.model.drafters.reading import DrafterArchitecture
from modelserve.model.images import ImageArchitecture
from modelserve.model.weight_format import WeightFormat

FACTS_KEY = "model.json"  # of the ConfigMap that keeps them in a cluster


class ModelFacts(BaseModel):
    """Facts of one checkpoint; as JSON it is what an inspect Job, perhaps of another release, reports."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, validate_by_name=True)

    architecture: ModelArchitecture
    weight_bytes: int = Field(ge=1, description="Bytes of the weight files, for download and start-up budgets.")
    format: WeightFormat = Field(description="Storage type of the text weights.")
    images: ImageArchitecture | None = Field(
        default=None,
        exclude_if=lambda value: value is None,
        description="What makes rows of images, of a model that this release takes them with.",
    )
    audio: AudioArchitecture | None = Field(
        default=None,
        exclude_if=lambda value: value is None,
        description="What makes rows of sounds, of a model that this release takes them with.",
    )
    unused: tuple[str, ...] = Field(
        default=(),
        exclude_if=lambda value: not value,
        description="What the checkpoint states of its quantisation that is not used, a sentence each.",
    )
    identity: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="Digest of the names and sizes of the weight files and of their index: files that were "
        "exchanged for others have another one. None: not read, as of a published name.",
    )


class AssistantFacts(BaseModel):
    """Facts of one drafter, an MTP assistant or one of the DFlash family; as JSON it is what an inspect Job reports."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, validate_by_name=True)

    assistant: DrafterArchitecture
    weight_bytes: int = Field(ge=1, description="Bytes of the safetensors files.")
