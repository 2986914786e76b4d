"""From EngineArgs to a running engine, inside the engine's process: the only place outside execution that needs torch.

The front end imports this module to name its function, so what needs torch is imported when the function runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from modelserve.engine_args import EngineArgs
from modelserve.errors import DoesNotFit, InvalidInput
from modelserve.hardware import CATALOGUE
from modelserve.inspection import read_audio, read_images, read_speculation
from modelserve.model.architecture import LayerKind
from modelserve.planning.speed.draft_time import draft_speeds
from modelserve.planning.speed.encoding_cost import EncodingCost
from modelserve.planning.speed.mixed_steps import crowd_tokens, min_mixed_tokens
from modelserve.planning.speed.step_time import RankSpeed, doubling_context
from modelserve.sizing.host.grammars import lexer_states
from modelserve.sizing.pages import GLOBAL_PAGE_TOKENS
from modelserve.termination import TerminationReason
from modelserve_worker.engine.child import BuiltEngine
from modelserve_worker.engine.wire import Ready
from modelserve_worker.terminal_error import TerminalError

if TYPE_CHECKING:
    from modelserve_worker.grammar.compiler import GrammarCompiler
    from modelserve_worker.scheduling.costs.mixed_pace import MixedPace
    from modelserve_worker.scheduling.costs.step_costs import StepCosts
    from modelserve_worker.startup.replica import LaunchedReplica


def build_engine(args: EngineArgs, progress: Callable[[int, int], None]) -> BuiltEngine:
    """Load the model on all ranks and put an engine over it. Raises TerminalError where no restart can help."""
    from modelserve_worker.startup.kernels_ahead import start_kernels_ahead

    compilers = start_kernels_ahead(args)  # before torch is imported here, which takes as long as there
    from modelserve_worker.engine.deadline import step_deadline_s
    from modelserve_worker.engine.engine import Engine
    from modelserve_worker.engine.event_publisher import event_publisher
    from modelserve_worker.engine.plan_report import plan_report
    from modelserve_worker.scheduling.admission import SchedulerLimits
    from modelserve_worker.scheduling.cache_events import CacheEvents
    from modelserve_worker.scheduling.scheduler import Scheduler
    from modelserve_worker.scheduling.tiers.host_tier import host_tiers
    from modelserve_worker.startup.memory import InsufficientMemory
    from modelserve_worker.startup.replica import launch

    publisher = event_publisher(args, os.environ)
    beside_loading = ThreadPoolExecutor(1, thread_name_prefix="grammar-tables")
    grammars = beside_loading.submit(_grammars, Path(args.model), args)
    beside_loading.shutdown(wait=False)
    try:
        replica = launch(args, progress=progress, compilers=compilers)
    except InvalidInput as error:
        raise TerminalError.of_input(error) from error
    except DoesNotFit as error:
        raise TerminalError(
            TerminationReason.InsufficientMemory,
            str(error),
            shortfall_bytes=error.shortfall_bytes,
            measured=error.measured if isinstance(error, InsufficientMemory) else None,
        ) from error
    speed, images, audio = _planned_speed(args, replica), read_images(args), read_audio(args)
    limits = SchedulerLimits(
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_seqs=args.max_num_seqs,
        max_model_len=replica.max_model_len,
        eos_token_ids=replica.architecture.eos_token_ids,
        max_num_mixed_tokens=args.max_num_mixed_tokens,
        doubling_context=doubling_context(
            replica.architecture, replica.geometry.layout, compute_capability=replica.table.compute_capability
        ),
        captured_rows=replica.captured_rows,
        exact=args.profile == "exact",
        hidden_size=replica.architecture.hidden_size,
        patch_values=0 if images is None else images.architecture.patch_values,
        frame_values=0 if audio is None else audio.architecture.frame_values,
        encoding_cost=EncodingCost.of(images, audio, replica.architecture, tensor_parallel=args.tensor_parallel_size),
    )
    if speed is not None:
        fewest, crowd = (of(speed, args.max_num_mixed_tokens) for of in (min_mixed_tokens, crowd_tokens))
        limits = replace(limits, min_num_mixed_tokens=int(fewest), crowd_tokens=crowd)
    drafts = replica.runner.draft_tokens
    costs = _step_costs(args, replica, speed) if drafts and args.num_speculative_tokens == "auto" else None
    scheduler = Scheduler(
        limits,
        replica.geometry,
        replica.pool_bytes,
        draft_tokens=drafts,
        asked_drafts=replica.runner.asked_drafts,
        step_costs=costs,
        mixed_pace=_mixed_pace(args, replica),
        prefix_caching=args.prefix_caching,
        tiers=host_tiers(args.host_cache_bytes // args.tensor_parallel_size),
        looks_up=args.prompt_lookup,
        adapter_slots=args.max_loras,
        events=None if publisher is None else CacheEvents(GLOBAL_PAGE_TOKENS, publisher.publish),
    )
    ready = Ready(
        max_model_len=replica.max_model_len,
        step_deadline_s=step_deadline_s(replica.memory.device),
        plan_report=plan_report(args, replica.architecture, replica.memory, replica.table),
        cache_config={
            "block_size": str(GLOBAL_PAGE_TOKENS),
            "num_gpu_blocks": str(replica.memory.num_pages(LayerKind.GLOBAL)),
            "cache_dtype": replica.geometry.dtype.value,
            "cache_layout": replica.geometry.layout.value,
            "enable_prefix_caching": str(args.prefix_caching),
            "host_cache_bytes": str(args.host_cache_bytes),
        },
        stats=scheduler.stats(),
    )
    try:
        compiler = grammars.result()
    except InvalidInput as error:
        raise TerminalError.of_checkpoint(error) from error
    return BuiltEngine(Engine(scheduler, replica.runner, compiler, adapters=replica.adapters), ready)


def _planned_speed(args: EngineArgs, replica: LaunchedReplica) -> RankSpeed | None:
    """What is planned for the GPU; None where it is on no list."""
    device = CATALOGUE.get(replica.memory.device.replace(" ", "-"))
    if device is None:
        return None
    return RankSpeed(
        replica.architecture, device, replica.geometry, tensor_parallel=args.tensor_parallel_size,
        weight_format=replica.memory.weight_format, exact=args.profile == "exact",
    )  # fmt: skip


def _step_costs(args: EngineArgs, replica: LaunchedReplica, speed: RankSpeed | None) -> StepCosts:
    """Of the planned speed; measured where there is none."""
    from modelserve_worker.scheduling.costs.step_costs import MeasuredCosts, PlannedCosts

    if speed is None:
        return MeasuredCosts(replica.runner.asked_drafts)
    device = CATALOGUE[replica.memory.device.replace(" ", "-")]
    speculation = read_speculation(args, replica.architecture)
    drafts = draft_speeds(speculation, device, replica.geometry, tensor_parallel=args.tensor_parallel_size)
    return PlannedCosts(speed, max_num_seqs=args.max_num_seqs, speculation=speculation, drafts=drafts)


def _mixed_pace(args: EngineArgs, replica: LaunchedReplica) -> MixedPace | None:
    """Of a CPU, whose steps were timed."""
    from modelserve_worker.scheduling.costs.mixed_pace import MixedPace

    if replica.step_seconds is None:
        return None
    target = args.mixed_step_milliseconds / 1000
    return MixedPace(replica.step_seconds, target=target, most_rows=args.max_num_mixed_tokens)


def _grammars(directory: Path, args: EngineArgs) -> GrammarCompiler | None:
    """None for a checkpoint without a tokenizer, which the front end refuses to serve."""
    from modelserve_worker.grammar.compiler import GrammarCompiler
    from modelserve_worker.text.checkpoint_text import read_tokenizer_json
    from modelserve_worker.weights.checkpoint_config import read_architecture

    tokenizer, architecture = read_tokenizer_json(directory), read_architecture(directory)
    if tokenizer is None:
        return None
    return GrammarCompiler(
        tokenizer,
        vocab_size=architecture.vocab_size,
        eos_token_ids=architecture.eos_token_ids,
        max_lexer_states=lexer_states(max_num_seqs=args.max_num_seqs, cpu_memory_bytes=args.cpu_memory_bytes),
    )
