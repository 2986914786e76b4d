"""Images in a plan: what a spec asks for, refused where the model or the steps do not have it, and what they cost."""

from __future__ import annotations

from modelserve.api.media.modalities import ImagePlan
from modelserve.api.spec import ModelServeSpec
from modelserve.errors import InvalidInput
from modelserve.model.images import DEFAULT_BUDGET, ImageArchitecture
from modelserve.sizing.media.image_input import ImageInput, decode_processes, image_host_bytes
from modelserve.sizing.memory import MemoryPlan
from modelserve.units import GIB

FIELD = "spec.modalities.image"


def image_input(spec: ModelServeSpec, architecture: ImageArchitecture | None) -> ImageInput | None:
    """Room for images, with the defaults of what is left open; None: none was asked for.

    Raises InvalidInput for a model that takes none here, and for steps that are shorter than an image.
    """
    asked = spec.modalities.image if spec.modalities else None
    if asked is None:
        return None
    if architecture is None:
        raise InvalidInput(
            f"{FIELD}: {spec.model.uri} takes no images here: a model sees whose safetensors hold what makes rows of "
            "images, not quantised, beside a vision_config; leave modalities out to serve it for text, or, of a model "
            "that release 0.2 inspected, delete the ConfigMap NAME-model-... to have it read anew",
            field=FIELD,
        )
    tokens = asked.max_soft_tokens or DEFAULT_BUDGET
    steps = spec.engine.max_num_batched_tokens if spec.engine else None
    problem = architecture.problem(max_soft_tokens=tokens, max_num_batched_tokens=steps or tokens)
    if problem is not None:
        raise InvalidInput(f"{FIELD}.maxSoftTokens: {problem}", field=f"{FIELD}.maxSoftTokens")
    return ImageInput(asked.per_request, tokens, architecture, asked.urls or ())


def image_plan(images: ImageInput | None, memory: MemoryPlan, *, gpus: int) -> ImagePlan | None:
    """As a plan tells it; None where none was asked for."""
    if images is None:
        return None
    terms = {term.name: term.bytes for term in memory.terms}
    return ImagePlan(
        per_request=images.per_request,
        max_soft_tokens=images.max_soft_tokens,
        embedder_bytes=terms.get("image_embedder", 0),
        rows_bytes=terms.get("image_rows", 0),
        cache_bytes=terms.get("image_cache", 0),
        host_bytes=image_host_bytes(images, ranks=max(1, gpus), on_cpu=not gpus),
        urls=images.urls or None,
        decoders=decode_processes(on_cpu=not gpus),
    )


def image_text(planned: ImagePlan | None, *, bytes_per_token: int) -> str:
    """What seeing costs, in a sentence; `bytes_per_token`: of a long context's cache."""
    if planned is None:
        return ""
    taken = planned.embedder_bytes + planned.rows_bytes + planned.cache_bytes
    tokens = f", {taken // bytes_per_token:,} tokens of cache" if bytes_per_token else ""
    return (
        f"{planned.per_request} image{'s' if planned.per_request > 1 else ''} a request of {planned.max_soft_tokens} "
        f"tokens at most take {taken / GIB:.3f} GiB{tokens}, and {planned.host_bytes / GIB:.2f} GiB and "
        f"{planned.decoders} processor{'s' if planned.decoders > 1 else ''} of the host"
    )
