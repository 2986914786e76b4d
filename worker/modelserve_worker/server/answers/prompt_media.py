"""Images and sounds of a conversation: read from its parts, put into its prompt, decoded before the engine has it.

A template writes one `<|image|>` for each image and one `<|audio|>` for each sound; what a client types is text and
never one. Each becomes `<|image>`, a placeholder for every soft token, `<image|>`, and a sound likewise.
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
from modelserve_worker.media.audio_reader import DecodedSound
from modelserve_worker.media.data_url import data_of, is_data
from modelserve_worker.media.image_reader import ImageReader, SentImage
from modelserve_worker.media.media_error import MediaError, MediaTooLarge, ModalityNotServed
from modelserve_worker.request import Request
from modelserve_worker.server.answers.fetched_media import MediaElsewhere, Wanted
from modelserve_worker.server.answers.prompt_tokens import too_many_tokens
from modelserve_worker.server.answers.sent_sounds import decoded_sounds
from modelserve_worker.server.bodies.media_parts import AUDIO, media_parts
from modelserve_worker.server.bodies.protocol import ChatCompletionRequest
from modelserve_worker.server.errors.errors import ApiError
from modelserve_worker.server.errors.media_refusals import as_answer
from modelserve_worker.server.http.request_context import MediaSpan, RequestContext
from modelserve_worker.server.state import ServedModel

Part = tuple[str, Mapping[str, str]]
Sent = SentImage | DecodedSound


class _Marks(NamedTuple):
    """Tokens: what a template writes, and what stands before and behind the rows."""

    slot: str
    begin: str
    end: str


_IMAGE, _SOUND = _Marks("<|image|>", "<|image>", "<image|>"), _Marks("<|audio|>", "<|audio>", "<audio|>")
_DETAILS = {"low": BUDGETS[0], "auto": DEFAULT_BUDGET, "high": BUDGETS[-1]}


class PlacedMedia(NamedTuple):
    """An image or a sound and the position of its first row; `param` is the part of the request that it came in."""

    start: int
    media: Sent
    param: str

    @property
    def soft_tokens(self) -> int:
        return _rows(self.media)


def _rows(media: Sent) -> int:
    return media.soft_tokens if isinstance(media, SentImage) else len(media.frames)


def sent_media(body: ChatCompletionRequest, model: ServedModel) -> list[tuple[str, Sent]]:
    """Images, within their bounds, and sounds, decoded, of a body in the order of its messages, each with the part that
    it came in. Raises ApiError; MediaElsewhere where some are to be fetched, all of which may be; SoundsUndecoded where
    sounds are to be decoded first."""
    parts = list(media_parts(body.messages))
    images = [each for each in parts if each[1]["type"] != AUDIO]
    sounds = [each for each in parts if each[1]["type"] == AUDIO]
    asked = body.mm_processor_kwargs.max_soft_tokens if body.mm_processor_kwargs is not None else None
    made: dict[str, Sent] = {}
    try:
        _require_images(images, model, asked)
        elsewhere = _elsewhere(images, model)
        if model.images is not None and not elsewhere:
            made |= {param: _look(part, param, asked, model.images, model.fetched) for param, part in images}
    except MediaError as error:
        if model.image_metrics is not None:
            model.image_metrics.refused(error)
        raise as_answer(error, "messages") from error
    try:
        _require_sounds(sounds, model)
        elsewhere |= _elsewhere(sounds, model)
        if elsewhere:
            raise MediaElsewhere(elsewhere)
        made |= decoded_sounds(sounds, model, namespace=f"{model.tenant}\0{body.cache_salt or ''}")
    except MediaError as error:
        if model.audio_metrics is not None:
            model.audio_metrics.refused(error)
        raise as_answer(error, "messages") from error
    return [(param, made[param]) for param, _ in parts]


def _require_images(parts: Sequence[Part], model: ServedModel, asked: int | None) -> None:
    """Raises MediaError where there are images that are not taken, or too many."""
    if model.images is None:
        if parts or asked is not None:
            param = parts[0][0] if parts else "mm_processor_kwargs"
            raise ModalityNotServed(
                f"{param}: this server reads {_read(model)} only; plan images to have it see (spec.modalities.image)",
                param=param,
            )
        return
    most = model.images.images.per_request
    if len(parts) > most:
        raise MediaTooLarge(
            f"the request has {len(parts)} images; the limit is {most} (spec.modalities.image.perRequest)",
            param=parts[most][0],
        )


def _require_sounds(parts: Sequence[Part], model: ServedModel) -> None:
    """The same of sounds."""
    if model.audio is None:
        if parts:
            raise ModalityNotServed(
                f"{parts[0][0]}: this server reads {_read(model)} only; plan audio to have it hear "
                "(spec.modalities.audio)",
                param=parts[0][0],
            )
        return
    most = model.audio.audio.per_request
    if len(parts) > most:
        raise MediaTooLarge(
            f"the request has {len(parts)} sounds; the limit is {most} (spec.modalities.audio.perRequest)",
            param=parts[most][0],
        )


def _read(model: ServedModel) -> str:
    return " and ".join({"text": "text", "image": "images", "audio": "sounds"}[each] for each in model.modalities)


def _elsewhere(parts: Sequence[Part], model: ServedModel) -> dict[str, Wanted]:
    """Addresses that are not fetched yet, with the first part that names each. Raises MediaUrlRefused."""
    places: dict[str, Wanted] = {}
    for param, part in parts:
        url = part["url"]
        if model.fetcher is None or is_data(url) or url in model.fetched:
            continue
        try:
            model.fetcher.place(url)
        except MediaError as error:
            error.param = param
            raise
        places.setdefault(url, Wanted(param, part["type"] == AUDIO))
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


def placed_media(
    prompt: array[int],
    mark: int,
    media: Sequence[tuple[str, Sent]],
    ids: Mapping[str, int],
    *,
    most_tokens: int,
) -> tuple[array[int], int, tuple[PlacedMedia, ...]]:
    """The prompt with rows for its images and sounds, where the position `mark` is in it, and where each of them is.
    Raises ApiError where the template has not one place for each."""
    if not media:
        return prompt, mark, ()
    kinds = [_IMAGE if isinstance(each, SentImage) else _SOUND for _, each in media]
    if missing := [name for marks in dict.fromkeys(kinds) for name in marks if name not in ids]:
        what = "images" if missing[0] in _IMAGE else "sounds"
        raise ApiError(f"the checkpoint's tokenizer has no {missing[0]}; it takes no {what}", param="messages")
    wanted = [ids[marks.slot] for marks in kinds]
    values = np.asarray(prompt)
    slots = np.flatnonzero(np.isin(values, wanted)).tolist()
    if values[slots].tolist() != wanted:
        count = {name: sum(marks is each for marks in kinds) for name, each in (("images", _IMAGE), ("sounds", _SOUND))}
        told = " and ".join(f"{number} {name}" for name, number in count.items() if number)
        raise ApiError(
            f"the chat template wrote {len(slots)} places for {told}; it takes none where they are",
            param=media[0][0], code="invalid_value",
        )  # fmt: skip
    added = sum(_rows(each) + 1 for _, each in media)
    if len(prompt) + added > most_tokens:
        raise too_many_tokens(len(prompt) + added, most_tokens, param="messages")
    ready, placed = array("i"), []
    for (before, slot), marks, (param, each) in zip(pairwise([-1, *slots]), kinds, media, strict=True):
        ready += prompt[before + 1 : slot]
        ready.append(ids[marks.begin])
        placed.append(PlacedMedia(len(ready), each, param))
        ready += array("i", [ids[marks.slot]]) * _rows(each)
        ready.append(ids[marks.end])
    ready += prompt[slots[-1] + 1 :]
    before_mark = sum(_rows(each) + 1 for slot, (_, each) in zip(slots, media, strict=True) if slot < mark)
    return ready, mark + before_mark, tuple(placed)


async def attach_media(
    requests: Sequence[Request],
    media: Sequence[PlacedMedia],
    model: ServedModel,
    context: RequestContext,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Decode the images of a prompt, which `requests` share, and give them their spans, those of sounds, too. What they
    hold until they are answered is counted before. Raises ApiError."""
    images = [each for each in media if isinstance(each.media, SentImage)]
    started = clock()
    namespace = f"{context.tenant}\0{requests[0].cache_salt}"
    try:
        sent = _hold(requests, media, model, context)
        spans = []
        for each in media:
            if isinstance(each.media, DecodedSound):
                spans.append(EmbeddedSpan(each.start, each.media.frames, each.media.key, mutual=False))
            else:
                spans.append(await _image(each, each.media, model, namespace, clock))
    except MediaError as error:
        metrics = model.image_metrics if images else model.audio_metrics
        if metrics is not None:
            metrics.refused(error)
        raise as_answer(error, "messages") from error
    if images:
        context.media_spans.append(MediaSpan("images decode", len(images), started, clock()))
    made = tuple(spans)
    context.account.hold_more(-sent)
    for request in requests:
        request.spans = made


