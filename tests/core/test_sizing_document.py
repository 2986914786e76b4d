"""docs/sizing.md: its printed plans are what the commands print, and its hand arithmetic is right."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from pathlib import Path

import pytest
from architecture_of import architecture_of
from rank_of import rank_of

from modelserve.cli.__main__ import main
from modelserve.sizing.cuda_graphs import graphs_bytes

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "sizing.md").read_text()
BLOCKS = re.findall(r"```console\n\$ modelserve (plan [^\n]*)\n(.*?)\n```", DOCUMENT, flags=re.DOTALL)
GIB = 1 << 30


def test_the_document_has_its_plans() -> None:
    for product in ("NVIDIA-GeForce-RTX-3090", "NVIDIA-A100-SXM4-80GB", "NVIDIA-L4", "NVIDIA-L40S", "nodes/h100-l4"):
        assert any(product in command for command, _ in BLOCKS), product


@pytest.mark.parametrize(("command", "printed"), BLOCKS, ids=[command[:60] for command, _ in BLOCKS])
def test_a_printed_plan_is_what_the_command_prints(
    command: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.chdir(ROOT):
        assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out.rstrip() == printed
    assert max(map(len, printed.splitlines())) <= 100


def _json(command: str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    with contextlib.chdir(ROOT):
        assert main([*shlex.split(command), "-o", "json"]) == 0
    entry: dict[str, object] = json.loads(capsys.readouterr().out)[0]
    return entry


def test_two_rtx_3090_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """With 11.54 GiB of pool: at least 3.85 requests of 131,072 tokens in bfloat16, at least 7.5 in int8."""
    entry = _json(BLOCKS[0][0], capsys)
    global_page, sliding_page = 10 * 64 * 2 * 512 * 2, 50 * 32 * 8 * 256 * 2 * 2
    request = 2048 * global_page + 33 * sliding_page
    assert request == 3_116_892_160
    small = 2048 * (10 * 64 * 2 * 514) + 33 * (50 * 32 * 8 * 258 * 2)
    rows = {(row["engine"], row["kv"]): row for row in entry["comparison"]}  # type: ignore[attr-defined]
    for kv, size, least in (("bfloat16/v_only", request, 3.85), ("int8/v_only", small, 7.5)):
        assert rows["modelserve", kv]["requestBytes"] == size
        assert float(rows["modelserve", kv]["concurrency"]) == int(11.54 * GIB / size * 100) / 100 >= least
    plan: dict[str, dict[str, int]] = entry["plan"]  # type: ignore[assignment]
    assert plan["perRequest"]["atMaxBytes"] == request
    linear_and_embedding = 19_292_356_608 // 2
    assert 0 < plan["perGpu"]["weightsBytes"] - linear_and_embedding < 260 << 20  # norms and segments
    pool = plan["perGpu"]["kvPoolBytes"]
    assert float(plan["concurrency"]["atMax"]) == int(pool / request * 100) / 100  # type: ignore[arg-type]


def test_two_rtx_3090_hold_what_the_example_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens of requests of 131,072: in bfloat16 as the example has it, and in int8 as its plan prints beside."""
    plan = _json(BLOCKS[0][0], capsys)["plan"]
    assert isinstance(plan, dict)
    assert (plan["accelerator"], plan["kvCache"]["dtype"]) == ("NVIDIA-GeForce-RTX-3090", "bfloat16")
    assert plan["engine"]["maxNumSeqs"] == 8
    held = plan["perGpu"]["kvPoolBytes"] * 131_072 // plan["perRequest"]["atMaxBytes"]
    assert held >= 500_000
    printed = re.search(r"have ([\d,]+) in all; .*with an int8 cache: ([\d,]+)", plan["message"])
    assert printed is not None
    in_bfloat16, in_int8 = (int(figure.replace(",", "")) for figure in printed.groups())
    assert (in_bfloat16, in_int8 >= 940_000) == (held, True)
    example = (ROOT / "docs" / "examples" / "gemma4-31b-int4.yaml").read_text()
    assert "more than 500,000 tokens" in example
    assert "more than\n# 940,000 with `dtype: int8`" in example


