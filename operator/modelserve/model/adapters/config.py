"""What adapter_config.json of a LoRA adapter says that its tensors do not: scales, and whether it is plain LoRA.

A module's term is scale * B A x, with scale = alpha / r, or alpha / sqrt(r) with rsLoRA (Kalajdzievski 2023). Settings
that make it anything else are refused by name: an adapter that is half understood would answer, and wrongly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from modelserve.errors import InvalidInput, UnsupportedModel, first_fault

ADAPTER_CONFIG_FILE, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"
PICKLED_NOT_READ = f"{PICKLED_FILE} is not read: it may run code"
MAX_RANK = 512
MAX_PATTERNS = 4096
MAX_PATTERN_CHARACTERS = 512

# Set to anything, they change what the factors mean. By name, what is said of it.
_NOT_PLAIN: Mapping[str, str] = {
    "use_dora": "DoRA scales each row by a learned norm",
    "use_qalora": "QA-LoRA pools inputs in groups",
    "use_bdlora": "BD-LoRA has factors in blocks",
    "lora_bias": "it has biases",
    "fan_in_fan_out": "its factors are transposed",
    "modules_to_save": "it replaces whole modules, which is no adapter of them",
    "trainable_token_indices": "it replaces rows of the embedding",
    "layer_replication": "it repeats layers",
    "alora_invocation_tokens": "it is active behind some tokens only (aLoRA)",
    "arrow_config": "it routes between adapters",
    "monteclora_config": "its factors are drawn",
    "kasa_config": "KaSA changes the base weights",
    "velora_config": "VeLoRA is not plain LoRA",
}
# These take something away from the base weights before training; what PEFT saves is meant for such a base.
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
_REMEDY = "merge it into the checkpoint (PEFT's merge_and_unload), or train plain LoRA"

# Of the regular expressions that PEFT takes, those that no name can make slow.
_PIECE = r"[A-Za-z0-9_]|\\?\.|\.\*|\\d\+?|\[0-9\]\+?|\([A-Za-z0-9_|]+\)"
_PATTERN = re.compile(rf"\^?(?:{_PIECE})*\$?")
_MOST_WILDCARDS = 3


class AdapterConfig(BaseModel):
    """The settings of one LoRA adapter. Immutable."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    r: int = Field(ge=1, le=MAX_RANK)
    lora_alpha: float = Field(allow_inf_nan=False)
    use_rslora: bool = False
    rank_pattern: dict[str, int] = Field(default_factory=dict, max_length=MAX_PATTERNS)
    alpha_pattern: dict[str, float] = Field(default_factory=dict, max_length=MAX_PATTERNS)
    base_model_name_or_path: str | None = None

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> AdapterConfig:
        """Read a parsed adapter_config.json. Raises UnsupportedModel for what is no plain LoRA, with the setting, and
        InvalidInput for a broken file."""
        kind = document.get("peft_type")
        if kind != "LORA":
            raise UnsupportedModel(f"adapter: peft_type {kind!r} is not served; this release serves LORA")
        for name, meaning in _NOT_PLAIN.items():
            if (value := document.get(name)) not in (None, False, [], {}):
                raise UnsupportedModel(f"adapter: {name} {value!r} is not served: {meaning}; {_REMEDY}", field=name)
        if (bias := document.get("bias", "none")) != "none":
            raise UnsupportedModel(f"adapter: bias {bias!r} is not served: it has biases; {_REMEDY}", field="bias")
        start = document.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_CHANGED_BASES):
            raise UnsupportedModel(
                f"adapter: init_lora_weights {start!r} is not served: it is for a base that training changed; save it "
                "with path_initial_model_for_weight_conversion, or merge it into the checkpoint",
                field="init_lora_weights",
            )
        fields = {name: value for name in cls.model_fields if (value := document.get(name)) is not None}
        try:
            config = cls.model_validate(fields)
        except ValidationError as error:
            field, message = first_fault(error)
            raise InvalidInput(f"adapter: {ADAPTER_CONFIG_FILE}: {field}: {message}", field=field) from error
        for name in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(config, name):
                _check(pattern, name)
        return config

    def rank(self, module: str) -> int:
        """Of a module by its whole name in the model, such as model.language_model.layers.0.self_attn.q_proj."""
        return self.rank_pattern.get(_key(self.rank_pattern, module), self.r)

    def scale(self, module: str) -> float:
        """What B A x of a module is multiplied by."""
        rank, alpha = self.rank(module), self.alpha_pattern.get(_key(self.alpha_pattern, module), self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _key(patterns: Mapping[str, object], module: str) -> str:
    """The first pattern that the end of a name matches from a dot on, as PEFT finds it; "" where there is none."""
    found = (each for each in patterns if re.match(rf"(.*\.)?({each})$", module))
    return next(found, "")


def _check(pattern: str, name: str) -> None:
    simple = len(pattern) <= MAX_PATTERN_CHARACTERS and _PATTERN.fullmatch(pattern)
    if not pattern or not simple or pattern.count(".*") > _MOST_WILDCARDS:
        raise UnsupportedModel(
            f"adapter: {name} has the pattern {pattern[:64]!r}; names, .*, \\d+ and (a|b) are read, with "
            f"{_MOST_WILDCARDS} .* and {MAX_PATTERN_CHARACTERS} characters at most: write out the modules' names",
            field=name,
        )
