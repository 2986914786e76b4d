"""A replica of one or more tensor-parallel ranks behind one ModelRunner.

Rank 0 lives in the engine's process and owns the scheduler; ranks 1..n-1 are child processes. Each step is packed once
and read by all of them from shared memory (`rank_ring`); they run it in step with rank 0. Sampling is the same on all
ranks, so no token is sent, but each notes a checksum of its tokens, which rank 0 compares with its own.
When one rank dies, fails a step that others have entered, or came to other tokens, the group cannot go on: all of them
end within seconds and every later step fails with RankDiedError, as does `check` while there is no step.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import queue
import signal
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch.distributed as dist

from modelserve.engine_args import EngineArgs
from modelserve.errors import InvalidInput, ModelServeError
from modelserve.model.architecture import ModelArchitecture
from modelserve.sizing.backends.table import KernelTable
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.adapters.store import AdapterStore
from modelserve_worker.batch import FailedStep, Int32Array, ModelRunner, PendingStep, SampledTokens, ScheduledBatch
from modelserve_worker.engine_client import EngineDead
from modelserve_worker.host_pages import HostProgress
from modelserve_worker.ranks.messages import decode_batch, encode_batch
from modelserve_worker.ranks.parent_process import end_with_parent
from modelserve_worker.ranks.process_group import abort_collectives
from modelserve_worker.ranks.ring import RankRing, RingAborted
from modelserve_worker.startup.memory_report import MemoryReport
from modelserve_worker.startup.rank import StartedRank, start_rank
from modelserve_worker.step_seconds import StepSeconds
from modelserve_worker.terminal_error import TerminalError
from modelserve_worker.weights.progress import ProgressCallback

_COMPARED_STEPS = 32  # a rank that is so many steps behind has not noted its tokens: it is compared no more
_GRACE_S = 3.0  # from a failed collective or a stop to the verdict that a rank is dead

logger = logging.getLogger(__name__)


class RankDiedError(EngineDead):
    """A rank of the replica ended or failed in the middle of a step; the replica cannot go on and must be restarted."""


@dataclass(frozen=True)
class LaunchedReplica:
    """What the engine needs of a started replica. `memory` says where the bytes of a rank went."""

    runner: ModelRunner
    architecture: ModelArchitecture
    geometry: CacheGeometry
    pool_bytes: int
    max_model_len: int
    memory: MemoryReport
    table: KernelTable  # of kernels, the same on all ranks
    captured_rows: tuple[int, ...]  # of steps with prompts, rising
    step_seconds: StepSeconds | None  # on a CPU
    adapters: AdapterStore | None


def launch(
    args: EngineArgs, *, progress: ProgressCallback | None = None, compilers: Path | None = None
) -> LaunchedReplica:
    """Start all ranks: load weights, measure memory, size and allocate the pool, run a profile step.

    `progress` hears of rank 0's loading. `compilers`: whose kernels are waited for (`kernels_ahead`). Raises
    InvalidInput (InvalidCheckpoint, AcceleratorMismatch among them), InsufficientMemory, or RankDiedError when another
    rank ends before it is ready.
    """
    if args.tensor_parallel_size == 1:
        started = start_rank(args, rank=0, init_method="", progress=progress, compilers=compilers)
        return _replica(started, started.runner)
    # One node, so gloo's ranks meet on the loopback, which every pod has.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    workers = WorkerRanks(args, compilers)
    try:
        started = workers.start_beside(
            lambda: start_rank(args, rank=0, init_method=workers.init_method, progress=progress, compilers=compilers)
        )
    except BaseException:
        workers.stop()
        raise
    return _replica(started, MultiRankRunner(started.runner, workers))


def worker_loop(runner: ModelRunner, ring: RankRing, reader: int) -> None:
    """Run the steps of rank 0 in order until it says that it was the last, and note each one's tokens.

    Raises what a step failed with, unless it failed before any collective, as it then did on every rank, EngineDead
    where the device is gone beside the steps, and RingAborted when rank 0 has given the group up.
    """
    launched: deque[tuple[int, PendingStep]] = deque()
    ahead = 2 if runner.launches_ahead else 0  # steps that may still be on their way when the next one has come
    while message := ring.receive(reader, check=runner.check):
        batch = decode_batch(message)
        step = runner.execute(batch)
        if len(batch.constrained):
            masks = ring.receive(reader)
            if not masks:
                return
            rows = int(batch.drawn[batch.drawn > 0][batch.constrained].sum())
            step = step.constrain(np.frombuffer(masks, dtype=np.int32).reshape(rows, -1))
        if isinstance(step, FailedStep):
            if not step.before_collectives:
                step.result()
            continue
        launched.append((batch.step, step))
        while len(launched) > ahead:
            number, oldest = launched.popleft()
            ring.note(reader, number, token_checksum(oldest.result()))


def token_checksum(tokens: SampledTokens) -> int:
    """The same on ranks that came to the same tokens."""
    columns = (tokens.token_ids, tokens.counts, tokens.drafts, tokens.proposed)
    return zlib.crc32(b"".join(column.tobytes() for column in columns))


class WorkerRanks:
    """The child processes of ranks 1..n-1, and a thread that notices the first death among them."""

    def __init__(self, args: EngineArgs, compilers: Path | None = None) -> None:
        """Spawn the processes; they start like rank 0 and wait for it at `init_method`."""
        self._ring = RankRing(args.tensor_parallel_size - 1)  # first: not every machine has one
        self._folder = tempfile.TemporaryDirectory(prefix="modelserve-ranks-")
        self.init_method = f"file://{Path(self._folder.name) / 'rendezvous'}"
        context = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []  # each child's last words
        for rank in range(1, args.tensor_parallel_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_worker_main,
                args=(args, rank, self.init_method, theirs, self._ring.name, compilers),
                name=f"modelserve-rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()  # so that our end of the pipe sees the child's death
            self._processes.append(process)
            self._pipes.append(ours)
        self._stopping = False
        self._last_words: list[str] = []
        self._ended: list[str] = []  # the ranks that ended first, by themselves
        self._died = threading.Event()
        self._own: dict[int, int] = {}  # checksums of steps that not all ranks have noted, by step
        self._watcher = threading.Thread(target=self._watch, name="rank-watcher", daemon=True)
        self._watcher.start()

    def start_beside(self, start: Callable[[], StartedRank]) -> StartedRank:
        """Run `start` for rank 0 in a thread of its own: its collectives would wait for ever on a rank that is gone.

        Raises what rank 0 raised, or RankDiedError.
        """
        outcome: queue.SimpleQueue[StartedRank | BaseException] = queue.SimpleQueue()

        def run() -> None:
            try:
                outcome.put(start())
            except BaseException as error:
                outcome.put(error)

        threading.Thread(target=run, name="rank-0-start", daemon=True).start()
        result = self._first(outcome)
        if not isinstance(result, BaseException):
            return result
        # Rank 0's own verdict on the user's input is the better message; a broken collective is only an echo.
        if not isinstance(result, ModelServeError | TerminalError) and self.has_died(within_s=_GRACE_S):
            raise self.failure("before it was ready") from result
        raise result

    def _first(self, outcome: queue.SimpleQueue[StartedRank | BaseException]) -> StartedRank | BaseException:
        """What rank 0 came to, or the failure of another rank and nothing from rank 0 for a while after."""
        while not self.has_died():
            with contextlib.suppress(queue.Empty):
                return outcome.get(timeout=0.1)
        try:
            return outcome.get(timeout=_GRACE_S)
        except queue.Empty:
            return self.failure("before it was ready")

    def send(self, batch: ScheduledBatch) -> None:
        """Hand a step to every rank. Raises RankDiedError when one is gone."""
        self._ring.send(encode_batch(batch), check=self.check)

    def send_masks(self, masks: Int32Array) -> None:
        """Hand every rank the masks of the constrained rows of the last step. Raises RankDiedError when one is gone."""
        self._ring.send(masks.tobytes(), check=self.check)

    def check(self) -> None:
        """Raise RankDiedError when a rank is gone."""
        if self.has_died():
            raise self.failure("between steps")

    def compare(self, step: int, checksum: int) -> None:
        """Hold the other ranks' tokens against rank 0's, of this step and of earlier ones that they had not noted.

        Raises RankDiedError, and ends the group, when one came to others.
        """
        self._own[step] = checksum
        for number in list(self._own):
            noted = [self._ring.noted(reader, number) for reader in range(len(self._processes))]
            for reader, word in enumerate(noted):
                if word not in (None, self._own[number]):
                    self.abort()
                    raise RankDiedError(
                        f"rank {reader + 1} sampled other tokens than rank 0 in step {number}: the ranks no longer "
                        "compute the same. The replica must be restarted"
                    )
            if None not in noted or step - number >= _COMPARED_STEPS:
                del self._own[number]

    def host_progress(self) -> HostProgress:
        return HostProgress(*self._ring.reported(len(HostProgress._fields)))

    def has_died(self, *, within_s: float = 0.0) -> bool:
        return self._died.wait(within_s)

    def failure(self, when: str) -> RankDiedError:
        """The dead ranks with their exit codes, and what they said."""
        for pipe in self._pipes:
            with contextlib.suppress(EOFError, OSError):
                if pipe.poll():
                    self._last_words.append(str(pipe.recv()))
        words = f": {'; '.join(self._last_words)}" if self._last_words else ""
        return RankDiedError(f"{', '.join(self._ended) or 'a rank'} ended {when}{words}. The replica must be restarted")

    def abort(self) -> None:
        """Kill all ranks at once; `has_died` is true from here on."""
        self._died.set()
        self._ring.abort()
        for process in self._processes:
            process.kill()

    def stop(self) -> None:
        """End all ranks: ask, wait, then kill."""
        self._stopping = True
        deadline = time.monotonic() + _GRACE_S
        with contextlib.suppress(RankDiedError, RingAborted):
            self._ring.send(b"", check=functools.partial(self._check_until, deadline))
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        self._watcher.join(_GRACE_S)
        self._ring.close()
        self._folder.cleanup()

    def _check_until(self, deadline: float) -> None:
        self.check()
        if time.monotonic() > deadline:  # a rank that hangs reads nothing
            raise RingAborted("a rank does not answer")

    def _watch(self) -> None:
        gone = wait([process.sentinel for process in self._processes])
        if self._stopping:
            return
        for process in self._processes:
            if process.sentinel in gone:
                self._ended.append(f"{process.name} (exit code {_exit_code(process)})")
        logger.error("a tensor-parallel rank ended; the replica cannot go on")
        self.abort()
        abort_collectives()


def _exit_code(process: BaseProcess) -> int | None:
    """Of a process that has ended, which is seen before its exit code; None where that does not come. A thread that
    asks while another one collects the end reads None, too, for a moment."""
    deadline = time.monotonic() + 1.0
    while process.exitcode is None and time.monotonic() < deadline:
        time.sleep(0.005)
    return process.exitcode


class MultiRankRunner:
    """ModelRunner of rank 0 that has every other rank run the same steps."""

    def __init__(self, local: ModelRunner, workers: WorkerRanks) -> None:
        self._local = local
        self._workers = workers
        self.launches_ahead = local.launches_ahead
        self.draft_tokens, self.asked_drafts = local.draft_tokens, local.asked_drafts

    def execute(self, batch: ScheduledBatch) -> PendingStep:
        """Launch one step on all ranks; a dead rank fails this step and all that follow."""
        if self._workers.has_died():
            return FailedStep(self._workers.failure("in a step before"))
        try:
            self._workers.send(batch)
        except Exception as error:
            return FailedStep(error)
        return _ranked(self._local.execute(batch), self._workers)

    def host_progress(self) -> HostProgress:  # that of the slowest
        return HostProgress(*map(min, self._local.host_progress(), self._workers.host_progress()))

    def check(self) -> None:
        """Raise RankDiedError when a rank is gone."""
        self._workers.check()
        self._local.check()

    def shutdown(self) -> None:
        self._workers.stop()
        self._local.shutdown()
        if dist.is_initialized() and not self._workers.has_died():
            dist.destroy_process_group()


class _RankedStep:
    """Rank 0's step; a failure that comes from a dead rank is told as such."""

    def __init__(self, step: PendingStep, workers: WorkerRanks) -> None:
        self._step = step
        self._workers = workers

    def constrain(self, masks: Int32Array) -> PendingStep:
        """On every rank; a dead one fails the step."""
        try:
            self._workers.send_masks(masks)
        except Exception as error:
            return FailedStep(error)
        return _ranked(self._step.constrain(masks), self._workers)

    def result(self) -> SampledTokens:
        """Tokens of the step. Raises RankDiedError when a rank is gone, else what the step failed with."""
        try:
            tokens = self._step.result()
        except InvalidInput:
            raise  # of this step alone, and the same on every rank
        except Exception as error:
            if self._workers.has_died(within_s=_GRACE_S):
                raise self._workers.failure(f"during a step ({error})") from error
            raise
        if self._workers.has_died():  # an aborted collective may end a kernel without an error, and with any content
            raise self._workers.failure("during a step")
        self._workers.compare(tokens.step, token_checksum(tokens))
        return tokens


