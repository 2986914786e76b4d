"""What one rank of a worker is set up with, as far as its memory follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from modelserve.model.weight_format import WeightFormat
from modelserve.sizing.adapters import AdapterLimits
from modelserve.sizing.media.audio_input import AudioInput
from modelserve.sizing.media.image_input import ImageInput
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout
from modelserve.sizing.speculation import NO_DRAFTS, Speculation

Profile = Literal["fast", "exact"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """`kv_dtype` and `kv_layout` are the cache's: GPUs expand what some formats store. `weight_format` left out is the
    architecture's dtype. With `speculation` a sequence has up to 1 + k rows in a step, of which each may get a token.
    In `profile` exact the hidden states of a whole step have a buffer. `capability` of the GPU, 10 * major + minor,
    says which kernels multiply; None: the GPU is not known, or there is none. `adapters`, `images`
    and `audio`: None, no room for any."""

    tensor_parallel_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    kv_dtype: KVCacheDtype
    kv_layout: KVCacheLayout
    on_cpu: bool = False
    weight_format: WeightFormat | None = None
    speculation: Speculation = NO_DRAFTS
    profile: Profile = "fast"
    capability: int | None = None
    adapters: AdapterLimits | None = None
    images: ImageInput | None = None
    audio: AudioInput | None = None

    @property
    def decode_rows(self) -> int:
        """Most rows of a step without chunks, of which each may get a token."""
        return self.speculation.step_rows(self.max_num_seqs)

    @property
    def step_rows(self) -> int:
        """Most rows of a step."""
        return max(self.max_num_batched_tokens, self.decode_rows)
