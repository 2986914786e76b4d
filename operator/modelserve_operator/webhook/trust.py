"""Keeps the webhook's certificate in a Secret that its replicas share, and the API server trusting it.

A new certificate is trusted before it is shown: it gets into the Secret and the bundle first, and is served one round
later. Writes name the resourceVersion that they are made from, so that of two replicas one wins, and the other takes
over what that one made.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from modelserve_operator.cluster.kinds import SECRET, WEBHOOK_CONFIGURATION
from modelserve_operator.cluster.kube import Kube, KubeError
from modelserve_operator.webhook.certificates import Pair, bundle_with, new_pair, trusts

logger = logging.getLogger(__name__)

ROUND_SECONDS = 60.0
SOON_SECONDS = 5.0  # until what the API server was told just now is surely known to all of it
CERTIFICATE, KEY, BUNDLE = "tls.crt", "tls.key", "ca.crt"


@dataclass(frozen=True)
class Kept:
    """Content of the Secret."""

    pair: Pair
    bundle: bytes


class Trust:
    """`serve` is called with each pair that is to be shown from then on."""

    def __init__(
        self,
        kube: Kube,
        *,
        namespace: str,
        secret: str,
        configuration: str,
        hosts: Sequence[str],
        serve: Callable[[Pair], None],
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._kube = kube
        self._namespace = namespace
        self._secret = secret
        self._configuration = configuration
        self._hosts = tuple(hosts)
        self._serve = serve
        self._clock = clock
        self._shown: Pair | None = None

    async def keep(self) -> None:
        """Rounds, for ever; one that fails is tried again."""
        while True:
            try:
                settled = await self.round()
            except KubeError as error:
                logger.warning("the certificate is not looked after: %s", error)
                settled = False
            await asyncio.sleep(ROUND_SECONDS if settled else SOON_SECONDS)

    async def round(self) -> bool:
        """One look at the Secret and the configuration. Whether the newest pair is shown. Raises KubeError."""
        kept = await self._kept()
        trusted = await self._trusted(kept.bundle)
        if kept.pair != self._shown and (self._shown is None or trusts(trusted, kept.pair.certificate)):
            self._serve(kept.pair)
            self._shown = kept.pair
            logger.info("serving the certificate of Secret %s/%s", self._namespace, self._secret)
        return kept.pair == self._shown

    async def _kept(self) -> Kept:
        """What the Secret holds, made anew where it is none that serves."""
        secret = await self._kube.get(SECRET, namespace=self._namespace, name=self._secret)
        if secret is None:
            raise KubeError(404, f"there is no Secret {self._namespace}/{self._secret}: the chart makes it, empty")
        now, data = self._clock(), secret.get("data") or {}
        held = Pair(_decoded(data, CERTIFICATE), _decoded(data, KEY))
        if held.serves(self._hosts, now):
            return Kept(held, _decoded(data, BUNDLE) or held.certificate)
        pair = new_pair(self._hosts, now)
        bundle = bundle_with(pair.certificate, _decoded(data, BUNDLE), now)
        made = {CERTIFICATE: pair.certificate, KEY: pair.key, BUNDLE: bundle}
        encoded = {key: base64.b64encode(value).decode() for key, value in made.items()}
        try:
            await self._kube.json_patch(
                SECRET,
                namespace=self._namespace,
                name=self._secret,
                operations=[_unchanged(secret), {"op": "add", "path": "/data", "value": encoded}],
            )
        except KubeError as error:
            if error.status not in (409, 422):
                raise
            return await self._kept()  # another replica was quicker
        logger.info("made a certificate for %s", ", ".join(self._hosts))
        return Kept(pair, bundle)

    async def _trusted(self, bundle: bytes) -> bytes:
        """Have the API server trust the bundle. Returns what it trusted before."""
        found = await self._kube.get(WEBHOOK_CONFIGURATION, namespace="", name=self._configuration)
        if found is None:
            raise KubeError(404, f"there is no ValidatingWebhookConfiguration {self._configuration}")
        wanted, hooks = base64.b64encode(bundle).decode(), found.get("webhooks") or []
        operations = [
            {"op": "add", "path": f"/webhooks/{place}/clientConfig/caBundle", "value": wanted}
            for place, hook in enumerate(hooks)
            if hook["clientConfig"].get("caBundle") != wanted
        ]
        if operations:
            await self._kube.json_patch(
                WEBHOOK_CONFIGURATION,
                namespace="",
                name=self._configuration,
                operations=[_unchanged(found), *operations],
            )
        return b"".join(_decoded(hook["clientConfig"], "caBundle") for hook in hooks[:1])


def _unchanged(body: dict[str, Any]) -> dict[str, Any]:
    return {"op": "test", "path": "/metadata/resourceVersion", "value": body["metadata"]["resourceVersion"]}


def _decoded(data: dict[str, Any], key: str) -> bytes:
    try:
        return base64.b64decode(data.get(key) or "", validate=True)
    except (binascii.Error, TypeError):
        return b""
