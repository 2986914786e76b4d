"""Tables whose attention is kernels for any model, as Triton's interpreter runs them; the rest is plain PyTorch."""

from __future__ import annotations

from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve.sizing.backends.attention import AttentionShape
from modelserve.sizing.backends.attention_kernels import Attended, attention_choices
from modelserve.sizing.backends.resolve import ATTENTION_OPERATIONS
from modelserve.sizing.backends.table import KernelTable
from modelserve.sizing.pages import CacheGeometry, KVCacheLayout
from modelserve.sizing.rank_settings import Profile


def attention_table(
    architecture: ModelArchitecture, geometry: CacheGeometry, *, capability: int = 80, profile: Profile = "fast"
) -> KernelTable:
    v_only = geometry.layout is KVCacheLayout.V_ONLY
    shapes = (AttentionShape.of(architecture, kind, dtype=geometry.dtype, v_only=v_only, ranks=1) for kind in LayerKind)
    choices = (
        choice
        for shape in shapes
        for operation in ATTENTION_OPERATIONS
        for choice in attention_choices(operation, Attended(shape, capability, profile))
    )
    return KernelTable(capability, profile, on_kernels=True, choices=tuple(choices))
