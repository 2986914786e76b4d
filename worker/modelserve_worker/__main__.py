"""`modelserve-worker serve`, `fetch`, `cache` and `kernels`: the composition root. torch is imported only by `kernels`
and by the engine's process, which `serve` starts.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from modelserve import __version__
from modelserve.engine_args import EngineArgs
from modelserve.errors import InvalidInput
from modelserve.hardware import accelerator_from_labels
from modelserve.inspection import read_architecture, read_audio, read_images, read_weight_format
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.weight_format import WeightFormat
from modelserve.planning.worker_settings import STEP_SETTINGS, planned_args
from modelserve.sizing.host.front_end import open_bodies_bytes
from modelserve.sizing.media.audio_input import AudioInput, held_frames_bytes, sent_bytes
from modelserve.sizing.media.image_input import ImageInput, decode_processes, encoded_bytes, held_pixels_bytes
from modelserve.sizing.media.image_urls import url_hosts
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout
from modelserve.termination import TERMINAL_EXIT_CODE, TerminationMessage, TerminationReason, write_termination
from modelserve_worker.drafters.optional_drafter import without_missing_drafter
from modelserve_worker.engine.fair_queue import FairLimits
from modelserve_worker.engine.process import EngineProcess, EngineStartFailed
from modelserve_worker.engine.wire import Ready
from modelserve_worker.engine_startup import build_engine
from modelserve_worker.log_format import LOG_FORMAT
from modelserve_worker.media.audio_reader import AudioReader
from modelserve_worker.media.decode_pool import DecodePool
from modelserve_worker.media.fetching.image_fetcher import ImageFetcher
from modelserve_worker.media.image_reader import ImageReader
from modelserve_worker.metrics import WorkerMetrics
from modelserve_worker.quality.measurement import measure_cache_quality
from modelserve_worker.quality.texts import TrialText, trial_texts
from modelserve_worker.server.adapters.downloads import HubDownload
from modelserve_worker.server.adapters.probe import TEXT_TOKENS, AdapterProbe, probe_prompts
from modelserve_worker.server.adapters.routes import read_set
from modelserve_worker.server.adapters.service import AdapterService
from modelserve_worker.server.adapters.sources import AdapterSources
from modelserve_worker.server.app import create_app
from modelserve_worker.server.errors.errors import ApiError
from modelserve_worker.server.flags import (
    FlagParser,
    add_engine_flags,
    add_server_flags,
    engine_args,
    server_settings,
)
from modelserve_worker.server.http.body_limits import OpenBodies
from modelserve_worker.server.lifecycle import EngineStopped, bind, run_server
from modelserve_worker.server.settings import ServerSettings
from modelserve_worker.server.state import ServedModel, ServerState
from modelserve_worker.startup.nvml import first_gpu
from modelserve_worker.terminal_error import TerminalError
from modelserve_worker.text.checkpoint_text import load_checkpoint_text

_SWITCH_INTERVAL_S = 0.0005
"""A thread that parses a long body gives the interpreter up this often. The event loop gives it up at every write to a
socket; with Python's 5 ms it would get it back 5 ms late each time, and every stream would stutter."""

