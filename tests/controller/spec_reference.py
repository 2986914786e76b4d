"""docs/modelserve.md, modeladapter.md and modelcache.md: every field of the resources, from the models of their CRDs.

`python tests/controller/spec_reference.py` writes the pages; a test fails where it says something else. What an edit of
a field does is not written down anywhere: each field is edited, and the operator's own hashes of what plans and pods
are made from (`modelserve_operator.revisions.spec_inputs`) are compared before and after.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from modelserve.api import GROUP, SHORT_NAMES, VERSION
from modelserve.api.model_adapter import ADAPTER_SHORT_NAMES, ModelAdapterSpec, ModelAdapterStatus
from modelserve.api.schema_types import ApiModel
from modelserve.api.spec import ModelServeSpec
from modelserve.api.status import ModelServeStatus
from modelserve.caches.model_cache import CACHE_SHORT_NAMES, ModelCacheSpec, ModelCacheStatus
from modelserve.crd import structural
from modelserve_operator.revisions.spec_inputs import spec_inputs

PAGE = Path(__file__).parents[2] / "docs" / "modelserve.md"
ADAPTER_PAGE = PAGE.with_name("modeladapter.md")
CACHE_PAGE = PAGE.with_name("modelcache.md")
Schema = dict[str, Any]
FieldPath = tuple[str, ...]

_HEAD = f"""# ModelServe

Every field of the resource (`{GROUP}/{VERSION}`, short name `{SHORT_NAMES[0]}`), made from the models that its CRD
is made from and held to them by a test (`python tests/controller/spec_reference.py` writes this page); `kubectl
explain modelserve.spec --recursive` says the same of a cluster. A field that is left out is the operator's to choose,
or has the default that is named. Strings have 1 to the stated number of characters.

