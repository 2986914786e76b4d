"""The CustomResourceDefinition, generated from the pydantic models: `python -m modelserve.crd [DIRECTORY]`.

pydantic emits JSON Schema 2020-12; the API server takes a structural subset of OpenAPI 3.0. The differences are
rewritten here: references are inlined, optional fields lose their null alternative, maps state their value type only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from modelserve import __version__
from modelserve.api import CATEGORIES, GROUP, KIND, PLURAL, SHORT_NAMES, SINGULAR, VERSION
from modelserve.api.model_adapter import (
    ADAPTER_KIND,
    ADAPTER_NAME_PATTERN,
    ADAPTER_PLURAL,
    ADAPTER_SHORT_NAMES,
    ADAPTER_SINGULAR,
    MAX_ADAPTER_NAME_LENGTH,
    ModelAdapterSpec,
    ModelAdapterStatus,
)
from modelserve.api.schema_types import MAX_NAME_LENGTH, NAME_PATTERN, UNOBSERVED, ApiModel
from modelserve.api.spec import ModelServeSpec
from modelserve.api.status import ModelServeStatus
from modelserve.caches.model_cache import (
    CACHE_KIND,
    CACHE_NAME_PATTERN,
    CACHE_PLURAL,
    CACHE_SHORT_NAMES,
    CACHE_SINGULAR,
    MAX_CACHE_NAME_LENGTH,
    ModelCacheSpec,
    ModelCacheStatus,
)

RELEASE_ANNOTATION = f"{GROUP}/release"  # whose definition it is: an older release leaves a newer one's alone
_HEADER = "# Generated from operator/modelserve/api by `make crds`; edit the models, not this file.\n"
Column = tuple[str, str, str, int, str]
_READY = '.status.conditions[?(@.type=="Ready")]'
_COLUMNS: tuple[Column, ...] = (  # name, type, JSONPath, priority (1 = only with -o wide), description
    ("Model", "string", ".spec.model.uri", 0, "The checkpoint."),
    ("GPU", "string", ".status.plan.accelerator", 0, "Accelerator product of the plan."),
    ("TP", "integer", ".status.plan.tensorParallel", 0, "GPUs of one replica."),
    ("MaxLen", "integer", ".status.maxModelLen", 0, "Most tokens of one request, over the ready workers."),
    ("KV", "string", ".status.plan.kvCache.dtype", 0, "Storage type of the key/value cache."),
    ("Pods", "integer", ".status.readyReplicas", 0, "Pods that take requests."),
    ("Ready", "string", f"{_READY}.status", 0, "The plan of this generation is fully rolled out."),
    ("Reason", "string", f"{_READY}.reason", 0, "Why it is ready or not."),
    ("Age", "date", ".metadata.creationTimestamp", 0, "Time since creation."),
    ("Desired", "integer", ".spec.replicas", 1, "Pods wanted."),
    ("Plan", "string", ".status.plan.hash", 1, "The plan."),
    ("Layout", "string", ".status.plan.kvCache.layout", 1, "Row layout of the key/value cache."),
    ("URL", "string", ".status.url", 1, "Base address of the OpenAI API."),
    ("Waits", "string", ".status.waits", 1, "What of a proposal is another one: the Plan, or the Worker alone."),
)
_ADAPTER_COLUMNS: tuple[Column, ...] = (
    ("Model", "string", ".spec.modelRef.name", 0, "The ModelServe that serves it."),
    ("Served", "string", ".status.servedName", 0, "Its name in requests."),
    ("Rank", "integer", ".status.rank", 0, "Largest rank in its files."),
    ("Workers", "string", ".status.readyOn", 0, "Workers that serve the version of the spec, of how many."),
    ("Ready", "string", f"{_READY}.status", 0, "The version of the spec is served on all workers."),
    ("Reason", "string", f"{_READY}.reason", 0, "Why it is ready or not."),
    ("Age", "date", ".metadata.creationTimestamp", 0, "Time since creation."),
    ("URI", "string", ".spec.uri", 1, "Where its files are."),
    ("Active", "string", ".status.activeVersion.id", 1, "The version that serves."),
    ("Next", "string", ".status.nextVersion.id", 1, "The version that is to take over."),
    ("KL", "string", ".status.probe.kl", 1, "How far its answers are from the base's, in nats."),
)
_CACHE_COLUMNS: tuple[Column, ...] = (
    ("Model", "string", ".spec.uri", 0, "The checkpoint."),
    ("There", "string", ".status.progress", 0, "What of it is on the volume."),
    ("Used", "integer", ".status.users", 0, "ModelServes that name it, or whose pods read it."),
    ("Ready", "string", f"{_READY}.status", 0, "ModelServes can read it."),
    ("Reason", "string", f"{_READY}.reason", 0, "Why it is ready or not."),
    ("Age", "date", ".metadata.creationTimestamp", 0, "Time since creation."),
    ("Revision", "string", ".spec.revision", 1, "What was asked for."),
    ("Commit", "string", ".status.filled.commit", 1, "What that stood for."),
    ("Claim", "string", ".status.claimName", 1, "The claim that pods mount."),
    ("Left", "integer", ".status.fetch.secondsLeft", 1, "Seconds that a download still takes."),
)


class Definition(NamedTuple):
    """One kind of ours, and what its definition is made from."""

    kind: str
    plural: str
    singular: str
    short_names: tuple[str, ...]
    description: str
    columns: tuple[Column, ...]
    spec: type[ApiModel]
    status: type[ApiModel]
    name: tuple[int, str]  # most characters of metadata.name, and its pattern
    scales: bool = False

    @property
    def crd_name(self) -> str:
        """Name of the CustomResourceDefinition."""
        return f"{self.plural}.{GROUP}"

    @property
    def file_name(self) -> str:
        """Of its file in crds/."""
        return f"{GROUP}_{self.plural}.yaml"


MODEL_SERVES = Definition(
    kind=KIND,
    plural=PLURAL,
    singular=SINGULAR,
    short_names=SHORT_NAMES,
    description="A Gemma 4 model served from this cluster: spec says what, the operator works out how it fits.",
    columns=_COLUMNS,
    spec=ModelServeSpec,
    status=ModelServeStatus,
    name=(MAX_NAME_LENGTH, NAME_PATTERN),
    scales=True,
)
MODEL_ADAPTERS = Definition(
    kind=ADAPTER_KIND,
    plural=ADAPTER_PLURAL,
    singular=ADAPTER_SINGULAR,
    short_names=ADAPTER_SHORT_NAMES,
    description="A LoRA adapter that the workers of a ModelServe load beside what they serve.",
    columns=_ADAPTER_COLUMNS,
    spec=ModelAdapterSpec,
    status=ModelAdapterStatus,
    name=(MAX_ADAPTER_NAME_LENGTH, ADAPTER_NAME_PATTERN),
)
MODEL_CACHES = Definition(
    kind=CACHE_KIND,
    plural=CACHE_PLURAL,
    singular=CACHE_SINGULAR,
    short_names=CACHE_SHORT_NAMES,
    description="A model of the Hub on a volume, fetched once for all ModelServes that name it.",
    columns=_CACHE_COLUMNS,
    spec=ModelCacheSpec,
    status=ModelCacheStatus,
    name=(MAX_CACHE_NAME_LENGTH, CACHE_NAME_PATTERN),
)
DEFINITIONS = (MODEL_SERVES, MODEL_ADAPTERS, MODEL_CACHES)
CRD_NAME, FILE_NAME = MODEL_SERVES.crd_name, MODEL_SERVES.file_name


def custom_resource_definition(
    versions: tuple[str, ...] = (VERSION,), *, of: Definition = MODEL_SERVES
) -> dict[str, Any]:
    """The whole CRD as a JSON document. `versions`: those that are served, with one schema; the last is stored."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": of.crd_name, "annotations": {RELEASE_ANNOTATION: __version__}},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": of.kind,
                "listKind": f"{of.kind}List",
                "plural": of.plural,
                "singular": of.singular,
                "shortNames": list(of.short_names),
                "categories": list(CATEGORIES),
            },
            "versions": [_version(of, name, stored=name == versions[-1]) for name in versions],
        },
    }


