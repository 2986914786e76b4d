"""The config.json of a published size as tools that quantise it write it; tests/models has their names."""

from __future__ import annotations

from typing import Any

from quantise import FORMATS, modules, quantisable, quantization_config

from modelserve.model.architecture import ModelArchitecture


def quantised(config: dict[str, Any], name: str) -> dict[str, Any]:
    """`config` with every linear layer in one of `quantise.FORMATS`, or but for some: `nvfp4_modelopt-without-qkv,o`.
    Raises SystemExit for another name."""
    name, _, left = name.partition("-without-")
    if name not in FORMATS:
        raise SystemExit(f"--weights {name}: no format; take one of {', '.join(FORMATS)}")
    stored, architecture = FORMATS[name], ModelArchitecture.from_config(config)
    fitting, named = quantisable(architecture, stored), left.split(",")
    dense = [each for each in modules(architecture) if each not in fitting or each in named]
    return config | {"quantization_config": quantization_config(architecture, stored, dense)}
