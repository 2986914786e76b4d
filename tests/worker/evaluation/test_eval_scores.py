"""What is said of two distributions of which the likeliest tokens are known, and endpoints that cannot say them."""

from __future__ import annotations

import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scoring_endpoint import ANSWER, ScoringServer
from scripted_endpoint import listening

from modelserve.quality.divergence import REST_FLOOR, kl_at_least, likeliest
from modelserve_tools.evaluation.__main__ import main

ASKED = ("--skills", "facts", "--n", "2", "--timeout", "20")


def _run(served: ScoringServer, reference: ScoringServer, *arguments: str) -> tuple[int, str, str]:
    with listening(served.app) as url, listening(reference.app) as other:
        return main(["--base-url", url, "--against", other, *ASKED, *arguments]), url, other


def _rows(chance: np.random.Generator, vocabulary: int) -> tuple[dict[int, float], dict[int, float], float]:
    """The 20 likeliest of two distributions, and their whole divergence."""
    one = chance.normal(size=vocabulary) * 3
    other = one + chance.normal(size=vocabulary) * chance.choice([0.01, 0.3, 3])
    logs = [values - np.logaddexp.reduce(values) for values in (one, other)]
    rows = [{int(i): float(log[i]) for i in np.argsort(-log)[:20]} for log in logs]
    return rows[0], rows[1], float(np.exp(logs[0]) @ (logs[0] - logs[1]))


def test_the_bound_is_never_above_the_divergence_and_near_it_where_the_rows_hold_most() -> None:
    chance = np.random.default_rng(11)
    for _ in range(300):
        one, other, whole = _rows(chance, int(chance.choice([21, 60, 5000])))
        assert 0 <= kl_at_least(one, other) <= whole + REST_FLOOR
        assert kl_at_least(one, one) == 0
    one, other, whole = _rows(np.random.default_rng(1), 20)
    assert kl_at_least(one, other) == pytest.approx(whole, rel=1e-3)


def test_by_hand() -> None:
    """0.5 of a and 0.25 of b beside 0.25 of both; the rest is 0.25 and 0.5. c is told by one alone."""
    one = {1: math.log(0.5), 2: math.log(0.25)}
    other = {1: math.log(0.25), 2: math.log(0.25), 3: math.log(0.4)}
    assert kl_at_least(one, other) == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(0.5))
    assert kl_at_least({1: 0.0}, {2: 0.0}) == 0  # nothing is known of both
    # What one excludes and the other is sure of: the rest, 1 and 1e-5, is not taken for 0.
    assert kl_at_least({1: math.log(1e-9)}, {1: 0.0}) == pytest.approx(math.log(1e5), abs=1e-6)


def test_equally_likely_tokens_are_all_the_likeliest() -> None:
    assert likeliest({1: -1.0, 2: -1.0, 3: -2.0}) == {1, 2}