def _ranked(step: PendingStep, workers: WorkerRanks) -> PendingStep:
    """A step that rank 0 has launched, or sampled. The group ends where that failed for rank 0 alone."""
    broken = isinstance(step, FailedStep) and not step.before_collectives
    # The other ranks have entered collectives that this one will never join. Who is dead already is named first.
    if broken and not workers.has_died(within_s=_GRACE_S):
        workers.abort()
    return _RankedStep(step, workers)


def _worker_main(
    args: EngineArgs, rank: int, init_method: str, last_words: Connection, ring_name: str, compilers: Path | None
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; rank 0 decides when to end
    threading.Thread(target=end_with_parent, name="parent-watcher", daemon=True).start()
    try:
        ring = RankRing(args.tensor_parallel_size - 1, name=ring_name)
        tell = functools.partial(ring.report, rank - 1)
        started = start_rank(args, rank=rank, init_method=init_method, on_host_progress=tell, compilers=compilers)
        worker_loop(started.runner, ring, rank - 1)
        started.runner.shutdown()
        ring.close()
        # Not through Python's teardown: a communicator's thread that wants the interpreter then aborts the process.
        os._exit(0)
    except BaseException as error:
        with contextlib.suppress(OSError):
            last_words.send(f"rank {rank}: {type(error).__name__}: {error}")
        # Not a normal exit: a thread of a broken communicator could hold it up for minutes.
        os._exit(1)


def _replica(started: StartedRank, runner: ModelRunner) -> LaunchedReplica:
    memory = started.memory
    return LaunchedReplica(
        runner=runner,
        architecture=started.architecture,
        geometry=memory.geometry,
        pool_bytes=memory.pool_bytes,
        max_model_len=memory.max_model_len,
        memory=memory,
        table=started.runner.table,
        captured_rows=started.runner.captured_rows,
        step_seconds=started.step_seconds,
        adapters=started.runner.adapters,
    )
