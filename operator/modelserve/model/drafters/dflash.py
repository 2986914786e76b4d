"""The geometry of a drafter of the DFlash family, and whether it fits a target.

Such a drafter is a few decoder layers that draft a block of tokens in one pass. What it knows of the tokens before the
block are keys and values that its own projections make of the target's hidden states, tapped behind some of the
target's layers. Rows of a block are the anchor, which is the last token that is certain, and mask tokens behind it.

DFlash is that alone; DSpark adds scores by the token before (a Markov head) and a head that says how likely each draft
is right; DFlash2 a convolution around each half of a layer, and a walk over the best candidates of each row. Which
checkpoint says what of it is read by `configs`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from modelserve.model.architecture import MAX_PARAMETERS, ModelArchitecture

MOST_BLOCK_ROWS = 64
MOST_LAYERS = 64


class DFlashArchitecture(BaseModel):
    """Sizes count elements, heads the whole drafter's, not one rank's; layers count from 0."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stack: Literal["qwen3", "gemma4"]  # two norms around a layer, or four and its scalar
    hidden_size: int = Field(ge=1, le=1 << 18)  # also the target's
    intermediate_size: int = Field(ge=1, le=1 << 20)
    num_hidden_layers: int = Field(ge=1, le=MOST_LAYERS)
    num_attention_heads: int = Field(ge=1, le=1 << 12)
    num_key_value_heads: int = Field(ge=1, le=1 << 12)
    head_dim: int = Field(ge=2, le=1 << 14, multiple_of=2)
    attention_scale: float = Field(gt=0.0, allow_inf_nan=False)
    k_eq_v: bool = False  # V is RMS of what K is before its norm and rotation
    vocab_size: int = Field(ge=1, le=1 << 24)  # of the target
    max_position_embeddings: int = Field(ge=1, le=1 << 24)
    rms_norm_eps: float = Field(default=1e-6, ge=0.0, lt=1.0, allow_inf_nan=False)
    hidden_act: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    rope_theta: float = Field(gt=0.0, allow_inf_nan=False)
    rotary_pairs: int = Field(ge=1, le=1 << 13)  # pairs (i, i + head_dim / 2) of a head that are turned, the first ones
    layer_windows: tuple[int | None, ...]  # rows before the anchor that a layer sees; None: all
    causal: tuple[bool, ...]  # whether a layer's row sees of its block only what is before it, and itself
    taps: tuple[int, ...]  # layers of the target whose output is read, its scalar applied, in the order of `fc`
    num_target_layers: int | None = Field(default=None, ge=1, le=1024)  # None: not stated
    block_rows: int = Field(ge=2, le=MOST_BLOCK_ROWS)  # the anchor and the masks
    sample_from_anchor: bool = False  # a row says the token behind its own; else its own, and the anchor's says nothing
    mask_token_id: int = Field(ge=0)
    embedding_scale: float = Field(gt=0.0, allow_inf_nan=False)  # of rows of the embedding
    own_embedding: bool = False  # else the target's
    draft_vocab_size: int | None = Field(default=None, ge=1, le=1 << 24)  # rows of an own head; None: the target's
    softcap: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    markov_rank: int = Field(default=0, ge=0, le=1 << 12)
    has_confidence_head: bool = False
    confidence_with_markov: bool = False  # it reads the token before, too
    conv_kernel_size: int = Field(default=0, ge=0, le=8)
    conv_group_size: int = Field(default=0, ge=0, le=1 << 12)
    selector_rank: int = Field(default=0, ge=0, le=1 << 12)
    selector_top_k: int = Field(default=0, ge=0, le=1 << 10)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"

    @model_validator(mode="after")
    def _consistent(self) -> DFlashArchitecture:
        layers, heads, kv_heads = self.num_hidden_layers, self.num_attention_heads, self.num_key_value_heads
        for name in ("layer_windows", "causal"):
            if len(getattr(self, name)) != layers:
                raise ValueError(f"{name} says something of {len(getattr(self, name))} layers; there are {layers}")
        windows = {window for window in self.layer_windows if window is not None}
        if len(windows) > 1 or any(not 1 <= window <= 1 << 24 for window in windows):
            raise ValueError(f"layers have the windows {sorted(windows)}; one is served, of 1 to {1 << 24} tokens")
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        if 2 * self.rotary_pairs > self.head_dim:
            raise ValueError(f"{self.rotary_pairs} rotated pairs do not fit head_dim {self.head_dim}")
        if not self.taps or len(self.taps) > 64 or any(not 0 <= tap < 1024 for tap in self.taps):
            raise ValueError(f"taps {self.taps}: 1 to 64 of the target's layers are read, counted from 0")
        if self.num_target_layers is not None and max(self.taps) >= self.num_target_layers:
            raise ValueError(f"layer {max(self.taps)} is tapped of a target of {self.num_target_layers} layers")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is not a token of {self.vocab_size}")
        if self.draft_vocab_size is not None and self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} is above vocab_size {self.vocab_size}")
        if self.k_eq_v and self.stack != "gemma4":
            raise ValueError("k_eq_v is of Gemma 4's layers alone")
        if self.confidence_with_markov and not self.markov_rank:
            raise ValueError("confidence_head_with_markov needs markov_rank above 0")
        self._check_conv_and_selector()
        inner = 3 * self.intermediate_size + 2 * self.head_dim * (heads + kv_heads)
        tables = self.vocab_size * (2 * self.hidden_size + 2 * self.markov_rank + 2 * self.selector_rank)
        if self.hidden_size * (layers * inner + len(self.taps) * self.hidden_size) + tables > MAX_PARAMETERS:
            raise ValueError(f"the geometry has more than {MAX_PARAMETERS:,} parameters")
        return self

    def _check_conv_and_selector(self) -> None:
        if bool(self.conv_kernel_size) != bool(self.conv_group_size) or bool(self.selector_rank) != bool(
            self.selector_top_k
        ):
            raise ValueError("conv_kernel_size and conv_group_size, selector_rank and selector_top_k belong together")
        if self.conv_group_size and self.hidden_size % self.conv_group_size:
            raise ValueError(f"conv_group_size {self.conv_group_size} does not divide hidden_size {self.hidden_size}")
        if self.conv_kernel_size > self.block_rows:
            raise ValueError(f"conv_kernel_size {self.conv_kernel_size} is above block_size {self.block_rows}")
        if self.selector_top_k > self.vocab_size:
            raise ValueError(f"selector_top_k {self.selector_top_k} is above vocab_size {self.vocab_size}")
        if self.selector_rank and (self.markov_rank or self.has_confidence_head or self.draft_vocab_size is not None):
            raise ValueError("a candidate selector beside a Markov, confidence or own output head is not served")

    def __hash__(self) -> int:
        """Of what tells drafters apart."""
        return hash((self.num_hidden_layers, self.hidden_size, self.intermediate_size, self.taps, self.dtype))

    @property
    def num_drafts(self) -> int:
        """Tokens of a whole block."""
        return self.block_rows if self.sample_from_anchor else self.block_rows - 1

    @property
    def first_draft_row(self) -> int:
        """Row of a block that says its first token."""
        return 0 if self.sample_from_anchor else 1

    @property
    def scaled_embedding(self) -> bool:
        """Whether rows of the embedding are multiplied by sqrt(hidden_size), as the target's are."""
        return bool(self.embedding_scale == self.hidden_size**0.5)

    @property
    def has_token_map(self) -> bool:
        """Whether an own head scores some of the target's tokens alone (`d2t`)."""
        return self.draft_vocab_size is not None and self.draft_vocab_size < self.vocab_size

    @property
    def window(self) -> int | None:
        """Of the layers that have one."""
        return next((window for window in self.layer_windows if window is not None), None)

    @property
    def values_per_row(self) -> int:
        """1 where a layer's K and V are of one projection, else 2."""
        return 1 if self.k_eq_v else 2

    def kv_heads_per_rank(self, tensor_parallel_size: int) -> int:
        """Ranks share one once they are more than KV heads."""
        return max(1, self.num_key_value_heads // tensor_parallel_size)


def dflash_pair_problem(target: ModelArchitecture, drafter: DFlashArchitecture) -> str | None:
    """What keeps a drafter from drafting for a target, or None: it reads that one's hidden states and tokens."""
    for mine, value, theirs, wanted in (
        ("hidden_size", drafter.hidden_size, "hidden_size", target.hidden_size),
        ("vocab_size", drafter.vocab_size, "vocab_size", target.vocab_size),
        ("num_target_layers", drafter.num_target_layers, "num_hidden_layers", target.num_hidden_layers),
    ):
        if value is not None and value != wanted:
            return (
                f"the drafter's {mine} {value} is not the model's {theirs} {wanted}: it is the drafter of another "
                "model; name one that was trained for this model"
            )
    if max(drafter.taps) >= target.num_hidden_layers:
        return (
            f"the drafter reads the output of layer {max(drafter.taps)} and the model has {target.num_hidden_layers} "
            "layers: it is the drafter of another model"
        )
    return None
