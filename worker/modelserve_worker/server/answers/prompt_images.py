"""Images of a conversation: read from its parts, put into its prompt, decoded before the engine has it.

A template writes one `<|image|>` for each image; what a client types is text and never one. Each becomes `<|image>`, a
placeholder for every soft token, `<image|>`.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from modelserve.model.images import BUDGETS, DEFAULT_BUDGET
from modelserve.sizing.media.image_input import ENCODED_BYTES
from modelserve_worker.embedded_spans import EmbeddedSpan
from modelserve_worker.media.data_url import data_of, is_data
from modelserve_worker.media.image_reader import ImageReader, SentImage
from modelserve_worker.media.media_error import MediaError, MediaTooLarge, ModalityNotServed
from modelserve_worker.request import Request
from modelserve_worker.server.answers.fetched_images import ImagesElsewhere
from modelserve_worker.server.answers.prompt_tokens import too_many_tokens
from modelserve_worker.server.bodies.image_parts import image_parts
from modelserve_worker.server.bodies.protocol import ChatCompletionRequest
from modelserve_worker.server.errors.errors import ApiError
from modelserve_worker.server.errors.media_refusals import as_answer
from modelserve_worker.server.http.request_context import ImageSpan, RequestContext
from modelserve_worker.server.state import ServedModel

_SLOT, _BEGIN, _END = "<|image|>", "<|image>", "<image|>"
_DETAILS = {"low": BUDGETS[0], "auto": DEFAULT_BUDGET, "high": BUDGETS[-1]}


class PlacedImage(NamedTuple):
    """An image and the position of its first row; `param` is the part of the request that it came in."""

    start: int
    image: SentImage
    param: str


def sent_images(body: ChatCompletionRequest, model: ServedModel) -> list[tuple[str, SentImage]]:
    """The images of a body in the order of its messages, within their bounds, each with the part that it came in.
    Raises ApiError, and ImagesElsewhere where some are to be fetched, all of which may be."""
    parts, reader = list(image_parts(body.messages)), model.images
    asked = body.mm_processor_kwargs.max_soft_tokens if body.mm_processor_kwargs is not None else None
    try:
        if reader is None:
            if parts or asked is not None:
                param = parts[0][0] if parts else "mm_processor_kwargs"
                raise ModalityNotServed(
                    f"{param}: this server reads text only; plan images to have it see (spec.modalities.image)",
                    param=param,
                )
            return []
        most = reader.images.per_request
        if len(parts) > most:
            raise MediaTooLarge(
                f"the request has {len(parts)} images; the limit is {most} (spec.modalities.image.perRequest)",
                param=parts[most][0],
            )
        if places := _elsewhere(parts, model, reader):
            raise ImagesElsewhere(places)
        return [(param, _look(part, param, asked, reader, model.fetched)) for param, part in parts]
    except MediaError as error:
        if model.image_metrics is not None:
            model.image_metrics.refused(error)
        raise as_answer(error, "messages") from error


def _elsewhere(
    parts: Sequence[tuple[str, Mapping[str, str]]], model: ServedModel, reader: ImageReader
) -> dict[str, str]:
    """Addresses that are not fetched yet, with the first part that names each. Raises MediaUrlRefused."""
    places: dict[str, str] = {}
    for param, part in parts:
        url = part["url"]
        if reader.fetcher is None or is_data(url) or url in model.fetched:
            continue
        try:
            reader.fetcher.place(url)
        except MediaError as error:
            error.param = param
            raise
        places.setdefault(url, param)
    return places


def _look(
    part: Mapping[str, str], param: str, asked: int | None, reader: ImageReader, fetched: Mapping[str, bytes]
) -> SentImage:
    try:
        budget, url = _budget(part, asked, reader), part["url"]
        data = fetched[url] if url in fetched else data_of(url, most_bytes=ENCODED_BYTES)
        return reader.look(data, budget)
    except MediaError as error:
        error.param = error.param or param
        raise


def _budget(part: Mapping[str, str], asked: int | None, reader: ImageReader) -> int:
    """Soft tokens: those of the part, or of the request, which the plan must have; else by its detail, as planned."""
    own = part.get("max_soft_tokens")
    named = int(own) if own is not None else None if "detail" in part else asked
    if named is None:
        return min(_DETAILS[part.get("detail", "auto")], reader.images.max_soft_tokens)
    if named > reader.images.max_soft_tokens:
        raise MediaTooLarge(
            f"max_soft_tokens {named}: an image has at most {reader.images.max_soft_tokens} here "
            "(spec.modalities.image.maxSoftTokens)"
        )
    return named


def placed_images(
    prompt: array[int],
    mark: int,
    images: Sequence[tuple[str, SentImage]],
    ids: Mapping[str, int],
    *,
    most_tokens: int,
) -> tuple[array[int], int, tuple[PlacedImage, ...]]:
    """The prompt with rows for its images, where the position `mark` is in it, and where each image is. Raises ApiError
    where the template has not one place for each."""
    if not images:
        return prompt, mark, ()
    if missing := [name for name in (_SLOT, _BEGIN, _END) if name not in ids]:
        raise ApiError(f"the checkpoint's tokenizer has no {missing[0]}; it takes no images", param="messages")
    slots = np.flatnonzero(np.asarray(prompt) == ids[_SLOT]).tolist()
    if len(slots) != len(images):
        raise ApiError(
            f"the chat template wrote {len(slots)} places for {len(images)} images; it takes none where they are",
            param=images[0][0], code="invalid_value",
        )  # fmt: skip
    added = sum(image.soft_tokens + 1 for _, image in images)
    if len(prompt) + added > most_tokens:
        raise too_many_tokens(len(prompt) + added, most_tokens, param="messages")
    ready, placed = array("i"), []
    for (before, slot), (param, image) in zip(pairwise([-1, *slots]), images, strict=True):
        ready += prompt[before + 1 : slot]
        ready.append(ids[_BEGIN])
        placed.append(PlacedImage(len(ready), image, param))
        ready += array("i", [ids[_SLOT]]) * image.soft_tokens
        ready.append(ids[_END])
    ready += prompt[slots[-1] + 1 :]
    before_mark = sum(image.soft_tokens + 1 for slot, (_, image) in zip(slots, images, strict=True) if slot < mark)
    return ready, mark + before_mark, tuple(placed)


async def attach_images(
    requests: Sequence[Request],
    images: Sequence[PlacedImage],
    model: ServedModel,
    context: RequestContext,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Decode the images of a prompt, which `requests` share, and give them their spans. What they hold until they are
    answered is counted before. Raises ApiError."""
    reader, metrics = model.images, model.image_metrics
    assert reader is not None, "nothing places images where there is no reader"
    held = len(requests) * sum(each.image.soft_tokens for each in images) * reader.images.architecture.patch_values
    sent = sum(len(each.image.data) for each in images)
    started = clock()
    namespace = f"{context.tenant}\0{requests[0].cache_salt}"
    try:
        if held > reader.most_held_bytes:
            raise MediaTooLarge(
                f"the images of {len(requests)} answers take {held} bytes; the limit is {reader.most_held_bytes}: "
                "ask for fewer answers (n), or send smaller images",
                param="n" if len(requests) > 1 else "messages",
            )
        context.account.hold_more(held + sent)
        spans = []
        for each in images:
            known = reader.is_known(each.image, namespace)
            began = clock()
            try:
                patches = await reader.read(each.image, namespace)
            except MediaError as error:
                error.param = error.param or each.param
                raise
            if metrics is not None:
                metrics.read(each.image.soft_tokens, None if known else clock() - began)
            spans.append(EmbeddedSpan(each.start, patches, each.image.key, reader.mutual))
    except MediaError as error:
        if metrics is not None:
            metrics.refused(error)
        raise as_answer(error, "messages") from error
    context.image_spans.append(ImageSpan("decode", len(images), started, clock()))
    made = tuple(spans)
    context.account.hold_more(-sent)
    for request in requests:
        request.spans = made
