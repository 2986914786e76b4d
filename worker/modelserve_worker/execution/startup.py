"""Start-up of one rank, in order: read the config, load the weights, profile one step, size the pool, allocate it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from modelserve.architecture import ModelArchitecture
from modelserve.engine_args import EngineArgs
from modelserve.errors import InvalidInput
from modelserve.inspection import CONFIG_FILE, read_json_object
from modelserve.sizing.activation import PROMPT_SCORE_ROWS
from modelserve.sizing.cuda_graphs import graphs_bytes
from modelserve.sizing.memory import KEYS_PER_PASS
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import AdmittedRequest, ScheduledBatch, TableUpdates
from modelserve_worker.execution.device import (
    check_formats,
    compute_dtype,
    select_device,
    select_geometry,
    with_compute_dtype,
)
from modelserve_worker.execution.device_memory import used_bytes
from modelserve_worker.execution.kv_cache import KVCache
from modelserve_worker.execution.loader import load_model
from modelserve_worker.execution.memory import GPUMemoryProbe, MemoryUse, cpu_memory_use, negotiate_model_len
from modelserve_worker.execution.memory_report import MemoryReport
from modelserve_worker.execution.model_runner import GPUModelRunner
from modelserve_worker.execution.parallel import TensorParallel, join_tensor_parallel
from modelserve_worker.execution.weights import InvalidCheckpoint
from modelserve_worker.execution.weights_progress import ProgressCallback
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.request import SamplingParams
from modelserve_worker.text.checkpoint_text import read_eos_token_ids

_CPU_PROFILE_TOKENS = 64  # nothing is measured on the CPU: the step shows that the model runs
# Every filter and penalty on, so that the profile step holds every temporary of sampling.
_PROFILE_SAMPLING = SamplingParams(
    seed=0, max_tokens=1, top_k=2, top_p=0.5, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.1,
    frequency_penalty=0.1, logprobs=20, prompt_logprobs=20,
)  # fmt: skip

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartedRank:
    """A rank that is ready for its first step."""

    runner: GPUModelRunner
    architecture: ModelArchitecture
    memory: MemoryReport


def read_architecture(directory: Path) -> ModelArchitecture:
    """Geometry from DIRECTORY/config.json, EOS ids from it and from generation_config.json where there is one.

    Raises InvalidCheckpoint when config.json cannot be read, else InvalidInput or UnsupportedModel.
    """
    try:
        config = read_json_object(directory / CONFIG_FILE)
    except InvalidInput as error:
        raise InvalidCheckpoint(str(error)) from error
    architecture = ModelArchitecture.from_config(config)
    generation = directory / "generation_config.json"
    named = read_eos_token_ids(generation)
    if any(token >= architecture.vocab_size for token in named):
        raise InvalidInput(
            f"{generation}: eos_token_id {list(named)}; give token ids in 0..{architecture.vocab_size - 1}"
        )
    return architecture.model_copy(update={"eos_token_ids": tuple(sorted({*architecture.eos_token_ids, *named}))})


def start_rank(
    args: EngineArgs, *, rank: int, init_method: str, progress: ProgressCallback | None = None
) -> StartedRank:
    """Start one rank; all ranks of a group call this with the same `args` and meet in its collectives.

    Raises InvalidInput (and its subclasses for checkpoint and device) and InsufficientMemory.
    """
    device = select_device(args, rank=rank)
    directory = Path(args.model)
    architecture = with_compute_dtype(read_architecture(directory), args)
    geometry = select_geometry(architecture, args)
    check_formats(device, architecture, geometry)
    used_before = 0
    if device.type == "cuda":
        used_before = used_bytes(device)
        torch.cuda.set_device(device)
    elif args.tensor_parallel_size > 1:  # ranks share the cores
        torch.set_num_threads(max(1, torch.get_num_threads() // args.tensor_parallel_size))
    probe = GPUMemoryProbe(device, used_before=used_before) if device.type == "cuda" else None
    parallel = join_tensor_parallel(
        rank=rank, size=args.tensor_parallel_size, init_method=init_method, device=device
    )  # fmt: skip
    dtype = compute_dtype(architecture)
    if probe is not None and parallel.size > 1:
        # The channels of a communicator are made by its first collective, so a step's largest one comes first.
        residual = torch.zeros(args.max_num_batched_tokens, architecture.hidden_size, dtype=dtype, device=device)
        parallel.all_reduce(residual)
        torch.cuda.synchronize(device)
        probe.joined()
        del residual
    model = load_model(
        architecture,
        directory,
        parallel=parallel,
        device=device,
        dtype=dtype,
        load_format=args.load_format,
        seed=args.seed,
        progress=progress,
    )
    runner, use = _profile(model, args, geometry, device, probe)
    use, pool_bytes = _agree(use, parallel, device)
    max_model_len = negotiate_model_len(architecture, geometry, args, pool_bytes=pool_bytes)
    runner.use_cache(KVCache(geometry, pool_bytes, device=device, debug_stamps=args.debug_kv_stamps))
    overhead = dict(use.overhead)
    if probe is not None:
        # The temporaries of captured steps lie in a pool that takes the place of what the profile's steps used.
        overhead["graphs"] = max(0, probe.captured(runner.capture_graphs) - use.activation_bytes)
        if overhead["graphs"] > use.overhead["graphs"]:
            logger.warning(
                "CUDA graphs take %d bytes, %d were set aside: the device is used by so much more than its share",
                overhead["graphs"],
                use.overhead["graphs"],
            )
    memory = MemoryReport(
        device="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        total_bytes=use.total_bytes,
        budget_bytes=use.budget_bytes,
        weights_bytes=use.weights_bytes,
        activation_bytes=use.activation_bytes,
        overhead=overhead,
        pool_bytes=pool_bytes,
        geometry=geometry,
        max_model_len=max_model_len,
    )
    logger.info(
        "rank %d of %d on %s: weights %.3f, activation %.3f, overhead %.3f, KV pool %.3f GiB; contexts to %d tokens%s",
        rank,
        args.tensor_parallel_size,
        memory.device,
        *(term / (1 << 30) for term in (use.weights_bytes, use.activation_bytes, sum(overhead.values()), pool_bytes)),
        max_model_len,
        ""
        if args.max_model_len in ("auto", max_model_len)
        else f" (asked for {args.max_model_len}: the pool is smaller)",
    )
    return StartedRank(runner, architecture, memory)


def _profile(
    model: Gemma4ForCausalLM,
    args: EngineArgs,
    geometry: CacheGeometry,
    device: torch.device,
    probe: GPUMemoryProbe | None,
) -> tuple[GPUModelRunner, MemoryUse]:
    """Run the heaviest step over a cache of one page per kind, which every page table entry names."""
    on_gpu = probe is not None
    if probe is not None:
        probe.loaded()
    longest = model.architecture.max_position_embeddings
    page_bytes = geometry.global_page.page_bytes + geometry.sliding_page.page_bytes
    scratch = KVCache(geometry, page_bytes, device=device)
    scratch.arena.zero_()
    runner = GPUModelRunner(
        model,
        scratch,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_seqs=args.max_num_seqs,
        max_model_len=longest,
    )
    tokens = min(args.max_num_batched_tokens if on_gpu else _CPU_PROFILE_TOKENS, longest)
    start = min(KEYS_PER_PASS, longest - tokens) if on_gpu else 0
    runner.profile(profile_batches(start=start, tokens=tokens, rows=args.max_num_seqs if on_gpu else 1))
    if probe is not None:
        graphs = graphs_bytes(
            model.architecture,
            tensor_parallel_size=args.tensor_parallel_size,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_num_seqs=args.max_num_seqs,
        )
        return runner, probe.measure(args.gpu_memory_utilization, scratch_bytes=page_bytes, graphs_bytes=graphs)
    return runner, cpu_memory_use(model.architecture, geometry, args, weights_bytes=model.parameter_bytes())


def profile_batches(*, start: int, tokens: int, rows: int) -> tuple[ScheduledBatch, ...]:
    """A prefill chunk of positions [start, start + tokens), then `rows` decodes. Every table entry names page 0."""
    requests = tuple(AdmittedRequest(slot, f"profile-{slot}", _PROFILE_SAMPLING, (0,), ()) for slot in range(rows))
    scored = min(start + tokens, start + 1 + PROMPT_SCORE_ROWS)  # one block of the chunk's rows
    first = replace(requests[0], prompt_token_ids=(0,) * scored)
    chunk = _profile_batch(0, slots=1, start=start, length=tokens, admitted=(first,))
    return chunk, _profile_batch(1, slots=rows, start=start, length=1, admitted=requests)


def _profile_batch(
    step: int, *, slots: int, start: int, length: int, admitted: tuple[AdmittedRequest, ...]
) -> ScheduledBatch:
    nothing = np.zeros(0, dtype=np.int32)
    no_updates = TableUpdates(nothing, nothing, nothing)
    return ScheduledBatch(
        step=step,
        slots=np.arange(slots, dtype=np.int32),
        starts=np.full(slots, start, dtype=np.int32),
        lengths=np.full(slots, length, dtype=np.int32),
        samples=np.ones(slots, dtype=np.bool_),
        output_counts=np.zeros(slots, dtype=np.int32),
        token_ids=np.zeros(slots * length, dtype=np.int32),
        admitted=admitted,
        page_moves=(),
        global_updates=no_updates,
        sliding_updates=no_updates,
    )


def _agree(use: MemoryUse, parallel: TensorParallel, device: torch.device) -> tuple[MemoryUse, int]:
    """The smallest pool over ranks, so that page numbers mean the same on all, and the largest of the other terms."""
    if parallel.size == 1:
        return use, use.left_bytes
    names = sorted(use.overhead)
    terms = (-use.left_bytes, use.weights_bytes, use.activation_bytes, *(use.overhead[name] for name in names))
    agreed = torch.tensor(terms, dtype=torch.int64, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=parallel.group)
    negated_pool, weights, activation, *overhead = agreed.tolist()
    largest = dict(zip(names, overhead, strict=True))
    return MemoryUse(use.total_bytes, use.budget_bytes, weights, activation, largest), -negated_pool
