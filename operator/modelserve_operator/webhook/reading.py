"""What a preview reads of the cluster beside the inventory, at the moment of the request; I/O, but no writes.

Nothing is read by name alone: revisions and facts count where the object's own uid owns them, so that whoever asks has
to know it. The API server does not say who it is when it asks, so anybody might.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from modelserve.api import ModelServe
from modelserve.errors import InvalidInput
from modelserve.published import published_model
from modelserve_operator import labels, sources
from modelserve_operator.cluster.kinds import CONFIG_MAP, CONTROLLER_REVISION, MODEL_CACHE
from modelserve_operator.cluster.kube import Kube, KubeError
from modelserve_operator.gathering.claims import ClaimModes
from modelserve_operator.inventory.supply import Supply
from modelserve_operator.observed.snapshot import Observed
from modelserve_operator.planning.drafters import drafters_to_read
from modelserve_operator.revisions.history import owned_by, read_history
from modelserve_operator.webhook.review import Body


class Reader:
    """Puts together what the operator would observe of one object, as far as a decision about its plan needs it."""

    def __init__(
        self, kube: Kube, supply: Callable[[], Supply], *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._kube = kube
        self._supply = supply
        self._clock = clock
        self._claims = ClaimModes(kube, clock)

    async def observe(self, *bodies: Body) -> tuple[Observed, ...]:
        """The states of one object, which share its revisions. Raises KubeError."""
        metadata = bodies[0]["metadata"]
        namespace, name, uid = metadata["namespace"], metadata["name"], metadata["uid"]
        revisions: list[dict[str, Any]] = []
        if uid and len(bodies) > 1:  # what is made just now has none
            async for page in self._kube.pages(CONTROLLER_REVISION, namespace=namespace, owner=name):
                revisions += [each for each in page if owned_by(each, uid)]
        supply = self._supply().seen_from(namespace)
        found = []
        for body in bodies:
            cache = await self._cache(body)
            modes = {claim: await self._claims.of(namespace, claim) for claim in sources.claims(body, cache)}
            found.append(
                Observed(
                    model_serve=body,
                    history=read_history(body, revisions, {}),
                    config_maps=await self._facts(body, cache),
                    model_cache=cache,
                    supply=supply,
                    claim_modes=modes,
                    now=self._clock(),
                )
            )
        return tuple(found)

    async def _cache(self, body: Body) -> Body | None:
        """The ModelCache that it names; none where the installation keeps none."""
        name = sources.cache_named(body)
        if name is None:
            return None
        try:
            return await self._kube.get(MODEL_CACHE, namespace=body["metadata"]["namespace"], name=name)
        except KubeError as error:
            if error.status != 403:
                raise
            return None

    async def _facts(self, body: Body, cache: Body | None) -> tuple[Body, ...]:
        """What inspections found of a model and of drafters that no release ships the facts of."""
        metadata = body["metadata"]
        try:
            spec = ModelServe.parse_of_any_release(body)[0].spec
        except InvalidInput:
            return ()
        held = sources.cached_model(cache) if cache is not None else None
        if held is not None and held.commit is not None:
            spec = spec.model_copy(update={"model": spec.model.model_copy(update={"revision": held.commit})})
        model = sources.model_source(spec, held)
        unknown = (None if published_model(model.uri) is not None else model, *drafters_to_read(spec))
        found = []
        for source in filter(None, unknown if metadata["uid"] else ()):
            name = labels.model_facts_name(metadata["name"], source.hash)
            stored = await self._kube.get(CONFIG_MAP, namespace=metadata["namespace"], name=name)
            if stored is not None and owned_by(stored, metadata["uid"]):
                found.append(stored)
        return tuple(found)
