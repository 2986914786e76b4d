"""Start-up of one rank, in order: read the config, load the weights, profile one step, size the pool, allocate it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from modelserve import inspection
from modelserve.engine_args import EngineArgs
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.audio import RATE
from modelserve.sizing.activation import sampling_bytes
from modelserve.sizing.backends.table import KernelTable
from modelserve.sizing.communicator import environment
from modelserve.sizing.cuda_graphs import graphs_bytes
from modelserve.sizing.pages import CacheGeometry
from modelserve.sizing.rank_sums import peer_bytes, peer_rows_layout
from modelserve_worker.adapters.slots import AdapterSlots
from modelserve_worker.adapters.store import AdapterStore
from modelserve_worker.cache.host_memory import HostMemory
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.drafters.drafter import Drafter
from modelserve_worker.host_pages import HostProgress
from modelserve_worker.kernels.operations import Operations
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.layers.placement import Placement
from modelserve_worker.models.exact_check import check_exact
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.ranks.process_group import join_tensor_parallel
from modelserve_worker.runner.model_runner import GPUModelRunner
from modelserve_worker.startup.accelerator_check import DeviceFacts, check_accelerator
from modelserve_worker.startup.cpu_malloc import keep_freed_memory
from modelserve_worker.startup.device import (
    compute_dtype,
    device_facts,
    kernel_table,
    select_device,
    select_geometry,
    with_compute_dtype,
)
from modelserve_worker.startup.drafter_loading import drafter_of
from modelserve_worker.startup.memory import (
    GPUMemoryProbe,
    InsufficientMemory,
    MemoryUse,
    cpu_memory_use,
    negotiate_model_len,
)
from modelserve_worker.startup.memory_report import MemoryReport
from modelserve_worker.startup.nvml import used_bytes
from modelserve_worker.startup.profile_steps import audio_steps, heaviest_steps, image_steps
from modelserve_worker.startup.timed_steps import timed_steps
from modelserve_worker.step.embedded_rows import MostRows
from modelserve_worker.step_seconds import StepSeconds
from modelserve_worker.weights.checkpoint_config import read_architecture, read_audio, read_images, read_weight_format
from modelserve_worker.weights.loader import load_model
from modelserve_worker.weights.progress import ProgressCallback

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartedRank:
    """A rank that is ready for its first step."""

    runner: GPUModelRunner
    architecture: ModelArchitecture
    memory: MemoryReport
    step_seconds: StepSeconds | None  # of its steps, on a CPU


def start_rank(
    args: EngineArgs,
    *,
    rank: int,
    init_method: str,
    progress: ProgressCallback | None = None,
    on_host_progress: Callable[[HostProgress], None] | None = None,
    compilers: Path | None = None,
) -> StartedRank:
    """Start one rank; all ranks of a group call this with the same `args` and meet in its collectives. Host memory for
    cached pages is pinned from then on, in the background. `compilers`: kernels that are in no cache are waited for
    while the lock of this file is held (`kernels_ahead`).

    Raises InvalidInput (and its subclasses for checkpoint and device), InsufficientMemory, and TerminalError where a
    kernel can be neither found nor compiled.
    """
    phases = Phases()
    visible = 0 if args.device == "cpu" else torch.cuda.device_count()
    device = select_device(args, rank=rank, visible=visible)
    found = device_facts(device)
    if found is not None:
        check_accelerator(args, found)
    directory = Path(args.model)
    architecture = with_compute_dtype(read_architecture(directory), args)
    weight_format = read_weight_format(directory)
    images, audio = read_images(args), read_audio(args)
    speculation = inspection.read_speculation(args, architecture)
    geometry = select_geometry(architecture, args, speculation.draft_cache)
    table = kernel_table(found, architecture, geometry, args, weight_format)
    used_before = 0
    if device.type == "cuda":
        used_before = used_bytes(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
        if args.tensor_parallel_size > 1:  # ranks share the cores
            torch.set_num_threads(max(1, torch.get_num_threads() // args.tensor_parallel_size))
    compilations: Callable[[], AbstractContextManager[None]] = nullcontext
    if table.on_kernels:
        from modelserve_worker.kernels.compiling import kernel_cache

        kernel_cache.use_kernel_cache()
        compilations = kernel_cache.compilations
    probe = GPUMemoryProbe(device, used_before=used_before) if device.type == "cuda" else None
    step_rows = max(args.max_num_batched_tokens, speculation.step_rows(args.max_num_seqs))
    parallel = _join(args, architecture, table, device, probe, rank=rank, init_method=init_method, step_rows=step_rows)
    if rank == 0:
        logger.info("kernels: %s", "\n  ".join(table.lines()))
    phases.end("device")
    placement = Placement(device, compute_dtype(architecture), parallel, weight_format, Operations(table, device))
    model = load_model(
        architecture, directory, placement, images=None if images is None else images.architecture,
        audio=None if audio is None else audio.architecture,
        load_format=args.load_format, seed=args.seed, progress=progress,
    )  # fmt: skip
    if table.on_kernels:  # not before: what loads and joins runs few kernels, and those are here sooner
        kernel_cache.wait_for_compilers(compilers)
    if model.operations.exact:
        with compilations():
            check_exact(model)
    drafter = drafter_of(args, model, speculation)
    adapters = None
    if args.adapters is not None:
        adapters = AdapterStore(AdapterSlots(model, args.adapters), architecture, ranks=args.tensor_parallel_size)
    phases.end("weights")
    beside_graphs = 0
    if table.on_kernels:
        few_rows = speculation.step_rows(args.max_num_seqs)
        beside_graphs = sampling_bytes(architecture, rows=few_rows, tensor_parallel_size=args.tensor_parallel_size)
    with compilations():
        runner, use = _profile(
            model, args, geometry, device, probe, drafter=drafter, adapters=adapters,
            beside_graphs_bytes=beside_graphs,
        )  # fmt: skip
    step_seconds = None
    if probe is None:
        step_seconds = timed_steps(
            runner,
            most_rows=args.max_num_batched_tokens,
            longest=architecture.max_position_embeddings,
            weights_bytes=model.parameter_bytes(),
            ranks=args.tensor_parallel_size,
        )
    phases.end("profile")
    use, pool_bytes = _agree(use, parallel, device)
    try:
        max_model_len = negotiate_model_len(architecture, geometry, args, pool_bytes=pool_bytes)
    except InsufficientMemory as error:
        if probe is not None:
            error.measured = {"weights": use.weights_bytes, "activation": use.activation_bytes, **use.overhead}
        raise
    runner.use_cache(KVCache(geometry, pool_bytes, device=device, debug_stamps=args.debug_kv_stamps))
    overhead = dict(use.overhead)
    if probe is not None:
        # The temporaries of captured steps lie in a pool that takes the place of what the profile's steps used.
        in_profile = use.activation_bytes - beside_graphs
        with compilations():
            overhead["graphs"] = max(0, probe.captured(runner.capture_graphs) - in_profile)
        if overhead["graphs"] > use.overhead["graphs"]:
            logger.warning(
                "CUDA graphs take %d bytes, %d were set aside: the device is used by so much more than its share",
                overhead["graphs"],
                use.overhead["graphs"],
            )
    if table.on_kernels:
        from modelserve_worker.kernels.compiling.late_compilation import log_late_compilations  # Triton, on GPUs alone

        log_late_compilations()
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
        weight_format=weight_format,
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
    phases.end("graphs")
    if args.host_cache_bytes:  # not before: a GPU that captures a graph does not pin memory
        runner.host = HostMemory(runner.cache, args.host_cache_bytes // args.tensor_parallel_size)
        runner.host.start(on_host_progress)
    logger.info("rank %d started: %s", rank, phases)
    return StartedRank(runner, architecture, memory, step_seconds)


def _join(
    args: EngineArgs,
    architecture: ModelArchitecture,
    table: KernelTable,
    device: torch.device,
    probe: GPUMemoryProbe | None,
    *,
    rank: int,
    init_method: str,
    step_rows: int,
) -> TensorParallel:
    """Meet the other ranks, and on GPUs have their communicator made and measured."""
    tokens = args.max_num_batched_tokens
    sizes = {
        "tensor_parallel_size": args.tensor_parallel_size,
        "rows": step_rows,
    }
    joined = join_tensor_parallel(
        rank=rank,
        size=args.tensor_parallel_size,
        init_method=init_method,
        device=device,
        capability=table.capability if table.sums_through_peers else None,
        peer_layout=peer_rows_layout(architecture, **sizes),
        environment=None if (found := device_facts(device)) is None else communicator_bounds(args, found),
    )
    parallel = replace(joined, exact=table.profile == "exact")
    if probe is not None and parallel.size > 1:
        # The channels of a communicator are made by its first collectives, and captured ones make none: one of each
        # size class comes first, the largest of a step at the beginning.
        residual = torch.zeros(tokens, architecture.hidden_size, dtype=compute_dtype(architecture), device=device)
        for rows in (tokens >> halvings for halvings in range(tokens.bit_length())):
            parallel.all_reduce(residual[:rows])
        torch.cuda.synchronize(device)
        probe.joined(peer_bytes=peer_bytes(architecture, **sizes) if parallel.peers is not None else 0)
    return parallel


def communicator_bounds(args: EngineArgs, found: DeviceFacts) -> Mapping[str, str]:
    """NCCL's environment for the GPU that the settings were sized for, or that is found where they name none."""
    return environment(args.accelerator or found.product, found.compute_capability)


