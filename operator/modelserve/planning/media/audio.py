"""Sounds in a plan: what a spec asks for, refused where the model does not have it, and what they cost."""

from __future__ import annotations

from modelserve.api.media.modalities import AudioPlan
from modelserve.api.spec import ModelServeSpec
from modelserve.errors import InvalidInput
from modelserve.model.audio import AudioArchitecture
from modelserve.sizing.media.audio_input import DEFAULT_SECONDS, AudioInput, audio_host_bytes
from modelserve.sizing.media.image_input import decode_processes
from modelserve.sizing.memory import MemoryPlan
from modelserve.units import GIB

FIELD = "spec.modalities.audio"


def audio_input(spec: ModelServeSpec, architecture: AudioArchitecture | None) -> AudioInput | None:
    """Room for sounds, with the defaults of what is left open; None: none was asked for.

    Raises InvalidInput for a model that hears nothing here, and for longer sounds than it does.
    """
    asked = spec.modalities.audio if spec.modalities else None
    if asked is None:
        return None
    if architecture is None:
        raise InvalidInput(
            f"{FIELD}: {spec.model.uri} hears nothing here: E2B, E4B and 12B do, from safetensors that hold what makes "
            "rows of sounds, not quantised, beside an audio_config; leave modalities.audio out, or, of a model that an "
            "earlier release inspected, delete the ConfigMap NAME-model-... to have it read anew",
            field=FIELD,
        )
    seconds = asked.seconds or DEFAULT_SECONDS
    if (problem := architecture.problem(seconds)) is not None:
        raise InvalidInput(f"{FIELD}.seconds: {problem}", field=f"{FIELD}.seconds")
    return AudioInput(asked.per_request, seconds, architecture)


def audio_plan(audio: AudioInput | None, memory: MemoryPlan, *, gpus: int, sees: bool) -> AudioPlan | None:
    """As a plan tells it; None where none was asked for. Where it `sees`, what decodes images decodes sounds."""
    if audio is None:
        return None
    terms = {term.name: term.bytes for term in memory.terms}
    return AudioPlan(
        per_request=audio.per_request,
        seconds=audio.seconds,
        embedder_bytes=terms.get("audio_embedder", 0),
        rows_bytes=terms.get("audio_rows", 0),
        cache_bytes=terms.get("audio_cache", 0),
        host_bytes=audio_host_bytes(audio, ranks=max(1, gpus), on_cpu=not gpus, decoders=not sees),
        decoders=None if sees else decode_processes(on_cpu=not gpus),
    )


def audio_text(planned: AudioPlan | None, *, bytes_per_token: int) -> str:
    """What hearing costs, in a sentence; `bytes_per_token`: of a long context's cache."""
    if planned is None:
        return ""
    taken = planned.embedder_bytes + planned.rows_bytes + planned.cache_bytes
    tokens = f", {taken // bytes_per_token:,} tokens of cache" if bytes_per_token else ""
    processors = ""
    if planned.decoders:
        processors = f" and {planned.decoders} processor{'s' if planned.decoders > 1 else ''}"
    return (
        f"{planned.per_request} sound{'s' if planned.per_request > 1 else ''} a request of {planned.seconds} s at most "
        f"take {taken / GIB:.3f} GiB{tokens}, and {planned.host_bytes / GIB:.2f} GiB{processors} of the host"
    )