def test_scores_of_both_are_compared_token_by_token(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 0.5 beside 0.3, where the next id is likelier than the token: both are known by hand."""
    code, _, _ = _run(ScoringServer(own=0.3), ScoringServer(own=0.5), "--json", "-")
    shown = capsys.readouterr()
    assert code == 0, shown.err
    answers = json.loads(shown.out)["scores"][0]
    kl = 0.5 * math.log(0.5 / 0.3) + 0.5 * math.log(0.5 / 0.7)
    assert (answers["texts"], answers["tokens"], answers["top_1_percent"]) == (2, 2 * len(ANSWER), 0)
    assert answers["mean_kl"] == pytest.approx(kl, rel=1e-6)
    assert answers["mean_shift"] == pytest.approx(math.log(0.5 / 0.3))
    assert ["answers", "facts", "-", "2", "6", f"{kl:.2e}"] in [line.split()[:6] for line in shown.err.splitlines()]


def test_an_echo_stands_in_for_prompt_logprobs(capsys: pytest.CaptureFixture[str]) -> None:
    documents = []
    for scores in ("prompt", "echo"):
        reference = ScoringServer(scores=scores)
        assert _run(ScoringServer(own=0.4), reference, "--concurrency", "1", "--json", "-")[0] == 0
        documents.append(json.loads(capsys.readouterr().out)["scores"])
    assert documents[0] == documents[1]
    assert [sorted(set(body) & {"echo", "prompt_logprobs"}) for body in reference.requests] == [
        [], ["prompt_logprobs"], ["echo"], [], ["echo"]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("served", "reference", "code", "said"),
    [
        ({"shift": 7}, {}, 2, "tokenizers or chat templates differ: exercise 0 of facts is"),
        ({"tokenizes": False}, {}, 3, "SERVED has no /tokenize beside its /v1 (HTTP 404 from"),
        ({}, {"tokenizes": False}, 3, "REFERENCE has no /tokenize"),
        ({"scores": "none"}, {}, 3, "SERVED does not score prompts: prompt_logprobs are refused (HTTP 400"),
        ({"scores": "text"}, {}, 3, "SERVED names tokens by their text ('t"),
        ({}, {"scores": "text"}, 3, "REFERENCE names tokens by their text ('t901')"),
    ],
)
def test_endpoints_that_cannot_be_compared(
    served: dict[str, Any], reference: dict[str, Any], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, url, other = _run(ScoringServer(**served), ScoringServer(**reference), "--concurrency", "1")
    message = capsys.readouterr().err.replace(url, "SERVED").replace(other, "REFERENCE")
    assert found == code
    assert said in message
    assert len(message.splitlines()) == 1


def test_a_text_that_failed_is_missing_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    served = ScoringServer()
    served.failing = 1
    code, url, _ = _run(served, ScoringServer(), "--concurrency", "1")
    shown = capsys.readouterr()
    assert code == 3
    assert f"facts: 1 texts failed, the first: HTTP 500 from {url}/completions: overheated" in shown.out
    assert shown.err == "modelserve-eval: 1 texts were not scored\n"


def test_a_gate_that_nothing_was_measured_for_does_not_hold(capsys: pytest.CaptureFixture[str]) -> None:
    far = ("--skills", "needle", "--distances", "9000", "--n", "1", "--kl-at-most", "1")
    assert _run(ScoringServer(), ScoringServer(), *far)[0] == 1
    shown = capsys.readouterr()
    assert "needle at 9000: not scored: " in shown.out
    assert "tokens are more than the 8192 that a scored text may have" in shown.out
    assert shown.err == "modelserve-eval: mean KL of answers above 1 nats: not measured\n"


def test_models_that_the_reference_does_not_serve(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, other = _run(ScoringServer(), ScoringServer(), "--against-model", "huge")
    assert code == 2
    said = f"modelserve-eval: --against-model huge: {other} serves scripted; name one of them\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--against", "http://b:0/v1"], "'http://b:0/v1' is no HTTP address"),
        (["--kl-at-most", "1"], "--kl-at-most needs --against"),
        (["--against", "http://b/v1", "--record", "f"], "--record is of a reference, --against compares with one"),
        (["--against-model", "x"], "--against-model and --against-api-key-env belong to the address"),
    ],
)
def test_flags_that_do_not_fit(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--base-url", "http://a/v1", *flags])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_what_is_neither_a_file_nor_an_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before anything is asked: nothing listens there."""
    ours = ["--base-url", "http://127.0.0.1:9/v1", "--against"]
    assert main([*ours, str(tmp_path / "none")]) == 2
    assert "none is no file and no HTTP address; write http://HOST:PORT/v1, or a file" in capsys.readouterr().err
    assert main([*ours, str(tmp_path)]) == 2
    said = f"{tmp_path} is a directory; serve the checkpoint (modelserve-worker serve --model {tmp_path})"
    assert said in capsys.readouterr().err


def test_recordings_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = tmp_path / "reference"
    with listening(ScoringServer().app) as url:
        assert main(["--base-url", url, *ASKED, "--record", str(recording)]) == 0
        assert main(["--base-url", url, *ASKED, "--against", str(recording)]) == 0
        assert "answers    all" in capsys.readouterr().out
        whole = recording.read_bytes()
        lines = gzip.decompress(whole).splitlines(keepends=True)
        text = json.loads(lines[1])
        damaged = {
            "name a file that --record wrote, or the URL": b"no gzip",
            "Compressed file ended": whole[: len(whole) // 2],
            "the recording ends early; record it again": gzip.compress(b"".join(lines[:-1])),
            "line 1: ": gzip.compress(b"{}\n"),
            "line 2: its rows are not those of its tokens": gzip.compress(
                b"".join([lines[0], json.dumps(text | {"answer": [7]}).encode() + b"\n", *lines[2:]])
            ),
            "line 2: Input should be a finite number": gzip.compress(
                b"".join([lines[0], re.sub(rb'":-[^,}]*', b'":-1e999', lines[1], count=1), *lines[2:]])
            ),
        }
        for said, content in damaged.items():
            recording.write_bytes(content)
            assert main(["--base-url", url, *ASKED, "--against", str(recording)]) == 2, said
            assert said in capsys.readouterr().err
