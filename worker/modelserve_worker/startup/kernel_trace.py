"""Finds which kernels a worker launches, without a GPU: the product's own code runs over tensors that hold nothing.

The decoder, its attention backend and the sampler run every step that start-up captures, on torch's fake tensors of a
CUDA device that need not exist. Triton specialises each launch as it would there (types, integers that are 1 or divide
by 16, alignment of pointers) and hands it over instead of compiling it. So no list of kernels has to be kept in step
with the code that launches them. Only one launch per specialisation is kept, and of layers that are alike one is run.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from triton.backends.compiler import GPUTarget

from modelserve.engine_args import EngineArgs
from modelserve.inspection import read_speculation
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.weight_format import WeightFormat
from modelserve.sizing.backends.resolve import Formats, resolve
from modelserve.sizing.cuda_graphs import decode_graph_rows, last_row_sizes, mixed_graph_sizes
from modelserve.sizing.rank_sums import peer_rows_layout
from modelserve.sizing.speculation import Speculation
from modelserve_worker.adapters.slots import AdapterSlots
from modelserve_worker.attention.target_caches import PoolOfTarget
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.drafters.assistant_drafter import AssistantDrafter
from modelserve_worker.drafters.block_drafter import BlockDrafter
from modelserve_worker.kernels.adapters.terms import AdapterBlocks
from modelserve_worker.kernels.compiling.cuda_kernel import CudaSource
from modelserve_worker.kernels.compiling.launching import noted_by
from modelserve_worker.kernels.operations import Operations
from modelserve_worker.kernels.peers.peer_rows import PeerRows
from modelserve_worker.kernels.peers.peer_sums import PeerBuffers, PeerSums
from modelserve_worker.kernels.sampling.sampling import Adjustments, SampledRows
from modelserve_worker.kernels.sampling.slot_columns import SlotColumns
from modelserve_worker.kernels.step import Draws, Step
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.layers.placement import Placement
from modelserve_worker.layers.stored.matrix import StoredMatrix
from modelserve_worker.models.dflash import DFlash
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.models.gemma4_assistant import Gemma4Assistant
from modelserve_worker.startup.device import compute_dtype, select_geometry
from modelserve_worker.step.block_tables import BlockTables
from modelserve_worker.step.input_batch import StepPacker
from modelserve_worker.step.sampler import draw_candidates
from modelserve_worker.step.sampling_slots import SamplingSlots

POOL_BYTES = 64 << 30  # beyond 32 bits in any element type; the profile's cache of two pages is traced beside it
UNCAPTURED_ROWS = (3, 17, 300)  # of steps that no graph takes: row counts that are neither 1 nor multiples of 16
MANY_CHUNKS = 1 << 20  # more than any buffer has room for, which decides how 8-bit rows are attended
_CPU = torch.device("cpu")
_CUDA = torch.device("cuda", 0)


@dataclass(frozen=True)
class KernelLaunch:
    """One specialisation of one kernel, as `bundles.preload` takes it."""

    module: str
    kernel: str
    specialization: str
    described: str


Launch = KernelLaunch | CudaSource


class TargetDriver:
    """What Triton asks of a driver before it compiles: which GPU it compiles for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        """A number of its own per target: kernels keep what they know of a device by this number."""
        return int(self._target.arch)

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


