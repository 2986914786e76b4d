"""Nonsense of every kind ends in exit code 2 or 3 with a named reason; never in a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from modelserve.cli.__main__ import main
from modelserve.termination import TERMINAL_EXIT_CODE

_NUMBERS = st.sampled_from([-1, 0, 1, 3, 7, 10**3, 10**9, 10**30, -(10**30), 0.5, float("inf"), float("nan")])
_TEXT = st.sampled_from(
    [
        "",
        "0",
        "-1",
        "1e9",
        "12Gi",
        "-3Gi",
        "0.9",
        "99",
        "NaN",
        "x" * 300,
        "NVIDIA-L4",
        "CPU",
        "nvidia l4",
        "int8",
        "\x00",
    ]
)
_ODD = st.none() | st.booleans() | _NUMBERS | _TEXT | st.lists(_TEXT | _NUMBERS, max_size=2) | st.just({"a": 1})
_SECTIONS = {
    "context": ("maxModelLen", "minModelLen"),
    "workload": ("inputTokens", "outputTokens", "concurrency"),
    "parallelism": ("tensor",),
    "engine": ("maxNumBatchedTokens", "maxNumSeqs"),
    "kvCache": ("dtype", "layout", "gpuMemoryUtilization"),
    "accelerators": ("products", "nodeSelector", "maxPerReplica", "costPerHour"),
    "drafter": ("uri", "numSpeculativeTokens"),
    "pod": ("resources", "tolerations"),
}
_SPECS = st.fixed_dictionaries(
    {"model": st.just({"uri": "hf://google/gemma-4-E2B-it"})},
    optional={
        **{
            name: _ODD | st.dictionaries(st.sampled_from(fields), _ODD, max_size=3)
            for name, fields in _SECTIONS.items()
        },
        "objective": _ODD | st.sampled_from(["Cost", "Latency"]),
        "replicas": _ODD,
        "unknown": _ODD,
    },
)


def _run(*arguments: str, files: dict[str, str]) -> tuple[int, str]:
    """The command's exit code and all it said; {NAME} in an argument is the path of that file."""
    with tempfile.TemporaryDirectory() as directory:
        paths = {}
        for name, text in files.items():
            paths[name] = Path(directory) / name
            paths[name].write_text(text)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([argument.format(**paths, directory=directory) for argument in arguments])
        return code, out.getvalue() + err.getvalue()


def _serve(spec: Any) -> str:
    document = {"apiVersion": "serving.modelserve.dev/v1alpha1", "kind": "ModelServe", "metadata": {"name": "x"}}
    return yaml.safe_dump({**document, "spec": spec})


@given(spec=_SPECS, accelerator=st.sampled_from(["NVIDIA-L4:8", "NVIDIA-H200", "CPU", "Tesla-T4:2"]))
def test_any_spec_is_planned_or_refused_with_a_reason(spec: Any, accelerator: str) -> None:
    code, said = _run("plan", "-f", "{serve}", "--accelerator", accelerator, files={"serve": _serve(spec)})
    assert code in (0, 2, 3)
    assert "Traceback" not in said
    if code == 2:
        assert said.startswith("modelserve: ")
        assert len(said.splitlines()) == 1
        assert len(said) < 4000
    if code == 3:
        assert "no plan" in said


@given(flags=st.lists(st.tuples(
    st.sampled_from(["--accelerator", "--assume", "--compare", "--pool", "--catalogue", "--nodes"]),
    st.sampled_from([
        "NVIDIA-L4", "NVIDIA-L4:0", "NVIDIA-L4:-1", "NVIDIA-L4:99", "NVIDIA-L4:²", "vllm", "vllm:", "vllm:0.33",
        "context=1Gi", "context=", "=1", "activation=0", "weights=1Ti", "1Gi", "0", "-1", "1e9", "9" * 40, "/dev/null",
        "/nonexistent", "{serve}", "{odd}",
    ]),
), max_size=4))  # fmt: skip
def test_any_flags_are_answered(flags: list[tuple[str, str]]) -> None:
    arguments = [part for flag, value in flags for part in (f"{flag}={value}",)]
    serve = _serve({"model": {"uri": "hf://google/gemma-4-31B-it"}})
    code, said = _run("plan", "-f", "{serve}", *arguments, files={"serve": serve, "odd": "- [1, {kind: Node}]"})
    assert code in (0, 2, 3)
    assert said.strip()
    assert code != 2 or len(said.splitlines()) == 1


