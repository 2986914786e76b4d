"""How the text weights of a checkpoint are stored: the type, what its scales span, and which matrices have it."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import lru_cache
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

FP8_BLOCK = 128  # rows and columns that share one scale of block formats
NVFP4_GROUP = 16  # inputs that share one scale of NVFP4


class StoredType(StrEnum):
    """Type of a stored matrix's elements."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    INT4 = "int4"  # eight in an int32, one scale per group of inputs, zero points or none
    INT8 = "int8"  # symmetric, one scale per output row or per group of inputs
    FP8 = "fp8"  # e4m3, scales per output row, per matrix or per block
    NVFP4 = "nvfp4"  # e2m1, two in a byte; one e4m3 scale per 16 inputs, and one float32 scale per checkpoint matrix


QUANTISED = (StoredType.INT4, StoredType.INT8, StoredType.FP8, StoredType.NVFP4)
_SPANS: dict[StoredType, tuple[str | None, ...]] = {
    StoredType.INT4: ("group",),
    StoredType.INT8: ("channel", "group"),
    StoredType.FP8: ("channel", "tensor", "block"),
    StoredType.NVFP4: ("group",),
}


class ScaleType(StrEnum):
    """Type of scales of groups, held as the checkpoint has them: rounded they would move a whole group."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"

    @property
    def bytes(self) -> int:
        return 4 if self is ScaleType.FLOAT32 else 2


class Layout(StrEnum):
    """By whose names and in whose order a checkpoint's tensors hold a quantised matrix; kernels do not see it."""

    COMPRESSED_TENSORS = "compressed-tensors"
    PACKED_INT8 = "pack-quantized"  # compressed-tensors, INT8 in words
    MODELOPT = "modelopt"
    GPTQ = "gptq"  # words along the inputs; zero points are stored less one
    GPTQ_V2 = "gptq_v2"  # likewise, with zero points as they are
    AWQ = "awq"  # words along the outputs, in an order of their own
    BLOCK_FP8 = "fp8"  # of transformers: weight_scale_inv
    GGUF = "gguf"  # blocks of 32 inputs, each with its scale before it


class TextLinear(StrEnum):
    """The decoder's linear layers, as the engine fuses them. A format holds for one of them in all layers or in none.

    Embeddings, the output head, norms, scalars and the router are in no quantised format.
    """

    QKV = "qkv"
    OUTPUT = "o"
    GATE_UP = "gate_up"
    DOWN = "down"
    EXPERT_GATE_UP = "expert_gate_up"
    EXPERT_DOWN = "expert_down"
    LAYER_INPUT_GATE = "per_layer_input_gate"
    LAYER_PROJECTION = "per_layer_projection"
    MODEL_PROJECTION = "per_layer_model_projection"


def _is(default: object) -> Callable[[Any], bool]:
    """For fields that earlier releases do not know: they are left out of JSON where they say what those mean."""
    return lambda value: bool(value == default)


class MatrixFormat(BaseModel):
    """Storage of one matrix. Frozen and hashable."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, validate_by_name=True)

    stored: StoredType
    scales: Literal["group", "channel", "tensor", "block"] | None = Field(
        default=None, description="What one scale spans."
    )
    group_size: int | None = Field(
        default=None, ge=8, le=65536, multiple_of=8, description="Inputs that share a scale."
    )
    symmetric: bool = Field(default=True, description="False: INT4 with a zero point per group.")
    activation_order: bool = Field(default=False, description="True: groups are of inputs that weight_g_idx names.")
    fp8_activations: bool = Field(
        default=False, description="The checkpoint was made for inputs rounded to e4m3 per token."
    )
    scale_type: ScaleType = Field(
        default=ScaleType.BFLOAT16,
        exclude_if=_is(ScaleType.BFLOAT16),
        description="Of INT4's and INT8's groups; other scales have one type each.",
    )
    layout: Layout = Field(
        default=Layout.COMPRESSED_TENSORS,
        exclude_if=_is(Layout.COMPRESSED_TENSORS),
        description="Names and order of its tensors.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        spans = _SPANS.get(self.stored, (None,))
        if self.scales not in spans or (self.scales == "group") != (self.group_size is not None):
            raise ValueError(f"{self.stored} with scales {self.scales} and group_size {self.group_size} is no format")
        if self.stored is StoredType.NVFP4 and self.group_size != NVFP4_GROUP:
            raise ValueError(f"{self.stored} has groups of {NVFP4_GROUP} inputs, not of {self.group_size}")
        if self.stored is not StoredType.INT4 and (not self.symmetric or self.activation_order):
            raise ValueError(f"{self.stored} has neither zero points nor an activation order")
        of_groups = self.stored in (StoredType.INT4, StoredType.INT8) and self.scales == "group"
        if not of_groups and self.scale_type is not ScaleType.BFLOAT16:
            raise ValueError(f"{self.stored} with scales {self.scales} has no scales of another type")
        return self

    @property
    def quantised(self) -> bool:
        return self.stored in QUANTISED

    @property
    def name(self) -> str:
        """`bfloat16`, `int4_g32`, `int4_g128_asym_f16`, `int8_channel`, `fp8_channel`, `nvfp4`, ..."""
        span = f"g{self.group_size}" if self.group_size else self.scales
        parts = [self.stored.value, None if self.stored is StoredType.NVFP4 else span]
        parts += ["asym" if not self.symmetric else None, "actorder" if self.activation_order else None]
        scale = {ScaleType.FLOAT16: "f16", ScaleType.FLOAT32: "f32"}.get(self.scale_type)
        return "_".join(part for part in (*parts, scale) if part)

    def __str__(self) -> str:
        return self.name


class MixedLinears(BaseModel):
    """Linear layers whose format is another than that of most."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, validate_by_name=True)

    linears: tuple[TextLinear, ...] = Field(min_length=1)
    format: MatrixFormat


