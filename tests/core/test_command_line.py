"""`modelserve` as scripts use it: exit codes, forms of output, and no torch, network or traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from modelserve.api import PlanStatus
from modelserve.cli.__main__ import main
from modelserve.crd import DEFINITIONS, crd_yaml

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "gemma4-31b.yaml"
# torch and kopf are made impossible to import, and no socket can be opened.
GUARD = """
import socket, sys
sys.modules.update({"torch": None, "kopf": None, "kubernetes": None})
def refuse(*args, **kwargs): raise AssertionError("the command line opened a socket")
socket.socket = refuse
from modelserve.cli.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def _run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", GUARD, *arguments], input=stdin, capture_output=True, text=True, check=False, cwd=ROOT
    )


@pytest.mark.parametrize(
    ("accelerator", "code", "verdict"),
    [
        ("NVIDIA-H200", 0, "Chosen"),
        ("NVIDIA-L4", 3, "Refused"),
        ("NVIDIA-GeForce-RTX-3090:2", 3, "Refused"),
        ("NVIDIA-GeForce-RTX-3090:4", 0, "Chosen"),
    ],
)
def test_31b_on_named_accelerators(accelerator: str, code: int, verdict: str) -> None:
    done = _run("plan", "-f", str(EXAMPLE), "--accelerator", accelerator, "-o", "json")
    assert (done.returncode, done.stderr) == (code, "")
    (entry,) = json.loads(done.stdout)
    assert set(entry) == {"name", "plan"}
    planned = PlanStatus.model_validate(entry["plan"], by_alias=True, by_name=False)
    assert planned.candidates[0].verdict == verdict
    if code:
        assert planned.candidates[0].shortfall_bytes
        assert (planned.candidates[0].remedy or "").startswith("fits on 4 x NVIDIA-")


def test_bad_input_exits_2_with_one_line_on_stderr() -> None:
    for arguments, says in (
        (("plan", "-f", "/nonexistent.yaml"), "No such file"),
        (("plan", "-f", "-"), "holds no ModelServe"),
        (("plan", "-f", str(EXAMPLE), "--accelerator", "H200"), "NVIDIA-H200"),
        (("plan", "-f", str(EXAMPLE), "--accelerator", "NVIDIA-H200:0"), "1 to 64"),
        (("plan", "-f", str(EXAMPLE), "--nodes", str(EXAMPLE)), "holds no Node"),
        (("plan", "-f", str(EXAMPLE), "--pool", "5Gi"), "give --compare vllm with it"),
        (("inspect", str(ROOT / "tests/models/gemma4-tiny-ple"), "--output", "/nonexistent/x"), "cannot write"),
        (("plan", "-f", str(ROOT / "docs/examples/gemma4-tiny.yaml")), "file://DIR"),
    ):
        done = _run(*arguments)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert says in done.stderr, arguments
        assert len(done.stderr.splitlines()) == 1, arguments