class Phases:
    """Seconds that the parts of a start-up took, one after the other."""

    def __init__(self) -> None:
        self._ended_s = time.monotonic()
        self._took: dict[str, float] = {}

    def end(self, name: str) -> None:
        """All since the last end, or since the beginning, was `name`."""
        now = time.monotonic()
        self._took[name] = now - self._ended_s
        self._ended_s = now

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._took.items())


def _profile(
    model: Gemma4ForCausalLM,
    args: EngineArgs,
    geometry: CacheGeometry,
    device: torch.device,
    probe: GPUMemoryProbe | None,
    *,
    drafter: Drafter | None,
    adapters: AdapterStore | None,
    beside_graphs_bytes: int,
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
        drafter=drafter,
        adapters=adapters,
        most_media=_most_rows(args, model),
    )
    drafts, asked = runner.draft_tokens, runner.asked_drafts
    steps = heaviest_steps(args, longest=longest, on_gpu=on_gpu, draft_tokens=drafts, asked=asked)
    if adapters is not None:  # each again with an adapter, whose factors are zeros
        steps += tuple(replace(step, adapters=np.zeros(step.num_requests, dtype=np.int32)) for step in steps)
    if (embedder := model.image_embedder) is not None:
        steps += image_steps(args, embedder.images, longest=longest, on_gpu=on_gpu)
    if (hears := model.audio_embedder) is not None:
        steps += audio_steps(args, hears.audio, longest=longest, on_gpu=on_gpu)
    runner.profile(steps)
    if probe is not None:
        settings = inspection.read_rank_settings(
            args,
            model.architecture,
            geometry,
            weight_format=model.weight_format,
            on_cpu=False,
            capability=model.operations.table.capability,
        )
        use = probe.measure(
            args.gpu_memory_utilization,
            scratch_bytes=page_bytes,
            graphs_bytes=graphs_bytes(model.architecture, settings),
            beside_graphs_bytes=beside_graphs_bytes,
        )
        return runner, use
    use = cpu_memory_use(
        model.architecture,
        geometry,
        args,
        weight_format=model.weight_format,
        weights_bytes=sum(
            (
                model.parameter_bytes(),
                0 if drafter is None else drafter.weights_bytes,
                0 if adapters is None else adapters.slots.nbytes,
            )
        ),
    )
    return runner, use


def _agree(use: MemoryUse, parallel: TensorParallel, device: torch.device) -> tuple[MemoryUse, int]:
    """The smallest pool over ranks, so that page numbers mean the same on all, and the largest of the other terms."""
    if parallel.size == 1:
        return use, use.left_bytes
    names = sorted(use.overhead)
    terms = (-use.left_bytes, use.weights_bytes, use.activation_bytes, *(use.overhead[name] for name in names))
    agreed = torch.tensor(terms, dtype=torch.int64, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    negated_pool, weights, activation, *overhead = agreed.tolist()
    largest = dict(zip(names, overhead, strict=True))
    return MemoryUse(use.total_bytes, use.budget_bytes, weights, activation, largest), -negated_pool


def _most_rows(args: EngineArgs, model: Gemma4ForCausalLM) -> MostRows:
    hears = model.audio_embedder
    return MostRows(args.max_soft_tokens, 0 if hears is None else hears.audio.soft_tokens(args.audio_seconds * RATE))