What *an edit* does: **plan**: a new plan is made, and new pods where it differs, as `plan.mode` allows; **pods**: the
same plan, new pods, one after the other as `rollout` says; **scales**: more or fewer of the same pods; **decides**:
which of the plans that are known runs, and when; **nothing**: objects beside the pods change, or how the operator
goes on. Of the last three no pod is made from anything else. [operations.md](operations.md) says what the conditions
tell meanwhile, [preview.md](preview.md) how to see it before an edit.
"""
_STATUS = "The operator's alone; `kubectl explain modelserve.status --recursive` shows the fields of objects in it.\n"

# Where the schema alone does not say what is valid: beside what a field may be set, and what it may be set to.
_ROUTED = {"gateway": {"parentRefs": [{"name": "public"}], "endpointPicker": {"name": "picker", "port": 9002}}}
_BESIDE: Mapping[str, Mapping[str, Any]] = {
    "model.imagePath": {"model": {"uri": "oci://registry.example/models/gemma"}},
    "model.authSecretRef.key": {"model": {"authSecretRef": {"name": "hub"}}},
    "drafter.revision": {"drafter": {"uri": "hf://google/gemma-4-31B-it-assistant"}},
    "drafter.numSpeculativeTokens": {"drafter": {"promptLookup": True}},
    **{f"adapters.{name}": {"adapters": {"max": 8}} for name in ("rank", "slots", "targets")},
    "apiKeySecretRef.key": {"apiKeySecretRef": {"name": "keys"}},
    "workload.turnTokens": {"workload": {"turns": 4}},
    "workload.sessions": {"workload": {"turns": 4}},
    "storage.subPath": {"storage": {"pvcName": "weights"}},
    "gateway.hostnames": {"gateway": {"parentRefs": [{"name": "public"}]}},
    **dict.fromkeys((f"gateway.endpointPicker.{name}" for name in ("name", "port", "failureMode")), _ROUTED),
    "capacityBuffer.limits": {"capacityBuffer": {"replicas": 1}},
    "capacityBuffer.provisioningStrategy": {"capacityBuffer": {"replicas": 1}},
    "kvCache.layout": {"kvCache": {"dtype": "bfloat16"}},
    "accelerators.costPerHour": {"accelerators": {"products": ["NVIDIA-H200"]}},
    **{f"modalities.image.{name}": {"modalities": {"image": {"perRequest": 1}}} for name in ("maxSoftTokens", "urls")},
    "modalities.audio.seconds": {"modalities": {"audio": {"perRequest": 1}}},
}
_VALUES: Mapping[str, Any] = {
    "model.uri": "hf://google/gemma-4-E4B-it",
    "drafter.uri": "hf://google/gemma-4-31B-it-assistant",
    "drafter.models": [{"kind": "MTP", "uri": "hf://google/gemma-4-31B-it-assistant"}],
    "workload.draftAcceptance": "0.6",
    "adapters.targets": ["qkv"],
    "modalities.image.urls": ["images.example.com"],
    "kvCache.gpuMemoryUtilization": "0.8",
    "kvCache.hostMemory": "16Gi",
    "accelerators.products": ["NVIDIA-L40S"],
    "accelerators.nodeSelector": {"pool": "gpu"},
    "accelerators.costPerHour": {"NVIDIA-H200": "4.10"},
    "plan.approvedHash": "0123456789",
    "plan.revision": "gemma-0123456789",
    "gateway.parentRefs": [{"name": "public"}],
    "gateway.hostnames": ["models.example"],
    "capacityBuffer.limits": {"nvidia.com/gpu": 4},
    "pod.labels": {"team": "search"},
    "pod.annotations": {"team": "search"},
    "pod.tolerations": [{"key": "gpu", "operator": "Exists"}],
    "pod.imagePullSecrets": [{"name": "registry"}],
    "pod.env": [{"name": "HF_ENDPOINT", "value": "https://hub.example"}],
    "pod.resources.requests": {"cpu": "4"},
    "pod.resources.limits": {"cpu": "8"},
}
_OTHERWISE: Mapping[str, str] = {"replicas": "scales", "plan": "decides"}  # of fields that neither is made from
_BASE: Mapping[str, Any] = {"model": {"uri": "hf://google/gemma-4-31B-it"}}


def leaves(schema: Schema, path: FieldPath = ()) -> Iterator[tuple[FieldPath, Schema, bool]]:
    """(path, schema, required) of every field that holds a value, a list or a map; objects are walked into."""
    for name, field in schema.get("properties", {}).items():
        if "properties" in field:
            yield from leaves(field, (*path, name))
        else:
            yield (*path, name), field, name in schema.get("required", ())


def spec_schema() -> Schema:
    return dict(structural(ModelServeSpec.model_json_schema(by_alias=True)))


def effect(path: FieldPath, field: Schema) -> str:
    """What an edit of the field does: `plan`, `pods`, or what `_OTHERWISE` says. Raises ValidationError where `_VALUES`
    lacks a valid value of the field."""
    name = ".".join(path)
    before = _merged(_BASE, _BESIDE.get(name, {}))
    after = copy.deepcopy(before)
    holder = after
    for part in path[:-1]:
        holder = holder.setdefault(part, {})
    holder[path[-1]] = _VALUES.get(name, _other(field))
    known, edited = (spec_inputs(ModelServeSpec.model_validate(each)) for each in (before, after))
    if known.plan != edited.plan:
        return "plan"
    return _OTHERWISE.get(path[0], "nothing") if known.pod == edited.pod else "pods"


def _other(field: Schema) -> Any:
    """A value of the field that is not its default."""
    if "enum" in field:
        return next(each for each in reversed(field["enum"]) if each != field.get("default"))
    if field.get("type") == "boolean":
        return not field.get("default", False)
    if field.get("type") == "integer":
        return min(field["maximum"], field.get("default", field["minimum"]) + 1)
    return "other"


def _merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(dict(base))
    for key, value in more.items():
        merged[key] = _merged(merged.get(key, {}), value) if isinstance(value, Mapping) else value
    return merged


def kind(field: Schema) -> str:
    """Type and bounds in a few words."""
    if "enum" in field:
        return " \\| ".join(f"`{each}`" for each in field["enum"])
    if field.get("x-kubernetes-int-or-string"):
        return "quantity"
    match field["type"]:
        case "integer":
            return f"integer {field['minimum']:,} to {field['maximum']:,}"
        case "string":
            return f"string, {field['maxLength']}"
        case "array":
            items = field["items"]
            inner = ", ".join(f"`{name}`" for name in items["properties"]) if "properties" in items else kind(items)
            return f"list of {inner if 'properties' not in items else '{' + inner + '}'}, at most {field['maxItems']}"
        case "object":
            return f"map of {kind(field['additionalProperties'])}, at most {field['maxProperties']}"
    return str(field["type"])


def page() -> str:
    lines = [_HEAD, "## spec"]
    group = None
    for path, field, required in leaves(spec_schema()):
        if (top := path[0]) != group:
            group, described = top, spec_schema()["properties"][top]
            lines += [f"\n### {top}\n"]
            if "properties" in described and "description" in described:
                lines += [described["description"] + "\n"]
            lines += ["| field | type | default | an edit | meaning |", "|---|---|---|---|---|"]
        default = "required" if required else f"`{json.dumps(field['default'])}`" if "default" in field else ""
        meaning = " ".join(field.get("description", "").split()).replace("|", "\\|")
        lines.append(f"| `{'.'.join(path)}` | {kind(field)} | {default} | {effect(path, field)} | {meaning} |")
    rules = spec_schema().get("x-kubernetes-validations", [])
    rules += [
        rule for field in spec_schema()["properties"].values() for rule in field.get("x-kubernetes-validations", [])
    ]
    lines += ["\n### Rules over several fields\n", *(f"- {rule['message']}" for rule in rules if "message" in rule)]
    lines += ["\n## status\n", _STATUS]
    lines += ["| field | meaning |", "|---|---|"]
    status = structural(ModelServeStatus.model_json_schema(by_alias=True))
    for name, field in status["properties"].items():
        lines.append(f"| `{name}` | {' '.join(field.get('description', '').split()).replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


_ADAPTER_HEAD = f"""# ModelAdapter

