"""`modelserve-worker serve` and `modelserve-worker fetch`: the composition root. torch is imported only to serve."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from modelserve.architecture import LayerKind
from modelserve.engine_args import EngineArgs
from modelserve.errors import DoesNotFit, InvalidInput, UnsupportedModel
from modelserve.inspection import read_architecture
from modelserve.sizing.pages import GLOBAL_PAGE_TOKENS
from modelserve.termination import TERMINAL_EXIT_CODE, TerminationMessage, TerminationReason, write_termination
from modelserve_worker.metrics import WorkerMetrics
from modelserve_worker.server.app import create_app
from modelserve_worker.server.flags import FlagParser, add_engine_flags, engine_args
from modelserve_worker.server.lifecycle import EngineStopped, bind, run_server
from modelserve_worker.server.state import ServedModel, ServerState
from modelserve_worker.text.checkpoint_text import load_checkpoint_text

if TYPE_CHECKING:
    from modelserve_worker.engine.async_engine import AsyncEngine

T = TypeVar("T")
log = logging.getLogger("modelserve_worker")


class TerminalError(Exception):
    """The worker would fail again in the same way: no restart can help."""

    def __init__(self, reason: TerminationReason, error: Exception) -> None:
        super().__init__(str(error))
        self.reason = reason
        self.shortfall_bytes = error.shortfall_bytes if isinstance(error, DoesNotFit) else None


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 after a drain, TERMINAL_EXIT_CODE when no restart can help, 1 when one may."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["fetch"]:
        from modelserve_worker import fetch  # the Hub's client is not needed to serve

        return fetch.main(arguments[1:])
    # As process 1 of a container, a process ignores every signal it has no handler for; the server sets its own later.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return serve(_parse(arguments))
    except TerminalError as error:
        message = TerminationMessage(reason=error.reason, message=str(error), shortfallBytes=error.shortfall_bytes)
        write_termination(message)
        sys.stderr.write(f"{error.reason}: {error}\n")
        return TERMINAL_EXIT_CODE
    except (OSError, EngineStopped) as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _parse(arguments: Sequence[str]) -> EngineArgs:
    parser = FlagParser(prog="modelserve-worker", description="Serve a Gemma 4 checkpoint over the OpenAI API.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve_parser = commands.add_parser("serve", help="load a checkpoint and serve it", allow_abbrev=False)
    add_engine_flags(serve_parser)
    commands.add_parser("fetch", help="download a model from the Hugging Face Hub (see `fetch --help`)")
    try:
        flags = vars(parser.parse_args(arguments))
        return engine_args({k: v for k, v in flags.items() if k not in ("command", "config")}, flags["config"])
    except InvalidInput as error:
        raise TerminalError(TerminationReason.InvalidEngineArgs, error) from error


def serve(args: EngineArgs) -> int:
    """Listen, load, serve, drain. Raises TerminalError, EngineStopped and OSError."""
    model = _read_model(args)
    state = ServerState(model)
    asyncio.run(_serve(args, state, bind(args.host, args.port)))
    if state.engine is None:
        # A signal came while loading; the loading thread cannot be interrupted, and waiting for it helps nobody.
        log.info("ended before the model was loaded")
        logging.shutdown()
        os._exit(0)
    return 0


def _read_model(args: EngineArgs) -> ServedModel:
    directory = Path(args.model)
    try:
        architecture = read_architecture(directory, servable_only=True)
        text = load_checkpoint_text(directory)
    except InvalidInput as error:
        raise TerminalError(_checkpoint_reason(error), error) from error
    name = args.served_model_name or directory.resolve().name
    return ServedModel(name, text, vocab_size=architecture.vocab_size)


async def _serve(args: EngineArgs, state: ServerState, listener: socket.socket) -> None:
    metrics = WorkerMetrics(state.model.name)
    engine: AsyncEngine | None = None

    async def start() -> None:
        nonlocal engine
        began = time.monotonic()
        started, cache_config = await _in_thread(lambda: _start_engine(args, state))
        engine = started
        metrics.observe_engine(started.stats, cache_config=cache_config)
        state.mark_ready(started)
        log.info("ready after %.1f s, contexts up to %d tokens", time.monotonic() - began, started.max_model_len)

    async def stop_engine() -> None:
        if engine is not None:
            await engine.shutdown()

    await run_server(
        create_app(state, metrics),
        state,
        listener,
        drain_seconds=args.drain_seconds,
        starting=start(),
        stop_engine=stop_engine,
    )


def _start_engine(args: EngineArgs, state: ServerState) -> tuple[AsyncEngine, dict[str, str]]:
    """Everything that needs torch. Returns the engine and the labels of its cache. Raises TerminalError."""
    from modelserve_worker.engine.async_engine import AsyncEngine
    from modelserve_worker.engine.engine import Engine
    from modelserve_worker.engine.plan_report import plan_report
    from modelserve_worker.execution.device import AcceleratorMismatch
    from modelserve_worker.execution.ranks import launch
    from modelserve_worker.scheduling.admission import SchedulerLimits
    from modelserve_worker.scheduling.scheduler import Scheduler

    def progress(done: int, total: int) -> None:
        state.detail = f"{done / 1e9:.2f} of {total / 1e9:.2f} GB of weights"

    try:
        replica = launch(args, progress=progress)
    except AcceleratorMismatch as error:
        raise TerminalError(TerminationReason.AcceleratorMismatch, error) from error
    except InvalidInput as error:
        raise TerminalError(_checkpoint_reason(error), error) from error
    except DoesNotFit as error:
        raise TerminalError(TerminationReason.InsufficientMemory, error) from error
    limits = SchedulerLimits(
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_seqs=args.max_num_seqs,
        max_model_len=replica.max_model_len,
        eos_token_ids=tuple(sorted({*replica.architecture.eos_token_ids, *state.model.text.eos_token_ids})),
    )
    engine = Engine(Scheduler(limits, replica.geometry, replica.pool_bytes), replica.runner)
    report = plan_report(args, replica.architecture, replica.memory)
    cache_config = {
        "block_size": str(GLOBAL_PAGE_TOKENS),
        "num_gpu_blocks": str(replica.memory.num_pages(LayerKind.GLOBAL)),
        "cache_dtype": replica.geometry.dtype.value,
        "cache_layout": replica.geometry.layout.value,
    }
    return AsyncEngine(engine, plan_report=report), cache_config


def _checkpoint_reason(error: InvalidInput) -> TerminationReason:
    unsupported = isinstance(error, UnsupportedModel)
    return TerminationReason.UnsupportedModel if unsupported else TerminationReason.InvalidCheckpoint


async def _in_thread(work: Callable[[], T]) -> T:
    """Like asyncio.to_thread, in a daemon thread: the process may end while it still runs."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def post(setter: Callable[[], None]) -> None:
        loop.call_soon_threadsafe(lambda: None if outcome.done() else setter())

    def run() -> None:
        try:
            result = work()
        except Exception as error:
            failure = error
            post(lambda: outcome.set_exception(failure))
        else:
            post(lambda: outcome.set_result(result))

    threading.Thread(target=run, name="start-engine", daemon=True).start()
    return await outcome


if __name__ == "__main__":
    raise SystemExit(main())
