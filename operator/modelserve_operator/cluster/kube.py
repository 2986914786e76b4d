"""The one interface to the Kubernetes API, and its implementation over the asyncio half of the kubernetes client."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import aiohttp
from kubernetes.aio import client, config

from modelserve_operator import labels
from modelserve_operator.cluster.kinds import EVENT, POD, ResourceKind
from modelserve_operator.process import metrics

Body = Mapping[str, Any]

PAGE_SIZE = 200  # objects; a page is held whole, and parsing it keeps everything else waiting
READ_TIMEOUT_SECONDS = 60.0
WORKER_TIMEOUT_SECONDS = 5.0
KEY_HEADER = "X-Api-Key"  # not Authorization: the API server takes that for its own, and passes none on
NO_HEADERS: Mapping[str, str] = {}
_OF_WORKERS = frozenset({400, 401, 404, 405, 409, 413, 422})  # through the API server: 403 is its own


class KubeError(Exception):
    """The API server (or the way to it) refused a request; `status` is the HTTP status, 0 when there was no answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}" if status else message)
        self.status = status


class WorkerUnreachableError(Exception):
    """A worker pod did not answer; it may well do so later."""


class WorkerRefusedError(Exception):
    """A worker answered that it will not; `status` is its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Kube(Protocol):
    """What gather and apply need of a cluster. Every call raises KubeError when the API server refuses it."""

    def pages(
        self, kind: ResourceKind, *, namespace: str | None = None, owner: str | None = None
    ) -> AsyncIterator[list[dict[str, Any]]]:
        """All objects of a kind, in one namespace or in all; of owned kinds only those that carry our labels, or those
        of one ModelServe, the `owner`.
        """

    async def get(self, kind: ResourceKind, *, namespace: str, name: str) -> dict[str, Any] | None:
        """One object, or None."""

    async def apply(self, kind: ResourceKind, body: Body) -> dict[str, Any]:
        """Server-side apply as field manager `modelserve`, with force; returns the stored object."""

    async def json_patch(
        self,
        kind: ResourceKind,
        *,
        namespace: str,
        name: str,
        operations: Sequence[Body],
        subresource: str | None = None,
    ) -> dict[str, Any]:
        """RFC 6902 patch; returns the stored object. A `test` that fails is KubeError 422."""

    async def create(self, kind: ResourceKind, body: Body) -> None:
        """POST, for Events only: everything else is applied."""

    async def delete(self, kind: ResourceKind, *, namespace: str, name: str, uid: str) -> None:
        """Delete in the background if the object still has this uid; one that is gone is fine."""

    def unplaced_pods(self, *, namespace: str | None = None) -> AsyncIterator[list[dict[str, Any]]]:
        """Pods of anybody that have no node yet, in one namespace or in all."""

    async def events_about(self, *, namespace: str, uid: str) -> list[dict[str, Any]]:
        """Events that involve one object, in no order; Kubernetes keeps them for an hour."""

    async def read_worker(self, pod: Body, path: str) -> dict[str, Any]:
        """GET `path` from a worker pod's http port. Raises WorkerUnreachableError."""

    async def manage_worker(self, pod: Body, path: str, *, key: str, body: Body | None = None) -> dict[str, Any]:
        """GET `path` from a worker pod's http port, or PUT `body` there, with the operator's key for it.

        Raises WorkerUnreachableError, and WorkerRefusedError for an HTTP status of 400 to 499.
        """