Every field of the resource (`{GROUP}/{VERSION}`, short name `{ADAPTER_SHORT_NAMES[0]}`), made from the models that its
CRD is made from (`python tests/controller/spec_reference.py` writes this page). How adapters are taken, rolled out and
drained: [adapters.md](adapters.md#on-kubernetes).
"""


def adapter_page() -> str:
    """docs/modeladapter.md."""
    return _page_of(_ADAPTER_HEAD, ModelAdapterSpec, ModelAdapterStatus)


def _page_of(head: str, of_spec: type[ApiModel], of_status: type[ApiModel]) -> str:
    """Both tables of a kind of which an edit makes no plan."""
    spec, status = (dict(structural(model.model_json_schema(by_alias=True))) for model in (of_spec, of_status))
    lines = [head, "## spec\n", "| field | type | default | meaning |", "|---|---|---|---|"]
    for path, field, required in leaves(spec):
        default = "required" if required else f"`{json.dumps(field['default'])}`" if "default" in field else ""
        lines.append(f"| `{'.'.join(path)}` | {kind(field)} | {default} | {_said(field)} |")
    lines += ["", *(f"- {rule['message']}" for rule in spec["x-kubernetes-validations"])]
    lines += ["\n## status\n", "The operator's alone.\n", "| field | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {_said(field)} |" for name, field in status["properties"].items()]
    return "\n".join(lines) + "\n"


def _said(field: Schema) -> str:
    return " ".join(field.get("description", "").split()).replace("|", "\\|")


_CACHE_HEAD = f"""# ModelCache

Every field of the resource (`{GROUP}/{VERSION}`, short name `{CACHE_SHORT_NAMES[0]}`), made from the models that its
CRD is made from (`python tests/controller/spec_reference.py` writes this page). How caches are filled, followed and
freed: [model-cache.md](model-cache.md).
"""


def cache_page() -> str:
    """docs/modelcache.md."""
    return _page_of(_CACHE_HEAD, ModelCacheSpec, ModelCacheStatus)


if __name__ == "__main__":
    PAGE.write_text(page())
    ADAPTER_PAGE.write_text(adapter_page())
    CACHE_PAGE.write_text(cache_page())