GRAPHS_BY_HAND = re.findall(
    r"\| (\w+), ([\d,]+) \| (\d+) \+ (\d+) \| [^|]*?(\d+) \| ([\d.]+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|", DOCUMENT
)


def test_the_page_has_graphs_of_two_models_and_two_chunks() -> None:
    assert [row[:2] for row in GRAPHS_BY_HAND] == [(m, c) for m in ("E4B", "31B") for c in ("2,048", "8,192")]


@pytest.mark.parametrize("row", GRAPHS_BY_HAND, ids=[" ".join(row[:2]) for row in GRAPHS_BY_HAND])
def test_graphs_by_hand(row: tuple[str, ...]) -> None:
    """count x (layers x n + 30) x 12 KiB + e S (V + H) + 20 MiB, of 64 sequences."""
    layers, per_layer, hidden = {"E4B": (42, 16, 2560), "31B": (60, 12, 5376)}[row[0]]
    chunk, kernels = int(row[1].replace(",", "")), layers * per_layer + 30
    decodes = len({1, 2, 4, *range(8, 65, 8)})
    mixed = len({64, 128, *range(256, 2049, 256), *range(3072, chunk + 1, 1024)}) * (2 if row[0] == "E4B" else 1)
    nodes = (decodes + mixed) * kernels * 12 / 1024
    logits, states = 64 * 262_144 * 2 >> 20, 64 * hidden * 2 / (1 << 20)
    total = f"{nodes + logits + states + 20:.1f}"
    assert row[2:] == (str(decodes), str(mixed), str(kernels), f"{nodes:.1f}", str(logits), f"{states:.1f}", total)
    architecture = architecture_of(row[0])
    sized = graphs_bytes(architecture, rank_of(architecture, max_num_batched_tokens=chunk))
    assert f"{sized / (1 << 20):.1f}" == total


def test_a100_mixed_and_l4_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    mixed = _json(BLOCKS[3][0], capsys)["plan"]
    assert isinstance(mixed, dict)
    request = 4096 * (10 * 64 * 2 * 512 * 2) + 33 * (50 * 32 * 8 * 256 * 2 * 2)
    assert (mixed["accelerator"], mixed["gpusPerReplica"]) == ("NVIDIA-H100-80GB-HBM3", 2)
    assert mixed["perRequest"]["atMaxBytes"] == request
    assert mixed["concurrency"]["atMax"] == f"{int(mixed['perGpu']['kvPoolBytes'] / request * 100) / 100:.2f}"
    refused = {c["accelerator"]: c for c in mixed["candidates"] if c["verdict"] == "Refused"}
    overhead = (512 << 20) + 13 * (60 * 12 + 30) * (12 << 10) + 2 * 4 * (262_144 + 5376) + (20 << 20)
    assert overhead / GIB == pytest.approx(0.63, abs=0.005)
    short = 57.36 + 0.98 + overhead / GIB + 0.88 - 19.74
    assert refused["NVIDIA-L4"]["shortfallBytes"] / GIB == pytest.approx(short, abs=0.015)
    assert refused["NVIDIA-L4"]["shortfallBytes"] / GIB == pytest.approx(40.11, abs=0.005)
    alone = _json(BLOCKS[1][0].replace(":2", ":1"), capsys)["plan"]
    assert isinstance(alone, dict)
    graphs = 22 * (60 * 12 + 30) * (12 << 10) + 2 * 24 * (262_144 + 5376) + (20 << 20)
    assert (alone["gpusPerReplica"], alone["maxModelLen"], alone["engine"]["maxNumSeqs"]) == (1, 3956 * 64, 24)
    assert alone["perGpu"]["overheadBytes"] == (704 << 20) + graphs
    cheap = _json(BLOCKS[2][0], capsys)["plan"]
    assert isinstance(cheap, dict)
    held = 512 * (4 * 64 * 2 * 512 * 2 * 2) + 17 * (20 * 32 * 2 * 256 * 2 * 2)
    assert (cheap["accelerator"], cheap["perRequest"]["atMaxBytes"], held) == (
        "NVIDIA-L4",
        held,
        int(533.25 * (1 << 20)),
    )
    assert cheap["concurrency"]["atMax"] == f"{int(cheap['perGpu']['kvPoolBytes'] / held * 100) / 100:.2f}" == "8.07"