class ClusterKube:
    """Kube over HTTP. Use as an asynchronous context manager.

    Without a `kubeconfig` the cluster is the one that the operator runs in, or else kubectl's current one.
    """

    def __init__(self, *, through_api_proxy: bool, kubeconfig: Path | None = None) -> None:
        self._through_api_proxy = through_api_proxy
        self._kubeconfig = kubeconfig
        self._client: client.ApiClient
        self._workers: aiohttp.ClientSession

    async def __aenter__(self) -> ClusterKube:
        configuration = client.Configuration()
        if not self._kubeconfig and "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            file = self._kubeconfig and str(self._kubeconfig)
            await config.load_kube_config(file, client_configuration=configuration)  # type: ignore[no-untyped-call]
        self._client = client.ApiClient(configuration)
        self._client.user_agent = "modelserve-operator"
        self._workers = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WORKER_TIMEOUT_SECONDS))
        return self

    @property
    def leases(self) -> client.CoordinationV1Api:
        """For the library's leader election."""
        return client.CoordinationV1Api(self._client)

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]
        await self._workers.close()

    async def pages(
        self, kind: ResourceKind, *, namespace: str | None = None, owner: str | None = None
    ) -> AsyncIterator[list[dict[str, Any]]]:
        wanted = labels.WATCH_SELECTOR if owner is None else f"{labels.WATCH_SELECTOR},{labels.NAME}={owner}"
        selector = [("labelSelector", wanted)] if kind.owned else []
        async for page in self._pages(kind, namespace, selector):
            yield page

    async def _pages(
        self, kind: ResourceKind, namespace: str | None, selector: Sequence[tuple[str, str]]
    ) -> AsyncIterator[list[dict[str, Any]]]:
        query, token = [("limit", str(PAGE_SIZE)), *selector], ""
        while True:
            page = await self._request("GET", kind, kind.path(namespace), query=[*query, ("continue", token)])
            yield page.get("items") or []
            token = page["metadata"].get("continue") or ""
            if not token:
                return

    async def unplaced_pods(self, *, namespace: str | None = None) -> AsyncIterator[list[dict[str, Any]]]:
        async for page in self._pages(POD, namespace, [("fieldSelector", "spec.nodeName=,status.phase=Pending")]):
            yield page

    async def get(self, kind: ResourceKind, *, namespace: str, name: str) -> dict[str, Any] | None:
        try:
            return await self._request("GET", kind, kind.path(namespace, name))
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    async def apply(self, kind: ResourceKind, body: Body) -> dict[str, Any]:
        metadata = body["metadata"]
        return await self._request(
            "PATCH",
            kind,
            kind.path(metadata.get("namespace"), metadata["name"]),
            query=[("fieldManager", labels.FIELD_MANAGER), ("force", "true")],
            body={"apiVersion": kind.api_version, "kind": kind.kind, **body},
            content_type="application/apply-patch+yaml",
        )

    async def json_patch(
        self,
        kind: ResourceKind,
        *,
        namespace: str,
        name: str,
        operations: Sequence[Body],
        subresource: str | None = None,
    ) -> dict[str, Any]:
        return await self._request(
            "PATCH",
            kind,
            kind.path(namespace, name, subresource=subresource),
            query=[("fieldManager", labels.FIELD_MANAGER)],
            body=list(operations),
            content_type="application/json-patch+json",
        )

    async def create(self, kind: ResourceKind, body: Body) -> None:
        document = {"apiVersion": kind.api_version, "kind": kind.kind, **body}
        await self._request("POST", kind, kind.path(body["metadata"]["namespace"]), body=document)

    async def delete(self, kind: ResourceKind, *, namespace: str, name: str, uid: str) -> None:
        options = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            await self._request("DELETE", kind, kind.path(namespace, name), body=options)
        except KubeError as error:
            if error.status not in (404, 409):  # 409: a namesake with another uid, so ours is gone
                raise

    async def events_about(self, *, namespace: str, uid: str) -> list[dict[str, Any]]:
        query = [("fieldSelector", f"involvedObject.uid={uid}"), ("limit", str(PAGE_SIZE))]
        page = await self._request("GET", EVENT, EVENT.path(namespace), query=query)
        return page.get("items") or []

    async def read_worker(self, pod: Body, path: str) -> dict[str, Any]:
        try:
            return await self._of_worker(pod, path, headers={}, body=None)
        except WorkerRefusedError as error:
            raise WorkerUnreachableError(f"{pod['metadata']['name']}{path}: {error.status}: {error}") from error

    async def manage_worker(self, pod: Body, path: str, *, key: str, body: Body | None = None) -> dict[str, Any]:
        return await self._of_worker(pod, path, headers={KEY_HEADER: key}, body=body)

    async def _of_worker(
        self, pod: Body, path: str, *, headers: Mapping[str, str], body: Body | None
    ) -> dict[str, Any]:
        metadata, port = pod["metadata"], 8000
        method = "GET" if body is None else "PUT"
        try:
            if self._through_api_proxy:
                name = f"{metadata['name']}:{port}"
                proxy = POD.path(metadata["namespace"], name, subresource="proxy")
                return await self._request(method, POD, proxy + path, body=body, headers=headers)
            url = f"http://{pod['status']['podIP']}:{port}{path}"
            async with self._workers.request(method, url, headers=headers, json=body) as response:
                if 400 <= response.status < 500:
                    raise WorkerRefusedError(response.status, _status_message(await response.read()))
                response.raise_for_status()
                document: dict[str, Any] = await response.json()
                return document
        except (KubeError, aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            if isinstance(error, KubeError) and error.status in _OF_WORKERS:
                raise WorkerRefusedError(error.status, str(error)) from error
            raise WorkerUnreachableError(f"{metadata['name']}{path}: {error!r}") from error

    async def _request(
        self,
        method: str,
        kind: ResourceKind,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: Body | Sequence[Body] | None = None,
        content_type: str = "application/json",
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> dict[str, Any]:
        metrics.API_REQUESTS.labels(method, kind.kind).inc()
        every = {"Accept": "application/json", "Content-Type": content_type, **headers}
        parameters = [(key, value) for key, value in query if value]
        request = await self._client.param_serialize(
            method, path, query_params=parameters, header_params=every, auth_settings=["BearerToken"]
        )
        method, url, every, _, _ = request
        try:  # the body is JSON already: the client would look at every value of a status for objects of its own
            response = await self._client.call_api(method, url, every, body, _request_timeout=READ_TIMEOUT_SECONDS)
            text: bytes = await response.read()  # type: ignore[no-untyped-call]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise KubeError(0, f"{method} {path}: no answer from the API server: {error!r}") from error
        if response.status >= 400:
            raise KubeError(response.status, f"{method} {path}: {_status_message(text)}")
        answer: dict[str, Any] = json.loads(text)
        return answer


def _status_message(text: bytes) -> str:
    """The message of a metav1.Status or of an error in OpenAI's shape, else the first 300 characters of the answer."""
    try:
        document = json.loads(text)
        return str((document.get("error") or document)["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return text[:300].decode(errors="replace")
