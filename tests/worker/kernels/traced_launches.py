"""Launches of models that between them launch every Triton kernel, made by the product's own code (`kernel_trace`).

Models are cut to a layer of each kind, with the published widths. A launch is kept once for its kernel, types and
constants: of those that differ in integers alone, the one of which the compiler is told least.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import json
import re
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from triton.runtime.jit import JITCallable, JITFunction

if TYPE_CHECKING:
    from modelserve_worker.kernels.compiling.cuda_kernel import CudaSource  # imports torch

OWN = "modelserve_worker.kernels"
FP8_CACHE_CAPABILITY = 89  # the least that computes with e4m3


@dataclass(frozen=True)
class Case:
    """A published size, how its weights are stored, engine arguments, and whether it is what a start compiles alone."""

    variant: str
    weights: str = "bf16"
    arguments: dict[str, Any] = field(default_factory=dict)
    at_start: bool = True


def _case(variant: str, weights: str = "bf16", *, at_start: bool = True, **arguments: Any) -> Case:
    return Case(variant, weights, arguments, at_start)


BLOCKS = "a drafter of blocks"  # whose directory is written while the launches are traced
DRAFTS: dict[str, Any] = {"prompt_lookup": True, "num_speculative_tokens": 4}
MANY: dict[str, Any] = {"max_num_batched_tokens": 1280}  # rows from which on other kernels take products
CASES = (
    _case("31B", "int4", kv_cache_dtype="int8", at_start=False, **DRAFTS),
    _case("31B", "fp8_block", kv_cache_dtype="fp8_e4m3", at_start=False),
    _case("E4B", at_start=False, **DRAFTS),
    _case("E4B", "int4_zeros", kv_cache_dtype="int8"),
    _case("26B-A4B", **MANY),
    _case("26B-A4B", "int4", **MANY),
    _case("26B-A4B", "int4_f16", **MANY),
    _case("31B", "nvfp4", at_start=False),
    _case("26B-A4B", "nvfp4", at_start=False, **MANY),
    _case("26B-A4B", "fp8", tensor_parallel_size=2, **MANY),
    _case("26B-A4B", profile="exact"),
    _case("31B", "int8", at_start=False),
    _case("26B-A4B", "int8_groups", **MANY),
    _case("31B", drafter=BLOCKS, at_start=False),
    _case("E4B", max_loras=4, at_start=False),
    _case("26B-A4B", max_loras=4, lora_targets=("expert_gate_up", "expert_down"), at_start=False),
)
FORMATS: dict[str, dict[str, Any]] = {
    "int4": {"stored": "int4", "scales": "group", "group_size": 32},
    "int4_f16": {"stored": "int4", "scales": "group", "group_size": 32, "scale_type": "float16"},
    "int4_zeros": {"stored": "int4", "scales": "group", "group_size": 32, "symmetric": False},
    "int8": {"stored": "int8", "scales": "channel"},
    "int8_groups": {"stored": "int8", "scales": "group", "group_size": 32, "scale_type": "float16"},
    "nvfp4": {"stored": "nvfp4", "scales": "group", "group_size": 16},
    "fp8": {"stored": "fp8", "scales": "channel", "fp8_activations": True},
    "fp8_block": {"stored": "fp8", "scales": "block", "fp8_activations": True},
}


def _block_drafter(hidden: int) -> dict[str, Any]:
    """config.json of a DFlash drafter, with a layer of each kind, of such a model."""
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": 10752,
        "num_hidden_layers": 2, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
        "hidden_act": "silu", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 2048,
        "rope_theta": 1_000_000, "rms_norm_eps": 1e-6, "max_position_embeddings": 262144, "vocab_size": 262144,
        "tie_word_embeddings": True, "block_size": 16, "num_target_layers": 2, "dtype": "bfloat16",
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": [0]},
    }  # fmt: skip


@dataclass(frozen=True)
class Traced:
    """A launch of a Triton kernel. `specialization` is what `bundles.preload` takes."""

    module: str
    kernel: str
    specialization: str

    @cached_property
    def _known(self) -> dict[str, Any]:
        known: dict[str, Any] = json.loads(self.specialization)
        return known

    @cached_property
    def _arguments(self) -> dict[tuple[int, ...], tuple[str, str]]:
        """Name and kind of each, and of each member of a bundle, by its place."""
        from modelserve_worker.kernels.compiling.bundles import member_names

        found = {}
        for number, (name, kind) in enumerate(self._known["signature"].items()):
            if isinstance(kind, list):
                members = member_names(getattr(kernel_module(self.module), self.kernel))[name]
                found |= {
                    (number, at): (f"{name}.{member}", of)
                    for at, (member, of) in enumerate(zip(members, kind, strict=True))
                }
            else:
                found[number,] = name, kind
        return found

    @cached_property
    def constants(self) -> dict[str, Any]:
        """By parameter: those of tl.constexpr, integers that are 1, and None."""
        known = zip(self._known["constant_keys"], self._known["constant_vals"], strict=True)
        return {
            self._arguments[tuple(at)][0]: value["constexpr"] if isinstance(value, dict) else value
            for at, value in known
        }

    @cached_property
    def types(self) -> dict[str, str]:
        """Of the parameters that are passed, in their order."""
        return {name: kind for name, kind in self._arguments.values() if kind != "constexpr"}

    def sources(self) -> tuple[str, ...]:
        """All that it is compiled from: text, with what it calls and reads, and how it is specialised."""
        known = {name: value for name, value in self._known.items() if name != "key"}
        known["options"] = {name: value for name, value in known["options"].items() if name != "extern_libs"}  # a path
        return *_texts(getattr(kernel_module(self.module), self.kernel)), json.dumps(known, sort_keys=True)

    @property
    def name(self) -> str:
        """Kernel, types and constants, short enough for a table."""
        types = ",".join(f"{name}:{kind}" for name, kind in self.types.items() if kind.startswith("*"))
        constants = ",".join(f"{name}={value}" for name, value in self.constants.items())
        return f"{self.kernel}({types}; {constants})"

    @property
    def key(self) -> str:
        """What tells launches apart that are compiled, without the names of modules and of pointers."""
        _, kernel, *known, warps, stages = self.shape
        constants = ",".join(str(each) for each in known if "=" in str(each))
        runs = itertools.groupby(str(each) for each in known if "=" not in str(each))
        pointers = ",".join(f"{len(list(run))}{kind}" for kind, run in runs)
        return f"{kernel}({pointers}; {constants}; {warps} warps, {stages} stages)"

    @property
    def shape(self) -> tuple[object, ...]:
        """What launches of one shape have in common."""
        own = [
            f"{name}={value}"
            for name, value in self.constants.items()
            if name.rpartition(".")[2].isupper() or value is None
        ]
        pointers = [kind for kind in self.types.values() if kind.startswith("*")]
        options = self._known["options"]
        return self.module, self.kernel, *own, *pointers, options["num_warps"], options["num_stages"]

    @property
    def told(self) -> int:
        """How much the compiler is told of arguments: integers that are 1, and what divides by 16."""
        return len(self.constants) * 100 + sum(map(bool, self._known["attrs_vals"]))


@dataclass(frozen=True)
class Source:
    """A launch of a kernel in CUDA C++."""

    source: CudaSource
    told = 0

    @property
    def key(self) -> str:
        return f"{self.source.entry}({','.join(self.source.defines)}; {self.source.target})"

    name = shape = key

    def sources(self) -> tuple[str, ...]:
        return (*(text.decode() for text in self.source.texts().values()), *self.source.options)


def once_each(launches: Iterable[Traced | Source]) -> list[Traced | Source]:
    """One launch of each shape, in the order in which shapes come first."""
    found: dict[object, Traced | Source] = {}
    for launch in launches:
        before = found.setdefault(launch.shape, launch)
        if launch.told < before.told:
            found[launch.shape] = launch
    return list(found.values())


def launches_of(case: Case, capability: int) -> list[Traced | Source]:
    """In a process of its own: from here on Triton compiles for `capability`."""
    from modelserve.engine_args import EngineArgs
    from modelserve.model.architecture import ModelArchitecture
    from modelserve.model.weight_format import WeightFormat
    from modelserve.published import published_model
    from modelserve_worker.startup.kernel_trace import KernelLaunch, kernel_launches

    arguments = {"max_num_seqs": 8, "max_num_batched_tokens": 320} | case.arguments
    if arguments.get("kv_cache_dtype") == "fp8_e4m3" and capability < FP8_CACHE_CAPABILITY:
        arguments["kv_cache_dtype"] = "fp8_e5m2"
    whole = published_model(f"hf://google/gemma-4-{case.variant}").architecture
    layers: dict[str, Any] = {"num_hidden_layers": 2, "full_attention_layers": (1,)}
    if whole.num_kv_shared_layers:
        layers = {"num_hidden_layers": 4, "full_attention_layers": (1, 3), "num_kv_shared_layers": 2}
    with TemporaryDirectory() as directory:
        if arguments.get("drafter") == BLOCKS:
            arguments["drafter"] = directory
            (Path(directory) / "config.json").write_text(json.dumps(_block_drafter(whole.hidden_size)))
        launches = kernel_launches(
            ModelArchitecture.model_validate(whole.model_dump() | layers),
            EngineArgs(model="", **arguments),
            capability=capability,
            weight_format=None if case.weights == "bf16" else WeightFormat(**FORMATS[case.weights]),
            at_start=case.at_start,
        )
    return once_each(
        Traced(each.module, each.kernel, each.specialization) if isinstance(each, KernelLaunch) else Source(each)
        for each in launches
    )


def launches_of_file(name: str, capability: int) -> list[Traced]:
    """Those that `launch_all` makes of a file's own kernels, over tensors that hold nothing."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from modelserve_worker.startup.kernel_trace import KernelLaunch, Launch, launches_go_to

    found: list[Launch] = []
    module = kernel_module(name)
    with warnings.catch_warnings(), launches_go_to(found.append, capability), torch.inference_mode(), FakeTensorMode():
        warnings.simplefilter("ignore")  # torch warns of pointers of fake tensors
        module.launch_all()
    return [Traced(each.module, each.kernel, each.specialization) for each in found if isinstance(each, KernelLaunch)]


