"""What the command says of odd input: the field that caused it, a name that exists, and an end within bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from modelserve.api.spec import ModelServeSpec
from modelserve.bounded_yaml import MOST_BY_ALIASES, load_document, load_documents
from modelserve.catalogue import user_catalogue
from modelserve.cli.__main__ import main
from modelserve.cli.kubectl_plugin import main as plugin
from modelserve.errors import InvalidInput
from modelserve.hardware import CATALOGUE
from modelserve.planning.planner import plan
from modelserve.planning.pools.offers import AcceleratorOffer
from modelserve.published import published_model

URI = "hf://google/gemma-4-31B-it"
BOMB = "a0: &a0 x\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)  # nine levels of nine: 430 million values


def _write(tmp_path: Path, text: str) -> str:
    (tmp_path / "serve.yaml").write_text(text)
    return str(tmp_path / "serve.yaml")


def _serve(**spec: Any) -> str:
    return yaml.safe_dump(
        {
            "apiVersion": "serving.modelserve.dev/v1alpha1",
            "kind": "ModelServe",
            "metadata": {"name": "chat"},
            "spec": {"model": {"uri": URI}, **spec},
        }
    )


@pytest.mark.parametrize("program", [main, plugin], ids=["modelserve", "kubectl-modelserve"])
def test_aliases_that_stand_for_a_billion_values_are_refused(
    program: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = _write(tmp_path, _serve() + "x:\n" + "".join(f"  {line}\n" for line in BOMB.splitlines()))
    assert program(["plan", "-f", file]) == 2
    said = capsys.readouterr().err
    assert "aliases stand for" in said
    assert f"at most {MOST_BY_ALIASES:,} are read" in said


def test_the_bound_is_on_what_aliases_add_and_not_on_what_is_written() -> None:
    shared = "base: &base {a: 1, b: [1, 2, 3]}\nuses: [*base, *base]\nmerged: {<<: *base, c: 2}\n"
    assert load_document(shared)["merged"] == {"a": 1, "b": [1, 2, 3], "c": 2}
    many = yaml.safe_dump([{"n": number} for number in range(2000)])
    assert len(load_document(many)) == 2000
    with pytest.raises(InvalidInput, match="part of"):
        list(load_documents("a: &a [*a]"))
    with pytest.raises(InvalidInput, match="aliases stand for"):
        list(load_documents("--- 1\n---\n" + BOMB))
    with pytest.raises(InvalidInput, match="aliases stand for"):
        list(load_documents("a: &a {x: [" + "1," * 400 + "]}\nb: {<<: [" + "*a," * 300 + "]}"))
    assert list(load_documents("")) == []
    assert load_document("") is None


def test_a_catalogue_with_such_aliases_names_its_entry() -> None:
    with pytest.raises(InvalidInput, match=r"catalogue entry 'NVIDIA-X': YAML aliases stand for"):
        user_catalogue({"NVIDIA-X": BOMB})


@pytest.mark.parametrize(
    ("text", "first"),
    [("H100", "NVIDIA-H100-80GB-HBM3"), ("h200", "NVIDIA-H200"), ("A100", "NVIDIA-A100-SXM4-40GB"), ("3090", "3090")],
)
def test_a_part_of_a_name_suggests_what_most_have(
    text: str, first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "-f", _write(tmp_path, _serve()), "--accelerator", text]) == 2
    said = capsys.readouterr().err
    nearest = said.partition("nearest are ")[2].split(";")[0].split(", ")
    assert first in nearest[0]
    assert all(text.upper() in each for each in nearest)
    assert "--nodes FILE" in said


def test_a_mig_slice_is_planned_from_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--accelerator", "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb"]
    assert main(["plan", "-f", _write(tmp_path, _serve()), *flags]) == 2
    assert "is a MIG slice, which is planned from the nodes that have it: use --nodes FILE" in capsys.readouterr().err


def test_a_number_where_text_belongs_is_to_be_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _write(tmp_path, _serve(kvCache={"gpuMemoryUtilization": 0.9}))
    assert main(["plan", "-f", file]) == 2
    said = capsys.readouterr().err
    assert 'kvCache.gpuMemoryUtilization: Input should be a valid string; got 0.9: quote it, "0.9"' in said
    file = _write(tmp_path, _serve(accelerators={"nodeSelector": {"team": True}}))
    assert main(["plan", "-f", file]) == 2
    assert 'quote it, "true"' in capsys.readouterr().err


def _remedy(product: str, gpus: int, **fields: Any) -> str:
    facts = published_model(URI)
    assert facts is not None
    spec = ModelServeSpec.model_validate({"model": {"uri": URI}, **fields})
    (candidate,) = plan(spec, facts.architecture, [AcceleratorOffer(CATALOGUE[product], gpus)]).candidates
    assert candidate.verdict == "Refused"
    return candidate.remedy or ""


def test_a_remedy_names_the_setting_that_has_to_change() -> None:
    h100 = "NVIDIA-H100-80GB-HBM3"
    three = _remedy(h100, 8, parallelism={"tensor": 3})
    assert three.startswith(f"fits on 2 x {h100} of one node (parallelism.tensor 2, or left out)")
    eight = _remedy(h100, 4, parallelism={"tensor": 8})
    assert eight.startswith(f"fits on 4 x {h100} of one node (parallelism.tensor 4, or left out)")
    little = _remedy("NVIDIA-H200", 1, kvCache={"gpuMemoryUtilization": "0.1"})
    assert little.startswith("fits with kvCache.gpuMemoryUtilization 0.9 or left out")
    assert "gpuMemoryUtilization" not in _remedy("NVIDIA-L4", 1)
