"""The operator's key for each ModelServe's workers: who has it may say which adapters they serve.

All are derived from one secret of the operator's own namespace. Workers know only the digest of theirs, which is no
secret, so nothing of it has to be kept in the namespaces of tenants, and no right over their Secrets is needed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import secrets
from collections.abc import Mapping
from typing import Any

from modelserve_operator import labels
from modelserve_operator.cluster.kinds import SECRET
from modelserve_operator.cluster.kube import Kube, KubeError

logger = logging.getLogger(__name__)

DATA_KEY = "key"
_BYTES = 32


class ManagementKeys:
    """Reads the secret once, and makes it where there is none."""

    def __init__(self, kube: Kube, *, namespace: str, name: str) -> None:
        self._kube, self._namespace, self._name = kube, namespace, name
        self._root: bytes | None = None

    async def of(self, uid: str) -> str:
        """The key for workers of the ModelServe with this uid, 64 hex digits. Raises KubeError."""
        if self._root is None:
            self._root = await self._kept()
        return hmac.new(self._root, f"adapters:{uid}".encode(), hashlib.sha256).hexdigest()

    @staticmethod
    def digest(key: str) -> str:
        """What workers know of a key: its SHA-256."""
        return hashlib.sha256(key.encode()).hexdigest()

    async def _kept(self) -> bytes:
        """Of several operators one makes it, and the others take it over: writes name the state they are made from."""
        found = await self._kube.get(SECRET, namespace=self._namespace, name=self._name)
        root = _root(found)
        if root is not None:
            return root
        made = base64.b64encode(secrets.token_bytes(_BYTES)).decode()
        if found is None:
            metadata = {
                "name": self._name,
                "namespace": self._namespace,
                "labels": {labels.APP_NAME: "modelserve", labels.MANAGED_BY: labels.FIELD_MANAGER},
            }
            found = await self._kube.apply(SECRET, {"metadata": metadata, "type": "Opaque", "data": {DATA_KEY: made}})
        else:
            version = found["metadata"]["resourceVersion"]
            operations = [
                {"op": "test", "path": "/metadata/resourceVersion", "value": version},
                {"op": "add", "path": "/data", "value": {**(found.get("data") or {}), DATA_KEY: made}},
            ]
            try:
                found = await self._kube.json_patch(
                    SECRET, namespace=self._namespace, name=self._name, operations=operations
                )
            except KubeError as error:
                if error.status not in (409, 422):
                    raise
                found = await self._kube.get(SECRET, namespace=self._namespace, name=self._name)
        root = _root(found)
        if root is None:
            raise KubeError(0, f"Secret {self._namespace}/{self._name} does not keep the key {DATA_KEY}")
        logger.info("workers know the operator by Secret %s/%s", self._namespace, self._name)
        return root


def _root(secret: Mapping[str, Any] | None) -> bytes | None:
    """What the Secret keeps; None where that is none, or too short to be one."""
    try:
        found = base64.b64decode(((secret or {}).get("data") or {}).get(DATA_KEY) or "", validate=True)
    except (binascii.Error, TypeError, ValueError):
        return None
    return found if len(found) >= _BYTES else None