@cache
def _texts(function: JITFunction[Any]) -> tuple[str, ...]:
    """Of a function, of those that it calls, and of what they read of their modules. Triton's come with its version.

    Triton's hash of a function is not taken: it covers lines of files, and depends on which it has hashed before.
    """
    found: dict[int, str] = {}
    todo: list[object] = [function]
    while todo:
        value = todo.pop()
        if id(value) not in found and not isinstance(value, ModuleType):
            own = getattr(value, "__module__", "").startswith(OWN)
            found[id(value)] = value.src if isinstance(value, JITCallable) else _written(value, own=own)
            if isinstance(value, JITCallable) and (own or value is function):
                names = sorted(set(re.findall(r"\b[A-Za-z_]\w*", value.src)))
                todo += (value.__globals__[name] for name in names if name in value.__globals__)
    return tuple(sorted(found.values()))


def _written(value: object, *, own: bool) -> str:
    if own and isinstance(value, type | FunctionType):
        return inspect.getsource(value)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def kernel_module(name: str) -> ModuleType:
    """A module by its import name or, ending in .py, by its file."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    stem = Path(name).stem
    if stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(stem, name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[stem] = module  # a kernel looks its module up to read its source
        spec.loader.exec_module(module)
    return sys.modules[stem]


def never_launched(
    modules: Iterable[str], launched: Iterable[Traced], *, elsewhere: Collection[str] = ()
) -> Iterator[str]:
    """Functions of Triton in `modules` that are no kernel of any of the launches, nor of those `elsewhere`, which have
    names alone, and that none of the others calls."""
    from triton import JITFunction

    known = {(each.module, each.kernel) for each in launched}
    functions = {}
    for name in modules:
        module = kernel_module(name)
        own = (each for each in vars(module).values() if isinstance(each, JITFunction))
        functions |= {(module.__name__, each.__name__): each for each in own if each.__module__ == module.__name__}
    for (module_name, name), function in functions.items():
        called = any(re.search(rf"\b{name}\(", other.src) for other in functions.values() if other is not function)
        if (module_name, name) not in known and name not in elsewhere and not called:
            yield f"{module_name}.{name}"