class _RankAlone(TensorParallel):
    """Rank 0 of a group whose other ranks do not exist: collectives have the right shapes and nothing else."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self.peers is None or not self.peers.takes(x) else self.peers.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size, dim=-1)


@contextmanager
def launches_go_to(found: Callable[[Launch], None], capability: int) -> Iterator[None]:
    """For the whole process, and for good: Triton compiles for GPUs of `capability`. Meanwhile nothing is compiled."""

    def hook(*, repr: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # noqa: A002 - the hook's own names
        found(KernelLaunch(fn.module, fn.name, compile["specialization_data"], repr))
        return True  # do not compile

    triton.runtime.driver.set_active(TargetDriver(capability))
    with noted_by(found), triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = hook
        yield


def kernel_launches(
    architecture: ModelArchitecture,
    args: EngineArgs,
    *,
    capability: int,
    weight_format: WeightFormat | None = None,
    at_start: bool = True,
    found: Callable[[Launch], object] = lambda _: None,
) -> list[Launch]:
    """Every launch of rank 0 while it starts and serves, for a GPU of `capability` (90 for sm_90).

    Without `at_start` also those that no start compiles: chunks of rows that see what is behind them, token masks.
    `found` hears of each one as soon as it is found. `weight_format` None is an unquantised checkpoint. `args.model` is
    not read. Raises InvalidInput where model and arguments do not fit. For a process of its own: while this runs, no
    kernel can be launched.
    """
    launches: dict[Launch, None] = {}

    def note(launch: Launch) -> None:
        if launch not in launches:
            launches[launch] = None
            found(launch)

    with (
        warnings.catch_warnings(),
        launches_go_to(note, capability),
        torch.inference_mode(),
        FakeTensorMode(),
    ):
        warnings.simplefilter("ignore")  # torch warns of pointers of fake tensors
        speculation = read_speculation(args, architecture)
        tokens = max(args.max_num_batched_tokens, speculation.step_rows(args.max_num_seqs))
        ranks = args.tensor_parallel_size
        geometry = select_geometry(architecture, args)
        formats = Formats(weight_format, geometry.dtype, geometry.layout)
        operations = Operations(resolve(capability, architecture, formats, args.profile, ranks=ranks), _CUDA)
        _run_steps(architecture, args, operations, weight_format, _RankAlone(size=ranks), speculation, at_start)
        if operations.table.sums_through_peers:  # which GPUs reach each other's memory is not known here
            joined = _joined_to_peers(architecture, ranks, rows=tokens, capability=capability)
            _run_steps(architecture, args, operations, weight_format, joined, speculation, at_start)
    return list(launches)


def _joined_to_peers(architecture: ModelArchitecture, size: int, *, rows: int, capability: int) -> _RankAlone:
    """On GPUs that reach each other's memory."""
    words = torch.empty(4, dtype=torch.int32, device=_CUDA)
    buffers = PeerBuffers((0,) * size, 0, state=words, ended=words)
    layout = peer_rows_layout(architecture, tensor_parallel_size=size, rows=rows)
    by_rows = None
    if layout is not None:
        normed = torch.empty(layout.rows, layout.width, dtype=torch.bfloat16, device=_CUDA)
        by_rows = PeerRows(buffers, layout, normed, capability=capability, multiprocessors=1)
    return _RankAlone(size=size, peers=PeerSums(buffers, capability=capability), peer_rows=by_rows)