log = logging.getLogger("modelserve_worker")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 after a drain, TERMINAL_EXIT_CODE when no restart can help, 1 when one may."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["fetch"]:
        from modelserve_tools import fetch  # the Hub's client is not needed to serve

        return fetch.main(arguments[1:])
    if arguments[:1] == ["cache"]:
        from modelserve_tools.model_cache import command

        return command.main(arguments[1:])
    if arguments[:1] == ["kernels"]:
        from modelserve_worker.startup import kernel_build

        return kernel_build.main(arguments[1:])
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    try:
        serve(*_parse(arguments))
    except TerminalError as error:
        message = TerminationMessage(
            reason=error.reason,
            message=str(error),
            shortfallBytes=error.shortfall_bytes,
            measured=error.measured or None,
            engineVersion=__version__ if error.measured else None,
        )
        write_termination(message)
        sys.stderr.write(f"{error.reason}: {error}\n")
        return TERMINAL_EXIT_CODE
    except EngineStartFailed as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except (OSError, EngineStopped) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _parse(arguments: Sequence[str]) -> tuple[EngineArgs, ServerSettings]:
    parser = FlagParser(prog="modelserve-worker", description="Serve a Gemma 4 checkpoint over the OpenAI API.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve_parser = commands.add_parser("serve", help="load a checkpoint and serve it", allow_abbrev=False)
    add_engine_flags(serve_parser)
    add_server_flags(serve_parser)
    commands.add_parser("fetch", help="download a model from the Hugging Face Hub (see `fetch --help`)")
    commands.add_parser("cache", help="fill a cache of models, or free it (see `cache fill --help`)")
    commands.add_parser("kernels", help="compile a model's GPU kernels ahead (see `kernels --help`)")
    try:
        flags = vars(parser.parse_args(arguments))
        settings = {name: flags.pop(name) for name in ServerSettings.model_fields if name in flags}
        engine = {name: value for name, value in flags.items() if name not in ("command", "config")}
        return engine_args(engine, flags["config"]), server_settings(settings, os.environ)
    except InvalidInput as error:
        raise TerminalError(TerminationReason.InvalidEngineArgs, str(error)) from error


def serve(args: EngineArgs, settings: ServerSettings) -> None:
    """Start the engine, listen, serve, drain. Raises TerminalError, EngineStartFailed, EngineStopped and OSError.

    The engine loads while this process reads the tokenizer.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    architecture, weight_format = _read_checkpoint(args)
    args, without_drafter = without_missing_drafter(_settled(args, architecture, weight_format), architecture)
    listener = bind(args.host, args.port)
    places = min(args.max_num_seqs, args.max_num_batched_tokens)
    limits = FairLimits(places, args.max_num_batched_tokens, settings.max_waiting_requests)
    engine = EngineProcess(functools.partial(build_engine, args), limits, without_drafter=without_drafter)
    try:
        state = ServerState(_read_model(args, architecture))
        asyncio.run(_serve(args, settings, engine, state, listener, architecture))
    finally:
        engine.kill()


def _read_checkpoint(args: EngineArgs) -> tuple[ModelArchitecture, WeightFormat | None]:
    """Geometry of the model and how its weights are stored: in a way that is served; None is as they are computed."""
    try:
        weight_format = read_weight_format(Path(args.model))
        return read_architecture(Path(args.model)), weight_format if weight_format.quantised else None
    except InvalidInput as error:
        raise TerminalError.of_checkpoint(error) from error


def _settled(args: EngineArgs, architecture: ModelArchitecture, weight_format: WeightFormat | None) -> EngineArgs:
    """With the sizes of a step that nobody gave as a plan for this machine's GPU has them."""
    gpu = first_gpu(os.environ) if args.device != "cpu" else None
    if gpu is None:
        return args
    accelerator = accelerator_from_labels(
        gpu.product, memory_mib=gpu.memory_mib, compute_capability=gpu.compute_capability
    )
    if accelerator is None:
        return args
    images, audio = _images(args), _audio(args)
    settled = planned_args(args, architecture, accelerator, weight_format=weight_format, images=images, audio=audio)
    if settled is not args:
        chosen = ", ".join(f"{name} {getattr(settled, name)}" for name in STEP_SETTINGS)
        log.info("a step is sized as a plan for %s sizes it: %s", accelerator.product, chosen)
    return settled


def _read_model(args: EngineArgs, architecture: ModelArchitecture) -> ServedModel:
    directory = Path(args.model)
    try:
        text = load_checkpoint_text(directory)
    except InvalidInput as error:
        raise TerminalError.of_checkpoint(error) from error
    name, *aliases = args.served_names or (directory.resolve().name,)
    pool = DecodePool(decode_processes(on_cpu=args.device == "cpu"))
    return ServedModel(
        name,
        text,
        vocab_size=architecture.vocab_size,
        aliases=tuple(aliases),
        images=image_reader(args, pool),
        audio=audio_reader(args, pool),
    )


def _images(args: EngineArgs) -> ImageInput | None:
    """Room for images; None: they are not taken. Raises TerminalError: of the settings, or of the checkpoint."""
    with _told(of_setting="maxSoftTokens"):
        return read_images(args)


def _audio(args: EngineArgs) -> AudioInput | None:
    """The same of sounds."""
    with _told(of_setting="audioSeconds"):
        return read_audio(args)


@contextmanager
def _told(*, of_setting: str) -> Iterator[None]:
    """Faults of a setting as such, others as the checkpoint's."""
    try:
        yield
    except InvalidInput as error:
        of_input = error.field == of_setting
        raise (TerminalError.of_input if of_input else TerminalError.of_checkpoint)(error) from error


def audio_reader(args: EngineArgs, pool: DecodePool) -> AudioReader | None:
    """What reads sounds, where they are taken. Raises TerminalError."""
    audio = _audio(args)
    return None if audio is None else AudioReader(audio, pool, most_held_bytes=held_frames_bytes(audio))


def image_reader(args: EngineArgs, pool: DecodePool) -> ImageReader | None:
    """What reads images, where they are taken; processes of the pool start with the first one. Raises TerminalError."""
    images = _images(args)
    if images is None:
        return None
    fetcher = ImageFetcher(url_hosts(images.urls)) if images.urls else None
    return ImageReader(images, pool, most_held_bytes=held_pixels_bytes(images), fetcher=fetcher)


async def _serve(
    args: EngineArgs,
    settings: ServerSettings,
    engine: EngineProcess,
    state: ServerState,
    listener: socket.socket,
    architecture: ModelArchitecture,
) -> None:
    metrics = WorkerMetrics(state.model.name)
    adapters = _adapters(args, settings, state.model, architecture)

    def on_loading(done_bytes: int, total_bytes: int) -> None:
        state.detail = f"{done_bytes / 1e9:.2f} of {total_bytes / 1e9:.2f} GB of weights"

    async def start() -> None:
        began = time.monotonic()
        ready = await engine.start(on_loading)
        engine.on_steps = metrics.observe_steps
        metrics.observe_engine(engine.stats, cache_config=ready.cache_config)
        if adapters is not None:
            probe = await asyncio.to_thread(_probe, state.model, ready.max_model_len)
            adapters.start(engine, probe=probe, stats=engine.stats)
        state.mark_ready(engine)
        if args.measure_cache_quality:
            engine.run_beside(_measure_cache(engine, ready, state.model))
        log.info("ready after %.1f s, contexts up to %d tokens", time.monotonic() - began, ready.max_model_len)

    room = open_bodies_bytes(args.cpu_memory_bytes)
    if (images := state.model.images) is not None:
        room += images.most_held_bytes + encoded_bytes(images.images.per_request)
    if (audio := state.model.audio) is not None:
        room += audio.most_held_bytes + sent_bytes(audio.audio.per_request)
    await run_server(
        create_app(state, metrics, settings, OpenBodies(room), adapters),
        state,
        listener,
        shutdown_delay_seconds=args.shutdown_delay_seconds,
        drain_seconds=args.drain_seconds,
        starting=start(),
        stop_engine=engine.shutdown,
        settings=settings,
    )


def _adapters(
    args: EngineArgs, settings: ServerSettings, model: ServedModel, architecture: ModelArchitecture
) -> AdapterService | None:
    """Where there is room for adapters; with the set that is there at the start, which no operator has to tell."""
    if args.adapters is None:
        return None
    download = HubDownload(settings.adapter_cache_directory, settings.adapter_cache_bytes)
    service = AdapterService(
        args.adapters,
        architecture,
        model.names,
        sources=AdapterSources(download),
        directory=settings.adapter_directory,
    )
    if settings.adapter_set_directory is not None:
        try:
            if (mounted := read_set(settings.adapter_set_directory)) is not None:
                service.take(mounted)
        except (InvalidInput, ApiError) as error:  # others may come: it keeps nobody from the model
            log.error("the set of adapters to start with is not served: %s", error)
    return service


def _probe(model: ServedModel, max_model_len: int) -> AdapterProbe:
    """Of prompts in the model's own tokens."""
    tokenizer = model.text.tokenizer
    first = tokenizer.encode("", add_special_tokens=True).ids
    texts = trial_texts(
        lambda words: tokenizer.encode(words, add_special_tokens=False).ids,
        first=first,
        max_model_len=min(TEXT_TOKENS, max_model_len),
    )
    return AdapterProbe(probe_prompts([text.tokens for text in texts], first))


async def _measure_cache(engine: EngineProcess, ready: Ready, model: ServedModel) -> None:
    """What an int8 cache would cost, of a worker that has one of 16 bits or more."""
    dtype, layout = (ready.cache_config[name] for name in ("cache_dtype", "cache_layout"))
    if KVCacheDtype(dtype).element_bytes == 1:
        log.info("what an int8 cache costs is measured beside a 16-bit one; this worker has one of %s", dtype)
        return
    tokenizer = model.text.tokenizer

    def texts() -> list[TrialText]:
        return trial_texts(
            lambda words: tokenizer.encode(words, add_special_tokens=False).ids,
            first=tokenizer.encode("", add_special_tokens=True).ids,
            max_model_len=ready.max_model_len,
        )

    made = await asyncio.to_thread(texts)
    await measure_cache_quality(engine, made, layout=KVCacheLayout(layout))


if __name__ == "__main__":
    raise SystemExit(main())
