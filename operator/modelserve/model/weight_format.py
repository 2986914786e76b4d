"""How the text weights of a checkpoint are stored: the type, what its scales span, and which matrices have it."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

FP8_BLOCK = 128  # rows and columns that share one scale of block formats


class StoredType(StrEnum):
    """Type of a stored matrix's elements."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    INT4 = "int4"  # compressed-tensors pack-quantized: eight in an int32, one bfloat16 scale per group of inputs
    FP8 = "fp8"  # compressed-tensors float-quantized: e4m3, scales per output row, per matrix or per block


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


class WeightFormat(BaseModel):
    """Storage of a checkpoint's text weights. Frozen and hashable.

    The matrices of `dense` are bfloat16 in a quantised checkpoint, as everything is that is no `TextLinear`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, validate_by_name=True)

    stored: StoredType
    scales: Literal["group", "channel", "tensor", "block"] | None = Field(
        default=None, description="What one scale spans."
    )
    group_size: int | None = Field(
        default=None, ge=8, le=65536, multiple_of=8, description="Inputs that share an INT4 scale."
    )
    symmetric: bool = Field(default=True, description="False: INT4 with a zero point per group.")
    activation_order: bool = Field(default=False, description="True: groups are of inputs that weight_g_idx names.")
    fp8_activations: bool = Field(
        default=False, description="The checkpoint was made for inputs rounded to e4m3 per token."
    )
    dense: tuple[TextLinear, ...] = Field(
        default=(), description="Linear layers that the checkpoint leaves in bfloat16."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        spans = {StoredType.INT4: ("group",), StoredType.FP8: ("channel", "tensor", "block")}.get(self.stored, (None,))
        if self.scales not in spans or (self.scales == "group") != (self.group_size is not None):
            raise ValueError(f"{self.stored} with scales {self.scales} and group_size {self.group_size} is no format")
        if self.stored is not StoredType.INT4 and (not self.symmetric or self.activation_order):
            raise ValueError(f"{self.stored} has neither zero points nor an activation order")
        return self

    @property
    def quantised(self) -> bool:
        return self.stored in (StoredType.INT4, StoredType.FP8)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element, of formats that are not quantised; 2 beside quantised matrices."""
        return 4 if self.stored is StoredType.FLOAT32 else 2

    def of(self, linear: TextLinear | None) -> StoredType:
        """Type of one matrix; None stands for what is no linear layer of the decoder."""
        if self.quantised and (linear is None or linear in self.dense):
            return StoredType.BFLOAT16
        return self.stored

    def __str__(self) -> str:
        """`bfloat16`, `int4_g32`, `int4_g128_asym`, `fp8_channel`, ...; then the linear layers without it."""
        parts = [self.stored.value, f"g{self.group_size}" if self.group_size else self.scales]
        parts += ["asym" if not self.symmetric else None, "actorder" if self.activation_order else None]
        name = "_".join(part for part in parts if part)
        return f"{name} without {', '.join(self.dense)}" if self.dense else name


BFLOAT16 = WeightFormat(stored=StoredType.BFLOAT16)
FLOAT32 = WeightFormat(stored=StoredType.FLOAT32)


def int4(group_size: int, *, symmetric: bool = True) -> WeightFormat:
    """INT4 of all linear layers with one scale per `group_size` inputs."""
    return WeightFormat(stored=StoredType.INT4, scales="group", group_size=group_size, symmetric=symmetric)


def dense_format(dtype: str) -> WeightFormat:
    """The format of an unquantised checkpoint whose config.json states this dtype."""
    return WeightFormat(stored=StoredType(dtype))
