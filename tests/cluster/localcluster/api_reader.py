"""What kubectl's `get` reads, over a connection that is kept: a kubectl that starts for each look of a test that waits
takes a quarter of a core from what it waits for.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import yaml

Body = dict[str, Any]
_PATHS = {  # of what tests look at again and again, by its name in a command
    "modelserve": "/apis/serving.modelserve.dev/v1alpha1/{}/modelserves",
    "modelcache": "/apis/serving.modelserve.dev/v1alpha1/{}/modelcaches",
    "modeladapter": "/apis/serving.modelserve.dev/v1alpha1/{}/modeladapters",
    "pod": "/api/v1/{}/pods",
    "service": "/api/v1/{}/services",
    "configmap": "/api/v1/{}/configmaps",
    "deployment": "/apis/apps/v1/{}/deployments",
    "replicaset": "/apis/apps/v1/{}/replicasets",
    "job": "/apis/batch/v1/{}/jobs",
    "endpointslice": "/apis/discovery.k8s.io/v1/{}/endpointslices",
    "poddisruptionbudget": "/apis/policy/v1/{}/poddisruptionbudgets",
}
_TIMEOUT_S = 120.0


class ReadFailed(Exception):
    """The API server did not answer, or not with an object; the text says what it answered."""


class ApiReader:
    """Of one kubeconfig with a client's certificate in it. For any thread."""

    def __init__(self, kubeconfig: Path) -> None:
        """Raises KeyError where the user is known otherwise."""
        document = yaml.safe_load(kubeconfig.read_text())
        (cluster,), (user,) = ([each[kind] for each in document[f"{kind}s"]] for kind in ("cluster", "user"))
        authority, certificate, key = (
            base64.b64decode(each)
            for each in (
                cluster["certificate-authority-data"],
                user["client-certificate-data"],
                user["client-key-data"],
            )
        )
        self._context = ssl.create_default_context(cadata=authority.decode())
        with tempfile.NamedTemporaryFile() as both:
            both.write(certificate + b"\n" + key)
            both.flush()
            self._context.load_cert_chain(both.name)
        self._address = urlsplit(cluster["server"])
        self._connection: http.client.HTTPSConnection | None = None
        self._lock = threading.Lock()

    def get(self, path: str) -> Body:
        """Raises ReadFailed."""
        with self._lock:
            status, text = self._answer(path)
        if status != http.client.OK:
            raise ReadFailed(f"{path}: {status} {text.decode(errors='replace')[:1000]}")
        body: Body = json.loads(text)
        return body

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _answer(self, path: str) -> tuple[int, bytes]:
        for kept in (self._connection is not None, False):  # one that was kept may have been ended
            try:
                connection = self._opened()
                connection.request("GET", path, headers={"Accept": "application/json"})
                answer = connection.getresponse()
                return answer.status, answer.read()
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if not kept:
                    raise ReadFailed(f"{path}: {type(error).__name__}: {error}") from error
        raise AssertionError("the second attempt returns or raises")

    def _opened(self) -> http.client.HTTPSConnection:
        if self._connection is None:
            host, port = self._address.hostname, self._address.port
            assert host is not None
            self._connection = http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=self._context)
        return self._connection


_readers: dict[Path, tuple[int, ApiReader | None]] = {}
"""By kubeconfig: when it was written, and None where only kubectl knows how to use it."""


def reader_of(kubeconfig: Path) -> ApiReader | None:
    """The one reader of a kubeconfig as it is now: a cluster that is started again has other certificates."""
    written = kubeconfig.stat().st_mtime_ns
    known, reader = _readers.get(kubeconfig, (0, None))
    if known == written:
        return reader
    if reader is not None:
        reader.close()
    try:
        reader = ApiReader(kubeconfig)
    except (KeyError, ValueError):
        reader = None
    _readers[kubeconfig] = written, reader
    return reader


def paths(arguments: Sequence[str], namespace: str | None) -> list[str] | None:
    """What `kubectl get` with these arguments reads: an object, or a list of each kind. None: kubectl alone knows."""
    kinds, names, query = "", list[str](), dict[str, str]()
    given = iter(arguments)
    for word in given:
        if word in ("-l", "-n"):
            value = next(given)
            if word == "-l":
                query["labelSelector"] = value
            else:
                namespace = value
        elif word.startswith("-"):
            return None
        elif not kinds:
            kinds = word
        else:
            names.append(word)
    known = [_PATHS.get(kind) or _PATHS.get(kind.removesuffix("s")) for kind in kinds.split(",")]
    if namespace is None or None in known or len(names) > 1 or (names and (query or len(known) > 1)):
        return None
    beneath = f"namespaces/{namespace}"
    ending = f"/{names[0]}" if names else f"?{urlencode(query)}" if query else ""
    return [each.format(beneath) + ending for each in known if each is not None]


def as_kubectl(bodies: Sequence[Body]) -> Body:
    """The one object, or what lists hold, each with what a list does not repeat of it; who wrote which field is left
    out, as there."""
    (first, *_), objects = bodies, [body for body in bodies if "items" not in body]
    for body in bodies:
        kind = {"apiVersion": body["apiVersion"], "kind": body["kind"].removesuffix("List")}
        objects += [kind | each for each in body.get("items", ())]
    for each in objects:
        each["metadata"].pop("managedFields", None)
    return first if "items" not in first else {"apiVersion": "v1", "kind": "List", "items": objects}
