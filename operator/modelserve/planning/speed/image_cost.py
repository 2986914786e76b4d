"""What making rows of an image costs beside rows of prompts, by the products of both: a rule of the scheduler.

A tower multiplies each of its patches, `tower.patches` to a soft token, with the parameters of its layers, and with the
keys of all patches of the image; a row of a prompt is multiplied with those of the text model. Tensor parallel ranks
share the rows of text, while each has the whole tower.
"""

from __future__ import annotations

from dataclasses import dataclass

from modelserve.model.architecture import ModelArchitecture
from modelserve.planning.speed.step_time import layer_parameters
from modelserve.sizing.media.image_input import ImageInput


@dataclass(frozen=True, slots=True)
class ImageCost:
    """Costs in rows of prompts of an image of n soft tokens: n (each + n squared). Steps in which requests decode make
    rows of at most `most_soft_tokens`, or of one image."""

    each: float = 0.0
    squared: float = 0.0
    most_soft_tokens: int = 0

    def rows(self, soft_tokens: int) -> float:
        return soft_tokens * (self.each + self.squared * soft_tokens)

    @classmethod
    def of(cls, images: ImageInput | None, architecture: ModelArchitecture, *, tensor_parallel: int) -> ImageCost:
        """Nothing where there are no images, or no tower: a row that is made of its own patch alone is next to none."""
        tower = images.architecture.tower if images is not None else None
        if images is None or tower is None:
            return NO_IMAGES
        row = 2 * layer_parameters(architecture) / tensor_parallel
        attention, width = 4 * tower.attention_size, 3 * tower.intermediate_size  # columns of a layer's matrices
        layer = 2 * tower.hidden_size * (attention + width)
        patches = tower.patches
        return cls(
            each=patches * tower.layers * layer / row,
            squared=patches * patches * tower.layers * attention / row,  # a key: two products, two operations a column
            most_soft_tokens=images.max_soft_tokens,
        )


NO_IMAGES = ImageCost()