def _run_steps(
    architecture: ModelArchitecture,
    args: EngineArgs,
    operations: Operations,
    weight_format: WeightFormat | None,
    parallel: _RankAlone,
    speculation: Speculation,
    at_start: bool,
) -> None:
    from modelserve_worker.attention.fast_attention import KernelAttention  # Triton, on GPUs alone

    geometry = select_geometry(architecture, args, speculation.draft_cache)
    longest = architecture.max_position_embeddings
    sizes: dict[str, Any] = {"max_num_seqs": args.max_num_seqs, "max_model_len": longest}
    most_rows = speculation.rows
    few_rows = speculation.step_rows(args.max_num_seqs)
    tokens = max(args.max_num_batched_tokens, few_rows)
    placement = Placement(_CUDA, compute_dtype(architecture), parallel, weight_format, operations)
    model = Gemma4ForCausalLM(architecture, placement)
    if args.adapters is not None:
        AdapterSlots(model, args.adapters)
    _run_unlike_layers(model)
    for matrix in _run_matrices(model):
        matrix.repack()
    _sample(
        architecture, args, speculation, operations, parallel, masked=not at_start
    )  # first: they take the longest to compile
    with unset_fake_temporarily():
        tables = BlockTables(geometry, **sizes, device=_CPU)
    tables.device = {kind: _on_cuda(table) for kind, table in tables.device.items()}
    scratch = geometry.global_page.page_bytes + geometry.sliding_page.page_bytes
    captured_rows = decode_graph_rows(args.max_num_seqs, speculation)
    decodes, drafted = (tuple(r for r, few in captured_rows if few in of) for of in ({1}, {most_rows} - {1}))
    mixed = mixed_graph_sizes(tokens)
    last_rows = last_row_sizes(architecture, few_rows)
    drafters = tuple(_drafters(speculation, model, args, tokens))
    for pool_bytes in (scratch, POOL_BYTES):
        cache = KVCache(geometry, pool_bytes, device=_CUDA)
        attention = KernelAttention(model, cache, tables, operations.table, max_model_len=longest, few_rows=few_rows)
        with unset_fake_temporarily():
            packer = StepPacker(
                geometry, max_num_batched_tokens=tokens, vocab_size=architecture.vocab_size, blocks=attention.blocks,
                device=_CPU, most_rows=most_rows, exact=operations.exact, adapters=args.adapters, **sizes,
            )  # fmt: skip
        profile = pool_bytes == scratch
        for drafter in drafters:
            drafter.attach(PoolOfTarget(model, cache, tables, kernels=attention))
            for size in decodes[-1:] if profile else decodes:
                drafter.run(size)
        kinds: list[tuple[Callable[..., Step], tuple[int, ...], int]] = [
            (packer.decode_views, decodes, args.max_num_seqs),
            *([(partial(packer.decode_views, few=most_rows), drafted, few_rows)] if drafted else []),
            *((partial(packer.mixed_views, last=last), mixed, tokens) for last in last_rows),
        ]
        for views, captured, most in kinds:
            counts = captured[-1:] if profile else (*captured, *UNCAPTURED_ROWS)
            for rows in sorted({count for count in counts if count <= most}):
                with unset_fake_temporarily():
                    step = views(rows)
                    adapted = None if args.adapters is None else views(rows, adapted=True)
                on_cuda = _on_cuda(step)
                _run(model, attention, on_cuda, most_rows)
                if adapted is not None:
                    _run(model, attention, _on_cuda(adapted), most_rows)
                for drafter in drafters:
                    drafter.store(on_cuda)
                if step.chunks is not None and (profile or rows in UNCAPTURED_ROWS):  # as prompts are scored
                    _run(model, attention, _on_cuda(dataclasses.replace(step, narrowed=None)), most_rows)
                if step.chunks is not None and rows == UNCAPTURED_ROWS[-1] and not at_start:
                    _run(model, attention, _on_cuda(dataclasses.replace(step, last_keys=step.positions)), most_rows)
                for chunks in (1, MANY_CHUNKS) if step.chunks is not None and rows in UNCAPTURED_ROWS else ():
                    _run(model, attention, _on_cuda(_with_chunks(step, chunks)), most_rows)


def _drafters(
    speculation: Speculation, model: Gemma4ForCausalLM, args: EngineArgs, step_rows: int
) -> Iterator[AssistantDrafter | BlockDrafter]:
    sizes = {"num_tokens": speculation.num_tokens, "max_num_seqs": args.max_num_seqs}
    if speculation.assistant is not None:
        yield AssistantDrafter(Gemma4Assistant(speculation.assistant, model), **sizes)
    if speculation.block is not None:
        yield BlockDrafter(DFlash(speculation.block, model), model, **sizes, step_rows=step_rows)


def _run_unlike_layers(model: Gemma4ForCausalLM) -> None:
    """From now on a step goes through one layer of every kind, and past the others as if they were not there."""
    shape, layers = model.architecture, range(model.architecture.num_hidden_layers)
    narrowing = shape.last_owning_layer  # of which a step keeps fewer rows than it has got
    kinds = {(shape.kind(layer), shape.owns_cache(layer)): layer for layer in layers if layer != narrowing}
    stored = {shape.producer(layer) for layer in layers[narrowing + 1 :]}  # whose rows later layers read
    for layer in set(layers) - {narrowing, *kinds.values(), *stored}:
        model.decoder_layer(layer).forward = _passed_by  # type: ignore[method-assign]


def _run_matrices(model: Gemma4ForCausalLM) -> Iterator[StoredMatrix]:
    """Of the layers that a step goes through, and of no layer: to repack one takes 20 ms, though it holds nothing."""
    passed_by = {
        id(module)
        for layer in model.decoder_layers()
        if vars(layer).get("forward") is _passed_by
        for module in layer.modules()
    }
    yield from (matrix for _, matrix in model.stored_matrices() if id(matrix) not in passed_by)