CONFIG: dict[str, Any] = {
    "model_type": "gemma4_text", "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "sliding_window": 8, "max_position_embeddings": 4096, "vocab_size": 64,
}  # fmt: skip


@given(changes=st.dictionaries(st.sampled_from([*CONFIG, "quantization_config", "num_experts", "enable_moe_block",
    "rope_parameters", "num_kv_shared_layers", "hidden_size_per_layer_input", "dtype"]), _ODD, max_size=3),
    dropped=st.sets(st.sampled_from(sorted(CONFIG)), max_size=1))  # fmt: skip
def test_any_config_is_read_or_refused_with_a_reason(changes: dict[str, Any], dropped: set[str]) -> None:
    config = {key: value for key, value in (CONFIG | changes).items() if key not in dropped}
    files = {"config.json": json.dumps(config), "serve": ""}
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(files["config.json"])
        serve = _serve({"model": {"uri": f"file://{directory}"}})
        code, said = _run("plan", "-f", "{serve}", "--accelerator", "NVIDIA-L4:2", files={"serve": serve})
        inspected, why = _run("inspect", directory, "--output", "{report}", files={"report": ""})
    assert code in (0, 2, 3), said
    assert code != 2 or len(said.splitlines()) == 1
    assert (inspected, bool(why.strip())) == (TERMINAL_EXIT_CODE, True)


@pytest.mark.parametrize("text", ["", "null", "[]", "{", '"x"', "\x00", "9" * 5000, "[" * 3000, '{"a": NaN}'])
def test_a_corrupt_config_is_named(text: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(text)
        serve = _serve({"model": {"uri": f"file://{directory}"}})
        code, said = _run("plan", "-f", "{serve}", files={"serve": serve})
    assert (code, "config.json" in said or "model_type" in said) == (2, True), said


@pytest.mark.parametrize(
    ("nodes", "code"),
    [
        ("kind: Node\nmetadata: {labels: {nvidia.com/gpu.product: NVIDIA-L4, nvidia.com/gpu.count: '0'}}", 3),
        ("kind: Node\nmetadata: {labels: 7}", 3),
        ("kind: Node\nmetadata: []\nstatus: {allocatable: [1]}", 3),
        ("kind: Node", 3),
        ("kind: NodePool\nspec: {template: {spec: {requirements: 5}}}", 3),
        ("kind: Secret", 2),
        ("", 2),
    ],
)
def test_odd_nodes_are_no_accelerators(nodes: str, code: int) -> None:
    serve = _serve({"model": {"uri": "hf://google/gemma-4-31B-it"}})
    found, said = _run("plan", "-f", "{serve}", "--nodes", "{nodes}", files={"serve": serve, "nodes": nodes})
    assert (found, bool(said.strip())) == (code, True)
    assert "no accelerator is offered" in said or code == 2


def test_a_catalogue_file_adds_and_declares_products() -> None:
    entry = 'memoryMiB: 200000\nbandwidthGBps: 6000\nbfloat16TFLOPS: 1500\ncomputeCapability: "9.0"\n'
    config_map = yaml.safe_dump({"kind": "ConfigMap", "data": {"NVIDIA-H300": entry + "gpusPerNode: 2\n"}})
    serve = _serve({"model": {"uri": "hf://google/gemma-4-31B-it"}})
    files = {"serve": serve, "catalogue": config_map}
    code, said = _run("plan", "-f", "{serve}", "--catalogue", "{catalogue}", "-o", "json", files=files)
    assert (code, json.loads(said)[0]["plan"]["accelerator"]) == (0, "NVIDIA-H300")
    files["catalogue"] = yaml.safe_dump({"NVIDIA-H300": {"memoryMiB": 5}})
    code, said = _run("plan", "-f", "{serve}", "--catalogue", "{catalogue}", files=files)
    assert (code, "NVIDIA-H300" in said, "memoryMiB" in said) == (2, True, True)
