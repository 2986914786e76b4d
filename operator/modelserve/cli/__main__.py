"""The command line: `modelserve plan`, `inspect`, `adapter` and `crd`. Needs no cluster, network or torch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from modelserve import __version__
from modelserve.cli.adapter_command import run_adapter
from modelserve.cli.plan_command import EXIT_BAD_INPUT, PlanOptions, run_plan
from modelserve.crd import crds_yaml
from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.hardware import IMAGE_ARCHITECTURES
from modelserve.inspection import inspect_assistant, inspect_checkpoint
from modelserve.termination import (
    MESSAGE_LIMIT_BYTES,
    TERMINAL_EXIT_CODE,
    TerminationMessage,
    TerminationReason,
    write_termination,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code. Bad input is one line on stderr, never a traceback."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "plan":
            text, code = run_plan(
                PlanOptions(
                    file=arguments.file,
                    accelerators=tuple(arguments.accelerator),
                    nodes=arguments.nodes,
                    catalogue=arguments.catalogue,
                    output=arguments.output,
                    compare=arguments.compare,
                    pool=arguments.pool,
                    assume=tuple(arguments.assume),
                    plot=arguments.plot,
                    image_architectures=tuple(arguments.image_architecture) or IMAGE_ARCHITECTURES,
                    every=arguments.all,
                    kernels=arguments.kernels,
                    compare_formats=arguments.compare_formats,
                    drafts=arguments.drafts,
                )
            )
            print(text, flush=True)
            return code
        if arguments.command == "inspect":
            return _inspect(
                Path(arguments.directory), arguments.output, identity=arguments.identity, drafter=arguments.drafter
            )
        if arguments.command == "adapter":
            print(run_adapter(Path(arguments.directory), arguments.model, arguments.output), flush=True)
            return 0
        print(crds_yaml(), end="", flush=True)
    except InvalidInput as error:
        print(f"modelserve: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except BrokenPipeError:  # the reader went away; nothing is left to say, and the exit must not try to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _inspect(directory: Path, output: str | None, *, identity: bool, drafter: bool) -> int:
    """Print the facts of a checkpoint, into `output` where given; a failure leaves a termination message instead."""
    try:
        left_out = None if identity else {"identity"}  # an operator of 0.1.0, which does not ask for it, refuses it
        facts = inspect_assistant(directory) if drafter else inspect_checkpoint(directory)
        text = facts.model_dump_json(by_alias=True, exclude=left_out)
        if len(text.encode()) > MESSAGE_LIMIT_BYTES:
            raise InvalidInput(f"the facts take {len(text.encode())} bytes, above the {MESSAGE_LIMIT_BYTES} that fit")
    except (InvalidInput, OSError) as error:
        unsupported = isinstance(error, UnsupportedModel)
        reason = TerminationReason.UnsupportedModel if unsupported else TerminationReason.InvalidCheckpoint
        message = TerminationMessage(reason=reason, message=str(error))
        if output is None:
            write_termination(message)
        else:
            _write(message.encode(), output)
        print(f"modelserve: {error}", file=sys.stderr)
        return TERMINAL_EXIT_CODE
    if output is None:
        print(text)
    else:
        _write(text, output)
    return 0


def _write(text: str, file: str) -> None:
    try:
        Path(file).write_text(text)
    except OSError as error:
        raise InvalidInput(f"--output: cannot write {file}: {error.strerror}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="modelserve", description="Plan and inspect Gemma 4 deployments.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="show the plan of each ModelServe in a file (exit 0 fits, 3 does not)")
    plan.add_argument("-f", "--file", required=True, help="YAML file with ModelServes, - for standard input")
    plan.add_argument(
        "--accelerator",
        action="append",
        default=[],
        metavar="PRODUCT[:COUNT]",
        help="a GPU product and how many one node has (1); may be repeated; default: every known product, 8 per node",
    )
    plan.add_argument("--nodes", metavar="FILE", help="Node and Karpenter NodePool objects (kubectl get -o yaml)")
    plan.add_argument("--catalogue", metavar="FILE", help="further products: a ConfigMap, or its data alone")
    plan.add_argument("-o", "--output", choices=("table", "json", "yaml"), default="table", help="form of the output")
    plan.add_argument(
        "--compare",
        metavar="vllm[:VERSION]",
        help="show the arithmetic of vLLM 0.19 to 0.33 for the same pool beside ours",
    )
    plan.add_argument("--pool", metavar="QUANTITY", help="with --compare: pool per GPU in place of the planned one")
    plan.add_argument(
        "--assume", action="append", default=[], metavar="TERM=QUANTITY", help="bytes of a memory term (context=512Mi)"
    )
    plan.add_argument(
        "--all", action="store_true", help="without --accelerator: every candidate, not only the best of each product"
    )
    plan.add_argument(
        "--kernels", action="store_true", help="which kernels a rank would launch there, by rows, and what they hold"
    )
    plan.add_argument(
        "--compare-formats",
        action="store_true",
        help="the model in bfloat16, FP8, INT8, INT4 and NVFP4 on the accelerators named, or else the plan's",
    )
    plan.add_argument(
        "--drafts",
        action="store_true",
        help="tokens/s by concurrency without drafts and with each of spec.drafter, on the accelerators named, or else "
        "the plan's",
    )
    plan.add_argument(
        "--image-architecture", action="append", default=[], metavar="ARCH",
        help="CPUs that the worker's image is built for (amd64), as kubernetes.io/arch names them; may be repeated",
    )  # fmt: skip
    plan.add_argument("--plot", metavar="FILE.png", help="draw concurrency against context (needs modelserve[plot])")
    inspect = commands.add_parser("inspect", help="print geometry, size and format of a checkpoint as JSON")
    inspect.add_argument("directory", help="directory with config.json and safetensors files")
    inspect.add_argument("--identity", action="store_true", help="with a digest of the files' index, names and sizes")
    inspect.add_argument("--drafter", action="store_true", help="it is an MTP assistant, and no model")
    inspect.add_argument("--output", metavar="FILE", help="write there instead of to standard output")
    adapter = commands.add_parser("adapter", help="whether a LoRA adapter binds to a model, and what it adapts")
    adapter.add_argument("directory", help="directory with adapter_config.json and adapter_model.safetensors")
    adapter.add_argument(
        "--model", required=True, metavar="DIRECTORY|URI", help="with the model's config.json, or a published model"
    )
    adapter.add_argument("-o", "--output", choices=("table", "json"), default="table", help="form of the output")
    commands.add_parser("crd", help="print the CustomResourceDefinition")
    return parser


if __name__ == "__main__":
    sys.exit(main())
