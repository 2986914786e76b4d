"""What hearing takes of a rank's memory: weights of what makes rows of sounds, what a step with such rows holds, and
rows that are kept for the next step. Bytes, unless they say otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.audio import AudioArchitecture
from modelserve.model.audio_tower import MEL_BINS, AudioTowerArchitecture
from modelserve.sizing.media.audio_input import AudioInput
from modelserve.sizing.media.embedder import packed_rows, whole_segments
from modelserve.sizing.weights.text import element_bytes

KEPT_SOUNDS = 8
"""Sounds whose rows are kept between chunks, as of images."""

FLOAT32 = 4


def audio_shapes(audio: AudioArchitecture, hidden_size: int) -> tuple[tuple[int, ...], ...]:
    """Of every tensor of it, which each rank holds whole."""
    tower = () if audio.tower is None else tuple(_tower_shapes(audio.tower, audio))
    return (*tower, (hidden_size, audio.embed_size))


def _tower_shapes(tower: AudioTowerArchitecture, audio: AudioArchitecture) -> Iterator[tuple[int, ...]]:
    hidden, width, (first, second) = tower.hidden_size, tower.feed_forward_size, tower.channels
    yield from ((first, 1, 3, 3), (first,), (second, first, 3, 3), (second,), (hidden, tower.subsampled_size))
    feed_forward = ((1, width, hidden), (1, hidden, width))
    attention = ((3, hidden, hidden), (1, hidden, hidden))
    convolution = ((1, 2 * hidden, hidden), (1, hidden, hidden))
    for _ in range(tower.layers):
        for stacked, rows, columns in (*feed_forward, *feed_forward, *attention, *convolution):
            yield stacked * rows, columns
            if tower.clipped:
                yield stacked, 4
        yield from ((hidden, hidden), (tower.head_dim,), (hidden, 1, tower.kernel))
        yield from ((hidden,),) * 9
    yield from ((audio.embed_size, hidden), (audio.embed_size,))


def audio_embedder_bytes(audio: AudioArchitecture, architecture: ModelArchitecture, *, segments: bool) -> int:
    """Of the weights; with `segments` as PyTorch's allocator holds them on a GPU, the large ones in whole segments."""
    sizes = [prod(shape) * element_bytes(architecture) for shape in audio_shapes(audio, architecture.hidden_size)]
    return whole_segments(sizes) if segments else sum(sizes)


def kept_sounds(audio: AudioArchitecture, *, max_num_seqs: int) -> int:
    """Sounds whose rows have room between chunks; none where a row can be made by itself for next to nothing."""
    return 0 if audio.tower is None else min(KEPT_SOUNDS, max_num_seqs)


def kept_sounds_bytes(audio: AudioInput, architecture: ModelArchitecture, *, max_num_seqs: int) -> int:
    """Of the room for rows between chunks."""
    row = architecture.hidden_size * element_bytes(architecture)
    return kept_sounds(audio.architecture, max_num_seqs=max_num_seqs) * audio.max_soft_tokens * row


def audio_rows_bytes(audio: AudioInput, architecture: ModelArchitecture, *, max_num_batched_tokens: int) -> int:
    """Of a step all of whose rows are of sounds: the rows where they are put together, those that were made together,
    and what making them holds at most."""
    e, tower, tokens = element_bytes(architecture), audio.architecture.tower, max_num_batched_tokens
    most = audio.max_soft_tokens if tower is not None else min(audio.max_soft_tokens, tokens)
    made = packed_rows(most, tokens)
    rows = (tokens + made) * architecture.hidden_size * e
    if tower is None:
        return rows + made * audio.architecture.embed_size * (FLOAT32 + 2 * e)
    return rows + _tower_bytes(tower, audio.architecture, e, rows=made, longest=audio.max_soft_tokens)


def _tower_bytes(tower: AudioTowerArchitecture, audio: AudioArchitecture, e: int, *, rows: int, longest: int) -> int:
    """Spectra throughout, and the larger of what convolutions hold of the longest sound, and what layers do of all,
    which lie in blocks with one of zeros before each: the widest are a feed-forward, and attention in float32."""
    spectra = rows * audio.frames_per_row * MEL_BINS * FLOAT32
    first = audio.frames_per_row // 2 * (MEL_BINS // 2) * tower.channels[0]
    convolutions = longest * (audio.frames_per_row * MEL_BINS + 2 * first) * e + rows * tower.hidden_size * e
    blocked = rows + 2 * tower.keys * max(1, rows // longest)
    hidden = tower.hidden_size
    scores = 3 * tower.heads * 2 * tower.keys * FLOAT32
    feed_forward = (3 * hidden + 2 * tower.feed_forward_size) * e
    attention = hidden * e + 10 * hidden * FLOAT32 + scores
    return spectra + max(convolutions, blocked * (max(feed_forward, attention) + e))
