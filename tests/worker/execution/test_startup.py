"""What a rank reads and runs before it is ready."""

from __future__ import annotations

import json

import pytest
import torch
from model_checkpoints import load_checkpoint, make_checkpoint

from modelserve.errors import InvalidInput
from modelserve.sizing.activation import PROMPT_SCORE_ROWS
from modelserve_tools.tiny.variants import config_json
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.runner.model_runner import GPUModelRunner
from modelserve_worker.startup.profile_steps import profile_batches
from modelserve_worker.step.sampling_slots import SamplingSlots
from modelserve_worker.weights.checkpoint_config import read_architecture
from modelserve_worker.weights.files import InvalidCheckpoint


def test_eos_ids_come_from_both_files(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json("31b") | {"eos_token_id": [1, 50]}))
    assert read_architecture(tmp_path).eos_token_ids == (1, 50)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [106, 1]}))
    assert read_architecture(tmp_path).eos_token_ids == (1, 50, 106)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert read_architecture(tmp_path).eos_token_ids == (1, 7, 50)


@pytest.mark.parametrize("content", [None, "{", "\xff"])
def test_a_config_that_cannot_be_read_names_the_file(tmp_path, content) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(InvalidCheckpoint, match=r"config\.json cannot be read"):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("eos", "complaint"),
    [
        ("</s>", "'</s>'"),
        (True, "True"),
        ([-1], r"\[-1\]"),
        ([1, 10**9], r"\[1, 1000000000\]"),
    ],
)
def test_an_eos_id_that_is_no_token_is_refused(tmp_path, eos, complaint) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json("31b")))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(
        InvalidInput,
        match=rf"generation_config\.json: eos_token_id {complaint}; give one or several token ids in 0\.\.\d+",
    ):
        read_architecture(tmp_path)


@pytest.mark.parametrize("variant", ["31B", "E4B", "26B-A4B"])
@pytest.mark.parametrize(("start", "tokens"), [(0, 64), (1000, 70), (0, 1)])
def test_the_profile_step_needs_two_pages_whatever_the_context(
    tmp_path, geometry_of, monkeypatch, variant, start, tokens
) -> None:
    """Every table entry names the same page; a chunk and a full batch sample, and no slot remembers it."""
    make_checkpoint(variant, tmp_path, seed=1)
    model = load_checkpoint(tmp_path)
    geometry = geometry_of(model.architecture)
    pool = geometry.global_page.page_bytes + geometry.sliding_page.page_bytes
    cache = KVCache(geometry, pool, device=torch.device("cpu"))
    cache.arena.zero_()
    runner = GPUModelRunner(model, cache, max_num_batched_tokens=tokens, max_num_seqs=8, max_model_len=2000)
    rows: list[int] = []
    head = model.head
    monkeypatch.setattr(model, "head", lambda hidden: rows.append(len(hidden)) or head(hidden))
    sampler, counted = runner._sampler, []
    reset = sampler.reset
    monkeypatch.setattr(sampler, "reset", lambda: counted.append(int(sampler._seen.count_nonzero())) or reset())
    batches = profile_batches(start=start, tokens=tokens, rows=8)
    assert [(b.num_requests, b.num_tokens, set(b.starts.tolist())) for b in batches] == [
        (1, tokens, {start}), (1, tokens, {start}), (8, 8, {start}), (8, 8, {start})
    ]  # fmt: skip
    drawn = SamplingSlots(max_num_seqs=8, vocab_size=model.architecture.vocab_size, device=cache.arena.device)
    for batch, filtered in zip(batches, (True, True, True, False), strict=True):
        drawn.admit(batch.admitted)
        chosen = drawn.paths(batch.slots).filtered
        assert chosen.tolist() == [filtered] * batch.num_requests, "both kinds of rows run before requests come"
    runner.profile(batches)
    block = [min(PROMPT_SCORE_ROWS, tokens - 1)] if tokens > 1 else []
    assert rows == [*block, 1, 1, 8, 8], "a block of the first chunk is scored, then rows are sampled"
    assert counted[0] > 0, "the profile's requests have penalties"
    assert not sampler._seen.any()
