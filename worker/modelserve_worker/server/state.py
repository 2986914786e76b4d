"""The state of the server: loading, ready or draining. The composition root writes it, the routes read it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple, Protocol

from modelserve_worker.engine_client import EngineClient
from modelserve_worker.media.audio_reader import AudioReader, DecodedSound
from modelserve_worker.media.fetching.image_fetcher import ImageFetcher
from modelserve_worker.media.image_reader import ImageReader
from modelserve_worker.server.errors.errors import ApiError, unavailable
from modelserve_worker.server.media_metrics import MediaMetrics
from modelserve_worker.text.checkpoint_text import CheckpointText

_SHOWN_ADAPTERS = 8  # in an error


class Phase(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # SIGTERM came: every request is answered, and its connection ends


@dataclass(frozen=True)
class ServedModel:
    """The model under its public names. `vocab_size` counts the rows of the embedding, padding included.

    Answers and metrics have `name`; a request may use any of `aliases` instead. `tenant`: for whose requests it is, who
    find nothing that those of others left. `adapter`: the digest of the adapter that `name` is; empty: the model.
    `images` and `audio` read those of requests; None: it takes none.
    """

    name: str
    text: CheckpointText
    vocab_size: int
    aliases: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))
    tenant: str = ""
    adapter: str = ""
    images: ImageReader | None = None
    audio: AudioReader | None = None
    image_metrics: MediaMetrics | None = None  # where it takes any
    audio_metrics: MediaMetrics | None = None
    fetched: Mapping[str, bytes] = field(default_factory=dict)  # images and sounds of the request, by their address
    heard: Mapping[bytes, DecodedSound] = field(default_factory=dict)  # its sounds that are decoded, by their key

    @property
    def fetcher(self) -> ImageFetcher | None:
        """Of what is named by address, sounds, too; None: nothing is fetched."""
        return None if self.images is None else self.images.fetcher

    @property
    def modalities(self) -> list[str]:
        seen, heard = ["image"] * (self.images is not None), ["audio"] * (self.audio is not None)
        return ["text", *seen, *heard]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


class ServedAdapter(NamedTuple):
    """An adapter that answers requests for `name`; it came from `uri`."""

    name: str
    uri: str


class AdapterUse(Protocol):
    """A request's use of an adapter, which stays until `end`. For any thread."""

    @property
    def name(self) -> str:
        """That it was asked for by."""
        ...

    @property
    def digest(self) -> str: ...

    def admitted(self) -> None:
        """The request has left the queue."""
        ...

    def end(self) -> None: ...


class AdapterSource(Protocol):
    """Adapters beside the model. For any thread."""

    def served(self) -> tuple[ServedAdapter, ...]: ...

    def take(self, name: str, session: str) -> AdapterUse | None:
        """Of the adapter `name`, or of its version `NAME@ID`; requests of one session get the same version.

        None where there is no such name; raises ApiError 503 where it does not answer yet.
        """
        ...


@dataclass
class ServerState:
    model: ServedModel
    phase: Phase = Phase.LOADING
    detail: str = "starting"  # how far loading is
    engine: EngineClient | None = None
    open_requests: int = 0
    adapters: AdapterSource | None = None
    last_call: asyncio.Event = field(default_factory=asyncio.Event)  # set when nothing new is accepted any more

    def mark_ready(self, engine: EngineClient) -> None:
        self.engine, self.phase, self.detail = engine, Phase.READY, "ready"

    def start_draining(self) -> None:
        self.phase, self.detail = Phase.DRAINING, "draining"

    def request_opened(self) -> None:
        self.open_requests += 1

    def request_closed(self) -> None:
        self.open_requests -= 1

    def alive(self) -> bool:
        """False once the process can only be replaced."""
        return self.engine is None or self.engine.is_alive()

    def ready(self) -> bool:
        return self.phase is Phase.READY and self.alive()

    def serving_engine(self) -> EngineClient:
        """The engine, for a request that was admitted. Raises ApiError 503 when it is not there or has stopped."""
        if self.engine is None:
            raise unavailable(f"the model {self.model.name!r} is {self.phase.value} ({self.detail}); try again later")
        if not self.engine.is_alive():
            raise unavailable("the engine has stopped; this replica is about to be replaced")
        return self.engine

    @property
    def served_adapters(self) -> tuple[ServedAdapter, ...]:
        return () if self.adapters is None else self.adapters.served()

    def require_model(
        self, name: str, *, tenant: str = "", session: str = "", keep: Callable[[AdapterUse], None] | None = None
    ) -> ServedModel:
        """The model for a request of `tenant`, or the adapter of that name, whose use `keep` gets to end.

        Raises ApiError 404 for a name that is not served.
        """
        if name in self.model.names:
            return replace(self.model, tenant=tenant)
        use = None if self.adapters is None else self.adapters.take(name, session)
        if use is None:
            adapters = [each.name for each in self.served_adapters]
            served = ", ".join(map(repr, [*self.model.names, *adapters[:_SHOWN_ADAPTERS]]))
            more = f" and {len(adapters) - _SHOWN_ADAPTERS} more" if len(adapters) > _SHOWN_ADAPTERS else ""
            raise ApiError(
                f"the model {name!r} does not exist; this server serves {served}{more}",
                status=404, param="model", code="model_not_found",
            )  # fmt: skip
        if keep is None:
            use.end()
        else:
            keep(use)
        return replace(self.model, name=use.name, aliases=(), tenant=tenant, adapter=use.digest)