def _version(of: Definition, name: str, *, stored: bool) -> dict[str, Any]:
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    return {
        "name": name,
        "served": True,
        "storage": stored,
        "additionalPrinterColumns": [_column(*column) for column in of.columns],
        "subresources": {"status": {}, **({"scale": scale} if of.scales else {})},
        "schema": {"openAPIV3Schema": _object_schema(of, name)},
    }


def crd_yaml(of: Definition = MODEL_SERVES) -> str:
    """The text of the CRD file."""
    document = json.loads(json.dumps(custom_resource_definition(of=of)))  # a shared object would become a YAML anchor
    return _HEADER + yaml.safe_dump(document, sort_keys=False, width=120)


def crds_yaml() -> str:
    """All of them, as `modelserve crd` prints them."""
    return "---\n".join(map(crd_yaml, DEFINITIONS))


def write_crds(directory: Path) -> Iterator[Path]:
    """Write the CRD files into `directory`, which is made when missing, and yield their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    for each in DEFINITIONS:
        path = directory / each.file_name
        path.write_text(crd_yaml(each))
        yield path


def _column(name: str, kind: str, path: str, priority: int, description: str) -> dict[str, Any]:
    return {"name": name, "type": kind, "jsonPath": path, "priority": priority, "description": description}


def _object_schema(of: Definition, version: str) -> dict[str, Any]:
    status = structural(of.status.model_json_schema(by_alias=True))
    # At both levels: a new object has no status at all, a partly written one has no conditions.
    unobserved = [UNOBSERVED.to_json()]
    status["default"] = {"conditions": unobserved}
    status["properties"]["conditions"]["default"] = unobserved
    longest, pattern = of.name
    return {
        "type": "object",
        "description": of.description,
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"{GROUP}/{version}"},
            "kind": {"type": "string", "description": of.kind},
            "metadata": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": longest, "pattern": pattern}},
            },
            "spec": structural(of.spec.model_json_schema(by_alias=True)),
            "status": status,
        },
    }


def structural(schema: dict[str, Any]) -> dict[str, Any]:
    """Rewrite a pydantic JSON schema into the structural form of apiextensions.k8s.io/v1."""
    return _structural(schema, schema.get("$defs", {}))


def _structural(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    node = dict(schema)
    for dropped in ("$defs", "title", "propertyNames"):
        node.pop(dropped, None)
    if node.get("additionalProperties") is False:  # a structural schema prunes or refuses unknown fields by itself
        del node["additionalProperties"]
    if "$ref" in node:
        target = definitions[node.pop("$ref").rsplit("/", 1)[1]]
        return _structural({**target, **node}, definitions)
    if "anyOf" in node:
        (value,) = (option for option in node.pop("anyOf") if option.get("type") != "null")
        return _structural({**value, **node}, definitions)
    if node.get("x-kubernetes-int-or-string"):
        del node["type"]
        node["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if "patternProperties" in node:
        (node["additionalProperties"],) = node.pop("patternProperties").values()
    if "const" in node:
        node["enum"] = [node.pop("const")]
    _default(node)
    if "properties" in node:
        node["properties"] = {name: _structural(child, definitions) for name, child in node["properties"].items()}
    for key in ("items", "additionalProperties"):
        if key in node:
            node[key] = _structural(node[key], definitions)
    return node


def _default(node: dict[str, Any]) -> None:
    """Keep real defaults: none for null or empty lists; {} for an object, whose own fields have theirs."""
    if "default" not in node:
        return
    if node["default"] in (None, []):
        del node["default"]
    elif isinstance(node["default"], dict):
        node["default"] = {}


def main() -> None:
    """Entry point of `python -m modelserve.crd [DIRECTORY]`; the directory defaults to `crds`."""
    print(*write_crds(Path(sys.argv[1] if len(sys.argv) > 1 else "crds")), sep="\n")


if __name__ == "__main__":
    main()
