"""Rotary position embedding of both layer kinds, in the one place that attention and cache readers share.

A head of D dimensions is D/2 pairs (i, i + D/2); pair i turns by position * inv_freq[i].
Sliding layers: inv_freq[i] = theta^(-2i/D) for every pair.
Global layers ("proportional"): the same formula, over the full D, for the first partial_rotary_factor * D/2 pairs; the
rest have frequency 0 and stay as they are. With D = 512 and factor 0.25 dimensions 0-63 and 256-319 turn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve_worker.kernels.step_start import PlainStep, Rotation, StepBackend, cos_sin


def inverse_frequencies(head_dim: int, *, theta: float, rotated_pairs: int) -> Tensor:
    """float32 [head_dim / 2], radians per position; zero past the first `rotated_pairs`."""
    exponents = torch.arange(0, 2 * rotated_pairs, 2, dtype=torch.float32) / head_dim
    frequencies = torch.zeros(head_dim // 2, dtype=torch.float32)
    frequencies[:rotated_pairs] = 1.0 / theta**exponents
    return frequencies


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn every head of x [T, heads, D] by cos and sin [T, D / 2]; arithmetic and result in the dtype of x."""
    cos, sin = cos.to(x.dtype).unsqueeze(1), sin.to(x.dtype).unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class RotaryEmbedding:
    """Angles of a model. Nothing is tabulated: a step computes cos and sin of its own positions once per layer kind."""

    def __init__(
        self, architecture: ModelArchitecture, *, device: torch.device, backend: StepBackend | None = None
    ) -> None:
        """`backend` left out: plain PyTorch's."""
        sliding = inverse_frequencies(
            architecture.head_dim, theta=architecture.sliding_rope_theta, rotated_pairs=architecture.head_dim // 2
        )
        full = inverse_frequencies(
            architecture.global_head_dim,
            theta=architecture.global_rope_theta,
            rotated_pairs=architecture.global_rotary_pairs,
        )
        self._backend = backend or PlainStep()
        self._inverse_frequencies = {LayerKind.SLIDING: sliding.to(device), LayerKind.GLOBAL: full.to(device)}

    def inverse_frequencies(self, kind: LayerKind) -> Tensor:
        """float32 [D / 2], radians per position."""
        return self._inverse_frequencies[kind]

    def cos_sin(self, kind: LayerKind, positions: Tensor) -> Rotation:
        """cos and sin, float32 [T, D / 2], for positions [T] of any integer dtype."""
        return cos_sin(positions, self._inverse_frequencies[kind])

    def rotations(self, positions: Tensor) -> dict[LayerKind, Rotation]:
        """The same of both kinds."""
        kinds = LayerKind.SLIDING, LayerKind.GLOBAL
        found = self._backend.rotations(positions, *(self._inverse_frequencies[kind] for kind in kinds))
        return dict(zip(kinds, found, strict=True))
