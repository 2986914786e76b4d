"""Queries over rows that a target has stored: kernels against plain PyTorch, and that one against all rows at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from assisted import write_assistant
from attention_tables import attention_table
from full_logits import forward_hidden
from model_checkpoints import load_checkpoint, make_checkpoint, random_tokens
from test_kernel_path import padding_rows_hold_anything  # noqa: F401 - a fixture, of every test

from modelserve.model.architecture import LayerKind
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.kernels.attention import triton_launches
from modelserve_worker.runner.model_runner import GPUModelRunner
from modelserve_worker.weights.loader import load_assistant

LENGTHS, LONGEST = (37, 5), 64


@pytest.fixture(autouse=True)
def few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launches, "most_splits", lambda _: 2)


@pytest.mark.drawn
@pytest.mark.parametrize(("variant", "kv"), [
    ("31B", KVCacheDtype.FLOAT32), ("31B", KVCacheDtype.INT8), ("E4B", KVCacheDtype.FLOAT32),
])  # fmt: skip
def test_kernels_read_what_plain_attention_reads(variant: str, kv: KVCacheDtype, tmp_path: Path, driver_for) -> None:
    """The last row that counts may lie before the last one stored, and the window may begin inside a page; a row of
    padding stands among those of requests."""
    make_checkpoint(variant, tmp_path / "target", seed=2, head_dim=64, global_head_dim=128)
    write_assistant(tmp_path / "drafter", tmp_path / "target", seed=3)
    model = load_checkpoint(tmp_path / "target")
    geometry = cache_geometry(
        model.architecture, dtype=kv, tensor_parallel_size=1,
        layout=KVCacheLayout.least(model.architecture),
    )  # fmt: skip
    cache = KVCache(geometry, 1 << 22, device=torch.device("cpu"))
    cache.arena.fill_(0xFF)
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": LONGEST}
    plain, kernels = (
        GPUModelRunner(model, cache, **sizes, table=table)
        for table in (None, attention_table(model.architecture, geometry))
    )
    driver = driver_for(geometry, cache.pool_bytes)
    for slot, length in enumerate(LENGTHS):
        batch = driver.batch(driver.share(str(slot), random_tokens(length, seed=length), slot=slot))
        forward_hidden(plain, batch)
        kernels.tables.apply({LayerKind.GLOBAL: batch.global_updates, LayerKind.SLIDING: batch.sliding_updates})
    assistant = load_assistant(tmp_path / "drafter", model)
    kinds = [assistant.architecture.kind(layer) for layer in range(4)]
    slots, last = (torch.tensor(values, dtype=torch.int32) for values in ((0, -1, 1, 0), (33, -1, 4, 36)))
    last[3] = 36 if variant == "E4B" else 35
    generator = torch.Generator().manual_seed(7)
    for layer in (2, 3):
        attention = assistant.decoder_layers()[layer].attention
        projected = torch.randn(4, attention.q_heads * attention.head_dim, generator=generator)
        rotation = assistant.rope.rotations(last + 1)[kinds[layer]]
        outputs = []
        for runner in (plain, kernels):
            reader = runner.caches().cache_reader(kinds)
            reader.begin(slots, last)
            outputs.append(reader.attend(attention, projected, rotation, None))
        counted = last >= 0
        assert float(outputs[0][counted].abs().max()) > 0.1
        assert (outputs[0] - outputs[1])[counted].abs().max() < (1e-5 if kv is KVCacheDtype.FLOAT32 else 1e-2)
