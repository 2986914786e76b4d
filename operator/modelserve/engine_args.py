"""EngineArgs: the one document the operator writes and the worker reads. Flags of the worker win over it.

Workers refuse names that they do not know, so a field that is added says since which release there is it
(`json_schema_extra={SINCE: "0.2.0"}`), and the document is written in the dialect of the release that will read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo

from modelserve.model.images import BUDGETS, DEFAULT_BUDGET, trained_budget
from modelserve.model.weight_format import TextLinear
from modelserve.releases import release_number
from modelserve.sizing.adapters import (
    ADAPTABLE,
    DEFAULT_RANK,
    DEFAULT_TARGETS,
    MOST_ADAPTERS,
    MOST_RANK,
    MOST_SLOTS,
    AdapterLimits,
    in_order,
)
from modelserve.sizing.media.audio_input import DEFAULT_SECONDS, MOST_SECONDS
from modelserve.sizing.media.audio_input import MOST_PER_REQUEST as MOST_SOUNDS
from modelserve.sizing.media.image_input import MOST_PER_REQUEST
from modelserve.sizing.media.image_urls import MOST_HOSTS, url_hosts
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout
from modelserve.sizing.rank_settings import Profile
from modelserve.sizing.speculation import AUTO_DRAFTS, MOST_DRAFTERS, MOST_DRAFTS, NO_DRAFTS, Speculation

SINCE = "x-since-release"
DEFAULT_MAX_NUM_MIXED_TOKENS = 512
DEFAULT_MIXED_STEP_MILLISECONDS = 250


class EngineArgs(BaseModel):
    """Every setting of a worker. In YAML the names are camelCase (`maxModelLen`); unknown names are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)

    model: str = Field(description="Directory that holds config.json, the tokenizer and the safetensors files.")
    served_model_name: str | list[str] | None = Field(
        default=None, description="Names in the API, the first of them in answers; default: the directory's name."
    )
    host: str = "0.0.0.0"  # noqa: S104 - a pod serves on its own address
    port: int = Field(default=8000, ge=0, le=65535)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    accelerator: str | None = Field(
        default=None, description="GPU product, MIG profile included, that these settings were sized for."
    )
    accelerator_memory_bytes: int | None = Field(default=None, ge=1, description="Its memory, as sizing counted it.")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(default="auto", description="auto: the checkpoint's dtype.")
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    max_model_len: int | Literal["auto"] = Field(
        default="auto", description="Most tokens, prompt + output, of a request."
    )
    min_model_len: int = Field(default=1, ge=1, description="Serve less than max_model_len down to this, else stop.")
    kv_cache_dtype: KVCacheDtype | Literal["auto"] = Field(default="auto", description="auto: the weights' dtype.")
    kv_cache_layout: KVCacheLayout | Literal["auto"] = Field(default="auto", description="auto: v_only where exact.")
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=0.99)
    cpu_memory_bytes: int | None = Field(default=None, ge=1, description="CPU: bytes the worker may use in all.")
    max_num_batched_tokens: int = Field(
        default=2048,
        ge=1,
        le=1 << 20,
        description="Most tokens of one step, the chunk. `serve` on a GPU takes this and the next two, left out, as a "
        "plan for that GPU has them.",
    )
    max_num_mixed_tokens: int = Field(
        default=DEFAULT_MAX_NUM_MIXED_TOKENS,
        ge=2,
        le=1 << 20,
        description="Most tokens of a step in which requests decode, which bounds the time between their tokens. "
        "On GPUs half as many while few prompts wait, and up to three times, 1,536 at most, while a crowd does; on "
        "CPUs what mixedStepMilliseconds compute.",
    )
    mixed_step_milliseconds: int = Field(
        default=DEFAULT_MIXED_STEP_MILLISECONDS,
        ge=1,
        le=60_000,
        description="CPU: what rows of prompts may add to a step in which requests decode, by measured time; as long "
        "as the decodes take where that is more.",
        json_schema_extra={SINCE: "0.2.0"},
    )
    max_num_seqs: int = Field(default=64, ge=1, le=4096, description="Most requests of one step.")
    profile: Profile = Field(
        default="fast",
        description="exact: the bits of a request's answer do not depend on the requests beside it, on the chunks of "
        "its prompt or on drafts. Slower.",
        json_schema_extra={SINCE: "0.2.0"},
    )
    load_format: Literal["auto", "dummy"] = "auto"
    prefix_caching: bool = Field(default=True, description="Requests that begin alike share what was computed.")
    host_cache_bytes: int = Field(
        default=0,
        ge=0,
        description="Pinned host memory of a worker, all ranks together, for cached prefixes that the pool gives up; "
        "0: none.",
        json_schema_extra={SINCE: "0.2.0"},
    )
    kv_events_endpoint: str | None = Field(
        default=None,
        pattern=r"^(tcp|ipc)://.+$",
        max_length=256,
        description="ZeroMQ address, tcp://*:5557 as an example, on which routers hear what is cached; left out: none.",
        json_schema_extra={SINCE: "0.2.0"},
    )
    kv_events_topic: str | None = Field(
        default=None,
        max_length=512,
        description="Topic of these messages; left out: kv@ADDRESS:PORT@MODEL, of POD_IP and the first served name.",
        json_schema_extra={SINCE: "0.2.0"},
    )
    drafter: str | list[str] | None = Field(
        default=None,
        description="Directory of a drafter, an MTP assistant or one of the DFlash family, that proposes tokens, which "
        "the model verifies; or of one of each, of which step by step the one is asked that pays most.",
        json_schema_extra={SINCE: "0.2.0"},
    )
    drafter_optional: bool = Field(
        default=False,
        description="Serve without a drafter that is missing, broken or that of another model, and say so.",
        json_schema_extra={SINCE: "0.2.0"},
    )
    prompt_lookup: bool = Field(
        default=False,
        description="Propose what followed the same tokens earlier in a request, or in its `prediction`: for edits, "
        "quotations and code.",
        json_schema_extra={SINCE: "0.2.0"},
    )
    num_speculative_tokens: Annotated[int, Field(ge=1, le=MOST_DRAFTS)] | Literal["auto"] = Field(
        default="auto",
        description=f"Most tokens proposed at a time, with a drafter or prompt lookup. auto: at most {AUTO_DRAFTS}, "
        "or a whole block of a drafter that makes one, and of each request as many as pay.",
        json_schema_extra={SINCE: "0.2.0"},
    )
    max_loras: int = Field(
        default=0,
        ge=0,
        le=MOST_SLOTS,
        description="LoRA adapters in device memory at a time, and so in one step; 0: none are served.",
        json_schema_extra={SINCE: "0.2.0"},
    )
    max_lora_rank: int = Field(
        default=DEFAULT_RANK,
        ge=1,
        le=MOST_RANK,
        description="Largest rank of theirs.",
        json_schema_extra={SINCE: "0.2.0"},
    )
    max_cpu_loras: int | None = Field(
        default=None,
        ge=1,
        le=MOST_ADAPTERS,
        description="Adapters in host memory, from where they come into device memory as requests ask; default: as "
        "many as there.",
        json_schema_extra={SINCE: "0.2.0"},
    )
    lora_targets: tuple[TextLinear, ...] = Field(
        default=DEFAULT_TARGETS,
        min_length=1,
        description=f"Linear layers that adapters may change: {', '.join(ADAPTABLE)}; default: all but experts.",
        json_schema_extra={SINCE: "0.2.0"},
    )
    images_per_request: int = Field(
        default=0,
        ge=0,
        le=MOST_PER_REQUEST,
        description="Images of one request at most; 0: none are taken, and what embeds them is not loaded.",
        json_schema_extra={SINCE: "0.2.0"},
    )
    max_soft_tokens: int = Field(
        default=DEFAULT_BUDGET,
        description=f"Most rows of a prompt that one image becomes: {', '.join(map(str, BUDGETS))}.",
        json_schema_extra={SINCE: "0.2.0"},
    )
    image_urls: list[str] | None = Field(
        default=None,
        description="Hosts that images are fetched from, images.example.com or *.example.com, by https, or behind "
        "http:// without; left out: none, and images are sent as data: URLs.",
        json_schema_extra={SINCE: "0.2.0"},
    )
    audio_per_request: int = Field(
        default=0,
        ge=0,
        le=MOST_SOUNDS,
        description="Sounds of one request at most; 0: none are taken, and what embeds them is not loaded.",
        json_schema_extra={SINCE: "0.2.0"},
    )
    audio_seconds: int = Field(
        default=DEFAULT_SECONDS,
        ge=1,
        le=MOST_SECONDS,
        description="Most seconds of one sound; models with an encoder hear 30.",
        json_schema_extra={SINCE: "0.2.0"},
    )
    measure_cache_quality: bool = Field(
        default=False,
        description="Once, while nobody asks for anything, measure what an int8 cache would cost these weights beside "
        "the 16-bit one, and say so on /v1/plan.",
        json_schema_extra={SINCE: "0.2.0"},
    )
    debug_kv_stamps: bool = Field(default=False, description="Stamp every cache row and check every read (slow).")
    seed: int = Field(default=0, ge=0)
    shutdown_delay_seconds: int = Field(
        default=0, ge=0, le=600, description="After SIGTERM: seconds in which new connections are still accepted."
    )
    drain_seconds: int = Field(default=60, ge=0, le=3600, description="After that: seconds given to open requests.")

    @field_validator("served_model_name", mode="after")
    @classmethod
    def _names(cls, value: str | list[str] | None) -> str | list[str] | None:
        names = [value] if isinstance(value, str) else value
        if names is not None and (not names or not all(names) or len(set(names)) < len(names)):
            raise ValueError("names must not be missing, empty or the same twice")
        return value

    @field_validator("drafter", mode="after")
    @classmethod
    def _directories(cls, value: str | list[str] | None) -> str | list[str] | None:
        """One is written as it always was."""
        directories = [value] if isinstance(value, str) else value
        if directories is None:
            return None
        if not directories or not all(directories) or len(set(directories)) < len(directories):
            raise ValueError("directories must not be missing, empty or the same twice")
        if len(directories) > MOST_DRAFTERS:
            raise ValueError(f"{len(directories)} drafters; {MOST_DRAFTERS} are served: an assistant and one of blocks")
        return directories[0] if len(directories) == 1 else directories

    @field_validator("num_speculative_tokens", mode="after")
    @classmethod
    def _one_choice(cls, value: int | str, info: ValidationInfo) -> int | str:
        """A number has all that is proposed verified, which leaves no choice between drafters."""
        if value != "auto" and isinstance(info.data.get("drafter"), list):
            raise ValueError("a number is of one drafter, all of whose drafts are verified: take auto, or one drafter")
        return value

    @field_validator("max_cpu_loras", mode="after")
    @classmethod
    def _holds_slots(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value < (slots := info.data.get("max_loras", 0)):
            raise ValueError(f"{value} adapters in host memory are fewer than the {slots} of max_loras beside them")
        return value

    @field_validator("max_soft_tokens", mode="after")
    @classmethod
    def _budget(cls, value: int) -> int:
        return trained_budget(value)

    @field_validator("image_urls", mode="after")
    @classmethod
    def _hosts(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and len(value) > MOST_HOSTS:
            raise ValueError(f"{len(value)} hosts; at most {MOST_HOSTS} are listed: take *.SUFFIX for several")
        url_hosts(value or [])
        return value

    @field_validator("lora_targets", mode="after")
    @classmethod
    def _adaptable(cls, value: tuple[TextLinear, ...]) -> tuple[TextLinear, ...]:
        if unknown := [each.value for each in value if each not in ADAPTABLE]:
            raise ValueError(f"{', '.join(unknown)} cannot be adapted; {', '.join(ADAPTABLE)} can")
        return in_order(value)

    @property
    def adapters(self) -> AdapterLimits | None:
        """Room for adapters; None: there is none."""
        if not self.max_loras:
            return None
        return AdapterLimits(
            self.max_loras, self.max_cpu_loras or self.max_loras, self.max_lora_rank, self.lora_targets
        )

    @property
    def drafters(self) -> tuple[str, ...]:
        """Directories of the drafters."""
        named = self.drafter
        return () if named is None else (named,) if isinstance(named, str) else tuple(named)

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names in the API, the one in answers first; none when it is the directory's."""
        names = self.served_model_name
        return () if names is None else (names,) if isinstance(names, str) else tuple(names)

    @property
    def speculative(self) -> Speculation:
        """As sizing counts it, but for drafters: their geometry is in their directories."""
        if self.drafter is None and not self.prompt_lookup:
            return NO_DRAFTS
        most = AUTO_DRAFTS if self.num_speculative_tokens == "auto" else self.num_speculative_tokens
        return Speculation(most, prompt_lookup=self.prompt_lookup)

    def dialect(self, release: str) -> dict[str, Any]:
        """The document as a worker of `release` reads it: JSON without null, and without what later releases added."""
        return in_dialect(self.model_dump(mode="json", by_alias=True, exclude_none=True), release, model=type(self))


def in_dialect(document: Mapping[str, Any], release: str, *, model: type[EngineArgs] = EngineArgs) -> dict[str, Any]:
    """A document of any release as a worker of `release` reads it: without fields that it, or this release, lacks."""
    since = {str(each.alias): _since(each) for each in model.model_fields.values()}
    return {key: value for key, value in document.items() if key in since and since[key] <= release_number(release)}


def _since(field: FieldInfo) -> tuple[int, ...]:
    extra = field.json_schema_extra
    return release_number(str(extra[SINCE])) if isinstance(extra, dict) and SINCE in extra else ()