class WeightFormat(MatrixFormat):
    """Storage of a checkpoint's text weights. Frozen and hashable.

    The matrices of `dense` are bfloat16 in a quantised checkpoint, as everything is that is no `TextLinear`; those of
    `mixed` are quantised otherwise than the rest.
    """

    dense: tuple[TextLinear, ...] = Field(
        default=(), description="Linear layers that the checkpoint leaves in bfloat16."
    )
    mixed: tuple[MixedLinears, ...] = Field(
        default=(), exclude_if=_is(()), description="Linear layers with a quantised format of their own."
    )

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        named = [*self.dense, *(linear for each in self.mixed for linear in each.linears)]
        if len(named) > len(set(named)) or not all(each.format.quantised for each in self.mixed):
            raise ValueError("a linear layer has one format, and those of `mixed` are quantised")
        if self.mixed and not self.quantised:
            raise ValueError(f"{self.stored} beside quantised linear layers: `dense` names what is not quantised")
        return self

    @property
    def element_bytes(self) -> int:
        """Bytes of an element, of formats that are not quantised; 2 beside quantised matrices."""
        return 4 if self.stored is StoredType.FLOAT32 else 2

    def of(self, linear: TextLinear | None) -> StoredType:
        """Type of one matrix; None stands for what is no linear layer of the decoder."""
        return self.matrix(linear).stored

    def matrix(self, linear: TextLinear | None) -> MatrixFormat:
        """Storage of one matrix; None stands for what is no linear layer of the decoder."""
        if self.quantised and (linear is None or linear in self.dense):
            return BFLOAT16
        for each in self.mixed:
            if linear in each.linears:
                return each.format
        return _of_most(self) if self.mixed else self

    def formats(self) -> tuple[MatrixFormat, ...]:
        """All that quantised matrices have, that of most first."""
        return (_of_most(self), *(each.format for each in self.mixed)) if self.mixed else (self,)

    def __str__(self) -> str:
        """The name, and that of linear layers with another; then the linear layers that are not quantised."""
        mixed = (f"{each.format} for {', '.join(each.linears)}" for each in self.mixed)
        name = " with ".join((self.name, *mixed))
        return f"{name} without {', '.join(self.dense)}" if self.dense else name


@lru_cache(maxsize=256)
def _of_most(weight_format: WeightFormat) -> MatrixFormat:
    return MatrixFormat(**{name: getattr(weight_format, name) for name in MatrixFormat.model_fields})


BFLOAT16 = WeightFormat(stored=StoredType.BFLOAT16)
FLOAT32 = WeightFormat(stored=StoredType.FLOAT32)


def int4(group_size: int, *, symmetric: bool = True) -> WeightFormat:
    """INT4 of all linear layers with one scale per `group_size` inputs."""
    return WeightFormat(stored=StoredType.INT4, scales="group", group_size=group_size, symmetric=symmetric)


def dense_format(dtype: str) -> WeightFormat:
    """The format of an unquantised checkpoint whose config.json states this dtype."""
    return WeightFormat(stored=StoredType(dtype))