def _passed_by(x: Tensor, normed: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return x, normed


def _run(model: Gemma4ForCausalLM, attention: Any, step: Step, columns: int) -> None:
    assert step.token_ids is not None
    attention.begin(step)
    model.placement.adapter_rows.begin(step)
    slots = step.global_slots
    columns_of_slots = torch.empty_like(slots)[:, None].expand(-1, columns)
    tokens = model.operations.step.tokens(step.token_ids, slots, columns_of_slots)
    hidden = model(tokens, step.positions, attention, num_rows=step.num_rows, narrowed=step.narrowed)
    model.head(hidden)


def _with_chunks(step: Step, most_chunks: int) -> Step:
    assert step.chunks is not None
    return dataclasses.replace(step, chunks=dataclasses.replace(step.chunks, most=most_chunks))


def _sample(
    architecture: ModelArchitecture, args: EngineArgs, speculation: Speculation, operations: Operations,
    parallel: TensorParallel, *, masked: bool,
) -> None:  # fmt: skip
    with unset_fake_temporarily():
        slots = SamplingSlots(max_num_seqs=args.max_num_seqs, vocab_size=architecture.vocab_size, device=_CPU)
    rows_each = speculation.rows
    count, vocab_size = speculation.step_rows(args.max_num_seqs), architecture.vocab_size
    sampled = torch.empty(count, dtype=torch.int32, device=_CUDA)
    logits = torch.empty(count, vocab_size // parallel.size, dtype=compute_dtype(architecture), device=_CUDA)
    seen = torch.empty(args.max_num_seqs, vocab_size, dtype=torch.int32, device=_CUDA)
    columns = SlotColumns(_on_cuda(slots.device.words), slots.device.top_k.numel())
    plain = SampledRows(
        slots=sampled, positions=sampled, output_counts=sampled, width=1, softcap=architecture.final_logit_softcapping,
        columns=columns,
    )  # fmt: skip
    adjusted = dataclasses.replace(plain, adjustments=Adjustments(seen, _on_cuda(slots.lists)))
    kinds = [plain, adjusted]
    if masked:
        masks = torch.empty(count, -(-vocab_size // 32), dtype=torch.int32, device=_CUDA)
        kinds += [dataclasses.replace(each, mask_rows=sampled, masks=masks) for each in kinds]
    some = torch.empty(min(count, operations.sampling.rows_at_once), dtype=torch.int64, device=_CUDA)
    whole = logits if parallel.size == 1 else parallel.all_gather(logits[some])
    for rows in kinds:
        tokens = draw_candidates(operations.sampling, parallel, logits, rows, first_token=0)
        operations.sampling.draw_filtered(whole, rows.some(some), some)
    operations.sampling.logprobs(whole, tokens[some], some, most=1, softcap=plain.softcap)
    draws = Draws(sampled, sampled, sampled, sampled)
    backend = operations.step
    backend.accept(tokens, sampled, sampled, draws, sampled[:, None].expand(-1, rows_each), sampled)
    if rows_each > 1:
        for placed in (1, 2, 4):
            backend.settle([(sampled, sampled)] * placed, sampled, sampled)
    if speculation.prompt_lookup:
        history = torch.empty(args.max_num_seqs, architecture.max_position_embeddings, dtype=torch.int32, device=_CUDA)
        operations.lookup.remember(history, sampled, tokens, sampled, sampled, sampled)
        operations.lookup.look_up(history, sampled, sampled, sampled, sampled, speculation.num_tokens)


def _on_cuda(value: Any) -> Any:
    """Tensors of the CPU, in nested dataclasses and tuples, as fake ones of the GPU with the same layout."""
    if isinstance(value, Tensor):
        storage = torch.empty(value.untyped_storage().nbytes() // value.itemsize, dtype=value.dtype, device=_CUDA)
        return storage.as_strided(value.shape, value.stride(), value.storage_offset())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return dataclasses.replace(value, **{field.name: _on_cuda(getattr(value, field.name)) for field in fields})
    if isinstance(value, AdapterBlocks):
        return AdapterBlocks(*map(_on_cuda, value))
    if isinstance(value, tuple):
        return tuple(_on_cuda(each) for each in value)
    return value
