"""The set of adapters that a server is to serve, as PUT /v1/adapters and a mounted file have it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from pydantic import ConfigDict, Field, field_validator

from modelserve.model.adapters.addresses import BUCKET_ADDRESS, HUB_ADDRESS, MOST_NAME, SERVED_NAME
from modelserve_worker.server.bodies.request_model import RequestModel
from modelserve_worker.server.errors.errors import ApiError

MOST_BYTES = 8 << 20  # of a set: a thousand versions of the longest names, addresses and tokens
URI = rf"^({HUB_ADDRESS}|{BUCKET_ADDRESS}|/[^\x00]*)$"
AdapterName = Annotated[str, Field(min_length=1, max_length=MOST_NAME, pattern=SERVED_NAME)]


class _Part(RequestModel):
    """What a later release adds is not looked at."""

    model_config = ConfigDict(extra="ignore")


class DesiredVersion(_Part):
    """One version. `uri`: hf://OWNER/NAME[/FOLDER], or the path of a directory; `weight`: its share of requests for
    the name, in percent."""

    id: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]
    uri: Annotated[str, Field(max_length=1024, pattern=URI)]
    revision: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    token: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(default=None, repr=False)
    weight: int = Field(default=100, ge=0, le=100)
    pin: bool = False

    @field_validator("uri", mode="after")
    @classmethod
    def _no_way_up(cls, value: str) -> str:
        if ".." in value.split("/"):
            raise ValueError("an address has no '..' in it")
        return value

    def same_files(self, other: DesiredVersion) -> bool:
        return (self.uri, self.revision) == (other.uri, other.revision)


class DesiredAdapter(_Part):
    """A name, and its versions."""

    name: AdapterName
    versions: list[DesiredVersion] = Field(min_length=1, max_length=16)


class DesiredSet(_Part):
    """The whole set: what is not in it is let go."""

    adapters: list[DesiredAdapter] = Field(max_length=1024)

    def check(self, *, taken: Collection[str], most: int) -> None:
        """Raise ApiError 400 for a name that is among `taken`, what is there twice, and more than `most` versions."""
        names: set[str] = set()
        count = 0
        for each in self.adapters:
            if each.name in taken:
                raise _refused(f"the name {each.name!r} is served already by this server: choose another one")
            if each.name in names:
                raise _refused(f"the adapter {each.name!r} is there twice: give it all its versions once")
            ids = [version.id for version in each.versions]
            if len(set(ids)) < len(ids):
                raise _refused(f"two versions of {each.name!r} have one id: ids tell them apart")
            names.add(each.name)
            count += len(ids)
        if count > most:
            raise _refused(
                f"{count} versions of adapters are asked for and there is room for {most}: ask for fewer, or start "
                "the server with more (--max-cpu-loras)"
            )


def _refused(message: str) -> ApiError:
    return ApiError(message, param="adapters", code="invalid_value")


class LoadAdapter(RequestModel):
    """POST /v1/load_lora_adapter, as vLLM has it."""

    lora_name: AdapterName
    lora_path: Annotated[str, Field(min_length=1, max_length=1024)]


class UnloadAdapter(RequestModel):
    """POST /v1/unload_lora_adapter, as vLLM has it."""

    lora_name: AdapterName
