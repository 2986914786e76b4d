"""What making rows of images and sounds costs beside rows of prompts, by the products of both: a rule of the scheduler.

A tower multiplies each of its patches or frames with the parameters of its layers, an image's patches with the keys of
all of them, too; a row of a prompt is multiplied with those of the text model. Tensor parallel ranks share the rows of
text, while each has the whole tower.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.audio_tower import MEL_BINS
from modelserve.planning.speed.step_time import layer_parameters
from modelserve.sizing.media.audio_embedder import audio_shapes
from modelserve.sizing.media.audio_input import AudioInput
from modelserve.sizing.media.image_input import ImageInput


@dataclass(frozen=True, slots=True)
class SpanCost:
    """Costs in rows of prompts of an image or a sound of n soft tokens: n (each + n squared). Steps in which requests
    decode make rows of at most `most_soft_tokens`, or of one."""

    each: float = 0.0
    squared: float = 0.0
    most_soft_tokens: int = 0

    def rows(self, soft_tokens: int) -> float:
        return soft_tokens * (self.each + self.squared * soft_tokens)


FREE = SpanCost()


@dataclass(frozen=True, slots=True)
class EncodingCost:
    """Nothing of what is not taken, nor where there is no tower: a row that is made of its own patch or frame alone is
    next to none."""

    images: SpanCost = FREE
    audio: SpanCost = FREE

    @classmethod
    def of(
        cls,
        images: ImageInput | None,
        audio: AudioInput | None,
        architecture: ModelArchitecture,
        *,
        tensor_parallel: int,
    ) -> EncodingCost:
        row = 2 * layer_parameters(architecture) / tensor_parallel
        return cls(_image_cost(images, row), _audio_cost(audio, row))


def _image_cost(images: ImageInput | None, row: float) -> SpanCost:
    """`row`: operations of a row of a prompt."""
    tower = images.architecture.tower if images is not None else None
    if images is None or tower is None:
        return FREE
    attention, width = 4 * tower.attention_size, 3 * tower.intermediate_size  # columns of a layer's matrices
    layer = 2 * tower.hidden_size * (attention + width)
    patches = tower.patches
    return SpanCost(
        each=patches * tower.layers * layer / row,
        squared=patches * patches * tower.layers * attention / row,  # a key: two products, two operations a column
        most_soft_tokens=images.max_soft_tokens,
    )


def _audio_cost(audio: AudioInput | None, row: float) -> SpanCost:
    """A row attends to few others, so it takes as long in a long sound."""
    tower = audio.architecture.tower if audio is not None else None
    if audio is None or tower is None:
        return FREE
    matrices = sum(prod(shape) for shape in audio_shapes(audio.architecture, tower.hidden_size) if len(shape) == 2)
    first, second = tower.channels
    frames, bins = audio.architecture.frames_per_row, MEL_BINS
    convolutions = 9 * (first * frames * bins / 4 + first * second * frames * bins / 16)
    return SpanCost(each=2 * (matrices + convolutions) / row, most_soft_tokens=audio.max_soft_tokens)


NO_ENCODING = EncodingCost()
