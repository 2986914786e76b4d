"""Documents of people: what is accepted, what is refused, and that a refusal names the field, value and limit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from modelserve.api import API_VERSION, KIND, ModelServe
from modelserve.api.model_adapter import ModelAdapterSpec
from modelserve.api.schema_types import quantity_value
from modelserve.errors import InvalidInput

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "docs" / "examples").glob("*.yaml"))


def _document(**spec: Any) -> dict[str, Any]:
    spec.setdefault("model", {"uri": "hf://google/gemma-4-31B-it"})
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "gemma"}, "spec": spec}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_valid(path: Path) -> None:
    model_serve, *adapters = yaml.safe_load_all(path.read_text())
    assert ModelServe.parse(model_serve).spec.model.uri
    assert [ModelAdapterSpec.parse(each["spec"])[1] for each in adapters] == [()] * len(adapters)


def test_left_out_means_the_operators_choice() -> None:
    spec = ModelServe.parse(_document()).spec
    assert (spec.context, spec.kv_cache, spec.parallelism, spec.objective) == (None, None, None, None)
    assert (spec.replicas, spec.plan.mode, spec.rollout.drain_seconds) == (1, "Automatic", 60)


def test_json_has_camel_case_and_no_nulls() -> None:
    document = _document(context={"maxModelLen": 4096}, pod={"resources": {"limits": {"cpu": 2, "memory": "3Gi"}}})
    spec = ModelServe.parse(document).to_json()["spec"]
    assert spec["context"] == {"maxModelLen": 4096}
    assert spec["pod"]["resources"]["limits"] == {"cpu": "2", "memory": "3Gi"}
    assert "objective" not in spec


@pytest.mark.parametrize(
    ("spec", "field", "says"),
    [
        ({"model": {}}, "spec.model.uri", "required"),
        ({"model": {"uri": "s3://bucket/model"}}, "spec.model.uri", "s3://bucket/model"),
        ({"model": {"uri": "pvc://claim/../secret"}}, "spec.model.uri", "pvc://CLAIM/PATH"),
        ({"model": {"uri": "file:///tmp/x"}}, "spec.model.uri", "command line"),
        ({"replicas": -1}, "spec.replicas", "greater than or equal to 0"),
        ({"replicas": "3"}, "spec.replicas", "valid integer; got '3'"),
        ({"replicas": True}, "spec.replicas", "valid integer"),
        ({"rollout": {"allowDowntime": "yes"}}, "spec.rollout.allowDowntime", "valid boolean; got 'yes'"),
        ({"context": {"minModelLen": 9, "maxModelLen": 8}}, "spec.context", "9 > 8"),
        ({"engine": {"maxNumSeqs": 64, "maxNumBatchedTokens": 32}}, "spec.engine", "64 > 32"),
        ({"kvCache": {"dtype": "fp4"}}, "spec.kvCache.dtype", "int8"),
        ({"kvCache": {"gpuMemoryUtilization": "1.0"}}, "spec.kvCache", "0.99"),
        ({"kvCache": {"gpuMemoryUtilization": 0.9}}, "spec.kvCache.gpuMemoryUtilization", "string"),
        ({"parallelism": {"tensor": 4}, "accelerators": {"maxPerReplica": 2}}, "spec", "4 > 2"),
        ({"engine": {"prefixCaching": False}, "kvCache": {"hostMemory": "64Gi"}}, "spec", "hostMemory is 64Gi"),
        ({"kvCache": {"hostMemory": "64 GB"}}, "spec.kvCache.hostMemory", "pattern"),
        ({"max_model_len": 4096}, "spec.max_model_len", "not permitted"),
        ({"kv_cache": {}}, "spec.kv_cache", "not permitted"),
        ({"pod": {"resources": {"limits": {"memory": "3 GB"}}}}, "spec.pod.resources.limits.memory", "pattern"),
    ],
)
def test_a_wrong_field_is_named(spec: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        ModelServe.parse(_document(**spec))
    assert raised.value.field == field
    assert says in str(raised.value)
    assert "Value error" not in str(raised.value)


@pytest.mark.parametrize("name", ["Gemma", "4gemma", "g" * 41, "gemma.4", "-gemma", ""])
def test_a_name_must_be_able_to_name_a_service(name: str) -> None:
    document = _document()
    document["metadata"]["name"] = name
    with pytest.raises(InvalidInput, match="names a Service"):
        ModelServe.parse(document)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"rollout": {"maxSurge": 0}}, "set maxSurge to 1 or more"),
        ({"pod": {"resources": {"limits": {"nvidia.com/gpu": "4"}}}}, "parallelism.tensor; got nvidia.com/gpu"),
        ({"pod": {"resources": {"requests": {"nvidia.com/mig-1g.10gb": 1}}}}, "got nvidia.com/mig-1g.10gb"),
    ],
)
def test_a_later_rule_is_for_what_is_yet_to_be_admitted(spec: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        ModelServe.parse(_document(**spec))
    assert ModelServe.parse_of_any_release(_document(**spec))[1] == (), "one that is stored stays as good as it was"


def test_a_file_address_is_for_the_command_line() -> None:
    document = _document(model={"uri": "file:///models/tiny"})
    assert ModelServe.parse(document, file_uri=True).spec.model.uri == "file:///models/tiny"


@pytest.mark.parametrize("name", ["m-Q4_0.gguf", "BF16/m-00001-of-00002.gguf"])
def test_a_gguf_file_of_a_repository_is_an_address(name: str) -> None:
    uri = f"hf://unsloth/gemma-4-31B-it-GGUF/{name}"
    assert ModelServe.parse(_document(model={"uri": uri})).spec.model.uri == uri


@pytest.mark.parametrize("name", ["m.safetensors", "../m.gguf", ".gguf", "a/b/c/d/m.gguf"])
def test_no_other_file_of_a_repository_is_one(name: str) -> None:
    with pytest.raises(InvalidInput, match=r"is not a model address; use hf://OWNER/NAME, hf://OWNER/NAME/FILE\.gguf"):
        ModelServe.parse(_document(model={"uri": f"hf://unsloth/gemma-4-31B-it-GGUF/{name}"}))


def test_impossible_but_well_formed_is_accepted() -> None:
    spec = ModelServe.parse(
        _document(
            drafter={"uri": "hf://google/gemma-4-31B-it-assistant"},
            kvCache={"layout": "v_only"},
            accelerators={"products": ["NVIDIA-L4"], "maxPerReplica": 1},
        )
    ).spec
    assert spec.kv_cache is not None


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
_FULL = _document(
    context={"maxModelLen": 4096, "minModelLen": 1024},
    kvCache={"dtype": "int8", "layout": "kv", "gpuMemoryUtilization": "0.8"},
    accelerators={"products": ["CPU"], "nodeSelector": {"zone": "a"}, "costPerHour": {"CPU": "0.1"}},
    pod={"env": [{"name": "A", "value": "b"}], "tolerations": [{"key": "gpu", "operator": "Exists"}]},
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, child in children for deeper in _paths(child, (*path, key)))]


@given(document=_JSON)
def test_nonsense_is_refused_not_crashed_on(document: Any) -> None:
    with pytest.raises(InvalidInput):
        ModelServe.parse(document)


@given(path=st.sampled_from(_paths(_FULL)[1:]), value=_JSON)
def test_nonsense_in_any_place_is_accepted_or_refused(path: tuple[Any, ...], value: Any) -> None:
    document = copy.deepcopy(_FULL)
    target: Any = document
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    try:
        parsed = ModelServe.parse(document)
    except InvalidInput:
        return  # refused in words; any other exception fails the test
    assert ModelServe.parse(parsed.to_json()) == parsed


@pytest.mark.parametrize(
    ("quantity", "value"), [("3Gi", 3 << 30), ("500m", 0.5), ("2", 2), ("1.5G", 1_500_000_000), ("2E", 2 * 10**18)]
)
def test_quantities(quantity: str, value: float) -> None:
    assert quantity_value(quantity) == value