def _plan(document: object, *arguments: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> tuple[int, str]:
    text = document if isinstance(document, str) else yaml.safe_dump(document)
    (tmp_path / "serve.yaml").write_text(text)
    code = main(["plan", "-f", str(tmp_path / "serve.yaml"), *arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def _serve(name: str, **spec: Any) -> dict[str, Any]:
    spec.setdefault("model", {"uri": "hf://google/gemma-4-31B-it"})
    return {
        "apiVersion": "serving.modelserve.dev/v1alpha1",
        "kind": "ModelServe",
        "metadata": {"name": name},
        "spec": spec,
    }


@pytest.mark.parametrize("text", ["{", "a: b: c", "\t", "- [", "!!python/object:os.system {}", "\x00"])
def test_what_is_not_yaml_is_refused(text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, output = _plan(text, capsys=capsys, tmp_path=tmp_path)
    assert (code, len(output.splitlines())) == (2, 1)


def test_every_document_gets_an_entry_and_one_that_does_not_fit_decides(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small = _serve("small", model={"uri": "hf://google/gemma-4-E2B-it"})
    listed = {"apiVersion": "v1", "kind": "List", "items": [small, {"apiVersion": "v1", "kind": "Secret"}]}
    text = yaml.safe_dump_all([_serve("large"), None, {"kind": "ConfigMap"}, listed])
    code, output = _plan(text, "--accelerator", "NVIDIA-L4", "-o", "yaml", capsys=capsys, tmp_path=tmp_path)
    entries = yaml.safe_load(output)
    assert (code, [entry["name"] for entry in entries]) == (3, ["large", "small"])
    assert ["hash" in entry["plan"] for entry in entries] == [False, True]


def test_a_wrong_field_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, output = _plan(_serve("gemma", context={"maxModelLen": 0}), capsys=capsys, tmp_path=tmp_path)
    assert (code, "spec.context.maxModelLen" in output) == (2, True)


def test_nodes_are_read_with_their_labels(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    node = {
        "kind": "Node",
        "metadata": {
            "name": "a",
            "labels": {"nvidia.com/gpu.product": "NVIDIA-L40S", "nvidia.com/gpu.memory": "46068"},
        },
        "status": {"allocatable": {"nvidia.com/gpu": "4"}},
    }
    (tmp_path / "nodes.yaml").write_text(yaml.safe_dump({"kind": "NodeList", "items": [node]}))
    nodes = ("--nodes", str(tmp_path / "nodes.yaml"))
    code, output = _plan(_serve("gemma"), *nodes, "-o", "json", capsys=capsys, tmp_path=tmp_path)
    assert code == 0
    (entry,) = json.loads(output)
    assert (entry["plan"]["accelerator"], entry["plan"]["gpusPerReplica"]) == ("NVIDIA-L40S", 4)


def test_nodes_that_do_not_let_the_pods_in_offer_nothing_and_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def node(name: str, product: str, *, taint: str | None = None, **labels: str) -> dict[str, Any]:
        taints = [{"key": taint, "value": "x", "effect": "NoSchedule"}] if taint else []
        metadata = {"name": name, "labels": {"nvidia.com/gpu.product": product, **labels}}
        allocatable = {"nvidia.com/gpu": "8"}
        return {
            "kind": "Node",
            "metadata": metadata,
            "spec": {"taints": taints},
            "status": {"allocatable": allocatable},
        }

    nodes = [
        node("theirs", "NVIDIA-H200", team="a"),
        node("tainted", "NVIDIA-B200", taint="reserved", team="b"),
        node("usable", "NVIDIA-L40S", taint="nvidia.com/gpu", team="b"),
        {"kind": "Node", "metadata": {"name": "cpu", "labels": {"team": "a"}}},
    ]
    (tmp_path / "nodes.yaml").write_text(yaml.safe_dump({"kind": "NodeList", "items": nodes}))
    file = ("--nodes", str(tmp_path / "nodes.yaml"))
    spec = _serve("gemma", accelerators={"nodeSelector": {"team": "b"}})
    code, output = _plan(spec, *file, "-o", "json", capsys=capsys, tmp_path=tmp_path)
    (entry,) = json.loads(output)
    assert (code, entry["plan"]["accelerator"]) == (0, "NVIDIA-L40S")
    assert len(entry["plan"]["candidates"]) == 1
    _, table = _plan(spec, *file, capsys=capsys, tmp_path=tmp_path)
    told = " ".join(table.split())
    assert "node theirs is left out: label team is a, spec.accelerators.nodeSelector wants b" in told
    assert "node tainted is left out: taint reserved=x:NoSchedule is not in spec.pod.tolerations" in told
    assert "node usable" not in told
    assert "node cpu" not in told
    tolerant = _serve("gemma", pod={"tolerations": [{"key": "reserved", "operator": "Exists"}]})
    code, output = _plan(tolerant, *file, "-o", "json", capsys=capsys, tmp_path=tmp_path)
    assert {each["accelerator"] for each in json.loads(output)[0]["plan"]["candidates"]} == {
        "NVIDIA-H200", "NVIDIA-B200", "NVIDIA-L40S",
    }  # fmt: skip


def test_a_directory_stands_for_a_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {
        "model_type": "gemma4_text", "num_hidden_layers": 1, "layer_types": ["full_attention"], "hidden_size": 16,
        "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 8,
        "max_position_embeddings": 128, "vocab_size": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    serve = _serve("local", model={"uri": f"file://{tmp_path}"}, accelerators={"products": ["CPU"]})
    code, output = _plan(serve, "-o", "json", capsys=capsys, tmp_path=tmp_path)
    assert (code, json.loads(output)[0]["plan"]["maxModelLen"]) == (0, 128)
    serve["spec"]["model"]["uri"] = "file:///nonexistent"
    code, output = _plan(serve, capsys=capsys, tmp_path=tmp_path)
    assert (code, "/nonexistent/config.json" in output) == (2, True)


def test_the_table_shows_every_candidate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, output = _plan(_serve("gemma"), "--accelerator", "NVIDIA-H200:8", capsys=capsys, tmp_path=tmp_path)
    assert code == 0
    rows = [line.split()[:2] for line in output.splitlines() if line.startswith("  ") and "v_only" in line]
    assert rows == [["1", "Chosen"], ["2", "Fits"], ["4", "Fits"], ["8", "Fits"]]
    assert max(map(len, output.splitlines())) <= 100
    for word in ("parameters", "allocator", "context", "kv_pool", "LINKS", "REQUEST", "TPOT"):
        assert word in output, word


def test_an_assumed_term_takes_the_place_of_the_prediction(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    overheads = []
    for extra in ((), ("--assume", "context=1Gi", "--assume", "graphs=512Mi")):
        flags = ("--accelerator", "NVIDIA-H200", "-o", "json", *extra)
        _, output = _plan(_serve("gemma"), *flags, capsys=capsys, tmp_path=tmp_path)
        overheads.append(json.loads(output)[0]["plan"]["perGpu"]["overheadBytes"])
    assert (overheads[0] < overheads[1], overheads[1]) == (True, 1536 << 20)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--assume", "context"), "TERM=QUANTITY"),
        (("--assume", "heap=1Gi"), "not a memory term"),
        (("--assume", "context=-1Gi"), "not a quantity"),
        (("--assume", "context=9999999999Ei"), "1 PiB"),
        (("--compare", "sglang"), "only vllm"),
        (("--compare", "vllm:0.1"), "known are 0.19"),
        (("--compare", "vllm", "--pool", "much"), "not a quantity"),
        (("--compare", "vllm", "--accelerator", "NVIDIA-L4"), "nothing fits"),
    ],
)
def test_flags_that_mean_nothing(
    flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, output = _plan(_serve("gemma"), *flags, capsys=capsys, tmp_path=tmp_path)
    assert (code, says in output) == (2, True), output


def test_the_comparison_shows_both_sides(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """31B INT4 on two 24 GB GPUs with 11.54 GiB of pool: 25,200 and 244,817 tokens in vLLM's logs, 1.87 requests."""
    serve = _serve(
        "gemma",
        model={"uri": "hf://google/gemma-4-31B-it-qat-w4a16-ct"},
        parallelism={"tensor": 2},
        context={"maxModelLen": 131_072},
        engine={"maxNumBatchedTokens": 2048},
        kvCache={"dtype": "bfloat16"},
    )
    flags = ("--accelerator", "NVIDIA-GeForce-RTX-3090:2", "--compare", "vllm", "--pool", "11.54Gi")
    _, output = _plan(serve, *flags, "-o", "json", capsys=capsys, tmp_path=tmp_path)
    rows = {(row["engine"], row["kv"]): row for row in json.loads(output)[0]["comparison"]}
    logged = {engine: row["loggedTokens"] for (engine, _), row in rows.items() if "loggedTokens" in row}
    assert logged == {"vllm 0.19": 25_200, "vllm 0.21": 244_817, "vllm 0.26": 217_334, "vllm 0.33": 217_334}
    assert [rows["vllm 0.21", "bfloat16/kv"]["concurrency"], rows["vllm 0.33", "bfloat16/kv"]["concurrency"]] == [
        "1.87",
        "1.66",
    ]
    assert float(rows["modelserve", "bfloat16/v_only"]["concurrency"]) >= 3.85
    assert float(rows["modelserve", "int8/v_only"]["concurrency"]) >= 7.5
    assert rows["modelserve", "bfloat16/v_only"]["resident"] == "3.99"
    _, table = _plan(serve, *flags, capsys=capsys, tmp_path=tmp_path)
    assert "logs 25,200 tokens" in table


@pytest.mark.parametrize(
    ("size", "version", "dtype", "length", "chunk", "pool", "tokens", "requests"),
    [
        ("31B", "0.20", "bfloat16", 131_072, 2048, "50Gi", 54_608, "4.05"),
        ("31B", "0.21", "bfloat16", 131_072, 2048, "50Gi", 530_400, "4.05"),
        ("31B", "0.21", "bfloat16", 131_072, 8192, "64.58Gi", 496_669, "3.79"),
        ("E4B", "0.21", "bfloat16", 32_768, 8192, "105.33Gi", 4_142_295, "126.41"),
        ("31B", "0.33", "bfloat16", 131_072, 8192, "64.27Gi", 361_632, "2.76"),
        ("31B", "0.33", "fp8_e4m3", 131_072, 8192, "59.85Gi", 672_477, "5.13"),
        ("31B", "0.33", "int8", 131_072, 8192, "63.21Gi", 490_013, "3.74"),
        ("31B", "0.33", "bfloat16", 131_072, 8192, "102.17Gi", 574_911, "4.39"),
        ("E4B", "0.33", "bfloat16", 32_768, 8192, "104.57Gi", 2_990_671, "91.27"),
        ("26B-A4B", "0.20", "fp8_e4m3", 262_144, 16_384, "8.956Gi", 78_256, "2.15"),
    ],
)
def test_the_comparison_prints_what_vllm_logged(
    size: str, version: str, dtype: str, length: int, chunk: int, pool: str, tokens: int, requests: str,
    capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    """Pools are known to 0.01 GiB, which is 0.02 % of the logged tokens and nothing of the two decimals."""
    serve = _serve(
        "gemma",
        model={"uri": f"hf://google/gemma-4-{size}-it"},
        context={"maxModelLen": length},
        engine={"maxNumBatchedTokens": chunk},
        kvCache={"dtype": dtype},
    )
    flags = ("--accelerator", "NVIDIA-H200", "--compare", f"vllm:{version}", "--pool", pool, "-o", "json")
    _, output = _plan(serve, *flags, capsys=capsys, tmp_path=tmp_path)
    peer = json.loads(output)[0]["comparison"][0]
    assert peer["engine"] == f"vllm {version}"
    assert peer["loggedTokens"] == pytest.approx(tokens, rel=2e-4)
    assert peer["concurrency"] == requests


def test_a_reader_that_goes_away_is_no_error() -> None:
    program = [sys.executable, "-c", GUARD, "plan", "-f", str(EXAMPLE), "-o", "json"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == b""


def test_the_crd_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crd"]) == 0
    assert capsys.readouterr().out == "---\n".join(map(crd_yaml, DEFINITIONS))
