"""Sizing's formulas of the GPU path's buffers against the rules by which the kernels' modules allocate them."""

from __future__ import annotations

import pytest
import torch
from rank_of import rank_of

from modelserve.engine_args import EngineArgs
from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve.published import published_model, published_uris
from modelserve.sizing.kernel_buffers import ROTATION_TILE_KEYS, expansion_keys, kernel_buffers
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve.sizing.speculation import Speculation
from modelserve_worker.kernels.attention import triton_launches as kernels
from modelserve_worker.kernels.attention.bound_kernels import AttentionKernels
from modelserve_worker.kernels.attention.paged_layout import layer_rows
from modelserve_worker.startup.accelerator_check import DeviceFacts
from modelserve_worker.startup.device import device_facts, kernel_table, select_geometry
from modelserve_worker.step.block_tables import BlockTables
from modelserve_worker.step.input_batch import StepPacker
from modelserve_worker.step.step_size import QueryBlocks

SEQUENCES, CHUNK = 24, 512
META = torch.device("meta")


def _architectures() -> list[ModelArchitecture]:
    found = [published_model(uri) for uri in published_uris()]
    return list({facts.architecture.model_dump_json(): facts.architecture for facts in found if facts}.values())


@pytest.mark.parametrize("tp", [1, 2])
def test_buffers_are_what_the_path_allocates(tp: int) -> None:
    for architecture in _architectures():
        layout = KVCacheLayout.least(architecture)
        dtype, longest = KVCacheDtype.BFLOAT16, architecture.max_position_embeddings
        geometry = cache_geometry(architecture, dtype=dtype, layout=layout, tensor_parallel_size=tp)
        settings = rank_of(architecture, tensor_parallel_size=tp, max_num_batched_tokens=CHUNK, max_num_seqs=SEQUENCES)
        sized = kernel_buffers(architecture, settings)
        tables = BlockTables(geometry, max_num_seqs=SEQUENCES, max_model_len=longest, device=META)
        assert sized["block_tables"] == sum(table.nbytes for table in tables.host.values())
        rows = {
            page.kind: layer_rows(geometry, page.layers[0], pool_bytes=1 << 30)
            for page in (geometry.global_page, geometry.sliding_page)
        }
        heads = architecture.num_attention_heads // tp
        words = max(kernels.decode_workspace(each, query_heads=heads) for each in rows.values())
        assert sized["decode_splits"] == SEQUENCES * words * 4
        assert expansion_keys(longest) >= max(longest, 1 << 16)
        per_key = kernels.scratch_per_key(rows[LayerKind.GLOBAL], pairs=architecture.global_rotary_pairs)
        assert sized["expanded_keys"] == expansion_keys(longest) * per_key * 2
        assert (per_key > 0) == (layout is KVCacheLayout.V_ONLY)
        rotation = 0
        if layout is KVCacheLayout.V_ONLY:
            keys = AttentionKernels.over(rows[LayerKind.GLOBAL], capability=90, query_heads=heads).decode_keys
            assert keys == ROTATION_TILE_KEYS
            pairs = architecture.global_rotary_pairs
            made = kernels.tile_turns(torch.zeros(pairs), pairs=pairs, keys=keys, longest=longest, dtype=dtype)
            rotation = sum(part.nbytes for part in (made.start_cos, made.start_sin, made.turn_cos, made.turn_sin))
        assert rotation <= sized["rotation_tables"] <= rotation + 1024


@pytest.mark.parametrize(("sequences", "drafts"), [(48, 0), (SEQUENCES, 0), (SEQUENCES, 1), (48, 8), (SEQUENCES, 16)])
def test_the_metadata_of_a_step_is_what_its_buffers_hold(sequences: int, drafts: int) -> None:
    architecture = _architectures()[0]
    geometry = cache_geometry(
        architecture, dtype=KVCacheDtype.BFLOAT16, layout=KVCacheLayout.KV, tensor_parallel_size=1
    )
    packer = StepPacker(
        geometry, max_num_batched_tokens=CHUNK, max_num_seqs=sequences, max_model_len=1024, vocab_size=64,
        blocks=QueryBlocks(1, 1, 1), device=torch.device("cpu"), most_rows=1 + drafts,
    )  # fmt: skip
    held = sum(staging._device.nbytes for staging in (packer._decodes, packer._any))
    settings = rank_of(
        architecture, max_num_batched_tokens=CHUNK, max_num_seqs=sequences, kv_layout=KVCacheLayout.KV,
        speculation=Speculation(drafts),
    )  # fmt: skip
    sized = kernel_buffers(architecture, settings)
    assert abs(sized["step_metadata"] - held) <= 64  # the count of rows, and padding of sections to 16 bytes


def test_a_gpu_has_a_table_of_kernels_and_a_cpu_plain_pytorch() -> None:
    gpu, args = DeviceFacts("NVIDIA A100", 80 << 30, (8, 0)), EngineArgs(model="m")
    for architecture in _architectures():
        geometry = select_geometry(architecture, args)
        assert kernel_table(gpu, architecture, geometry, args).capability == 80
        assert kernel_table(gpu, architecture, geometry, args).on_kernels
        assert not kernel_table(device_facts(torch.device("cpu")), architecture, geometry, args).on_kernels