def _hold(
    requests: Sequence[Request], media: Sequence[PlacedMedia], model: ServedModel, context: RequestContext
) -> int:
    """Count what they hold; returns how much of it is images as they were sent, which is given up once they are
    decoded. Raises MediaTooLarge, and ApiError 429."""
    sent = held = 0
    for kind, most in ((SentImage, model.images), (DecodedSound, model.audio)):
        of_kind = 0
        for each in media:
            if isinstance(each.media, SentImage) and kind is SentImage and model.images is not None:
                of_kind += each.media.soft_tokens * model.images.images.architecture.patch_values
                sent += len(each.media.data)
            elif isinstance(each.media, DecodedSound) and kind is DecodedSound:
                of_kind += each.media.frames.values.nbytes
        if most is not None and len(requests) * of_kind > most.most_held_bytes:
            what = "images" if kind is SentImage else "sounds"
            raise MediaTooLarge(
                f"the {what} of {len(requests)} answers take {len(requests) * of_kind} bytes; the limit is "
                f"{most.most_held_bytes}: ask for fewer answers (n), or send smaller {what}",
                param="n" if len(requests) > 1 else "messages",
            )
        held += len(requests) * of_kind
    context.account.hold_more(held + sent)
    return sent


async def _image(
    placed: PlacedMedia, image: SentImage, model: ServedModel, namespace: str, clock: Callable[[], float]
) -> EmbeddedSpan:
    reader, metrics = model.images, model.image_metrics
    assert reader is not None, "nothing places images where there is no reader"
    known, began = reader.is_known(image, namespace), clock()
    try:
        patches = await reader.read(image, namespace)
    except MediaError as error:
        error.param = error.param or placed.param
        raise
    if metrics is not None:
        metrics.read(image.soft_tokens, None if known else clock() - began)
    return EmbeddedSpan(placed.start, patches, image.key, reader.mutual)
