"""Write a small random checkpoint: `python -m modelserve_tools.tiny OUTPUT_DIR [--seed N] [--variant 31b]`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from modelserve.model.architecture import ModelArchitecture
from modelserve_tools.tiny.tokenizer_files import write_tokenizer
from modelserve_tools.tiny.variants import DENSE_THINKING_OFF_BLOCK, EOS_TOKEN_IDS, VARIANTS, config_json
from modelserve_tools.tiny.weights import write_weights


def chat_template(variant: str) -> str:
    """The package's template; the larger variants close an empty thought before the answer when thinking is off."""
    empty_thought = "true" if variant in DENSE_THINKING_OFF_BLOCK else "false"
    body = files("modelserve_tools.tiny").joinpath("chat_template.jinja").read_text()
    return f"{{%- set empty_thought = {empty_thought} -%}}\n{body}"


def write_checkpoint(directory: Path, *, variant: str = "31b", seed: int = 0) -> int:
    """Write config, weights, tokenizer, template and generation defaults; return the weights' bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    config = config_json(variant)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {
        "bos_token_id": 2,
        "eos_token_id": EOS_TOKEN_IDS,
        "pad_token_id": 0,
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 64,
        "top_p": 0.95,
    }
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    write_tokenizer(directory, chat_template=chat_template(variant))
    return write_weights(ModelArchitecture.from_config(config), directory, seed=seed)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m modelserve_tools.tiny", description=__doc__)
    parser.add_argument("output_dir", type=Path, help="created when missing; files of the same names are replaced")
    parser.add_argument("--seed", type=int, default=0, help="the same seed writes the same weights (default 0)")
    parser.add_argument("--variant", choices=VARIANTS, default="31b", help="structure to copy in small (default 31b)")
    arguments = parser.parse_args(argv)
    size = write_checkpoint(arguments.output_dir, variant=arguments.variant, seed=arguments.seed)
    print(f"{arguments.output_dir}: Gemma 4 {arguments.variant} structure, random weights, {size} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
