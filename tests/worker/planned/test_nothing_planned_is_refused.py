"""Planner and worker hold together: what a start can refuse is in a table, and no chosen plan meets a refusal that a
planner can know of."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from reachable_raises import Source
from start_refusals import START_REFUSALS, Rule

import modelserve
import modelserve_worker
from modelserve.api import API_VERSION, KIND, ModelServe, ModelServeSpec, PlanStatus
from modelserve.engine_args import EngineArgs
from modelserve.errors import DoesNotFit, InvalidInput
from modelserve.hardware import CATALOGUE, CPU, Accelerator
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.model_facts import ModelFacts
from modelserve.model.weight_format import WeightFormat, dense_format
from modelserve.planning import ENGINE_VERSION, AcceleratorOffer, engine_args_for, offers_from_nodes, plan
from modelserve.planning.evaluation import Fit, Refusal
from modelserve.planning.planner import consider
from modelserve.published import published_model, published_uris
from modelserve.sizing.backends.resolve import Formats, resolve
from modelserve.sizing.pages import LAYER_ALIGNMENT_BYTES
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.engine import event_publisher
from modelserve_worker.kernels.operations import Operations
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.layers.placement import Placement
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.ranks.ring import check_ranks
from modelserve_worker.startup.accelerator_check import DeviceFacts, check_accelerator
from modelserve_worker.startup.device import kernel_table, select_device, select_geometry, with_compute_dtype
from modelserve_worker.startup.memory import negotiate_model_len
from modelserve_worker.startup.profile_steps import heaviest_steps
from modelserve_worker.terminal_error import TerminalError

PAIRS = 2000
MACHINES = {"amd64": "x86_64", "arm64": "aarch64", "ppc64le": "ppc64le"}
_MAIN = "modelserve_worker.__main__"
STARTS = (
    f"{_MAIN}:_parse", f"{_MAIN}:_read_checkpoint", f"{_MAIN}:_settled", f"{_MAIN}:_read_model",
    "modelserve_worker.drafters.optional_drafter:without_missing_drafter",
    "modelserve_worker.engine_startup:build_engine", "modelserve_worker.startup.replica:_worker_main",
)  # fmt: skip


def test_every_refusal_of_a_start_has_a_row() -> None:
    """A `raise` that is added to what a start comes to needs a rule of the planner, or a reason why there is none."""
    packages = {each.__name__: Path(each.__file__ or "").parent for each in (modelserve, modelserve_worker)}
    found = Counter((each.function, each.exception) for each in Source(packages).raises(STARTS))
    stated = {key: count for key, (count, _) in START_REFUSALS.items()}
    assert dict(found) == stated


def test_every_rule_is_there() -> None:
    for key, (_, why) in START_REFUSALS.items():
        if isinstance(why, Rule):
            module, _, name = why.where.partition(":")
            place: Any = import_module(module)
            for part in name.split("."):
                place = getattr(place, part, None)
            assert place is not None, (key, why)


@dataclass(frozen=True)
class Machine:
    """Where a plan's pods run: CPUs, as Kubernetes names them, and the GPU that the driver tells of."""

    cpus: str
    gpu: DeviceFacts | None


def start(
    args: EngineArgs, architecture: ModelArchitecture, stored: WeightFormat | None, machine: Machine, pool_bytes: int
) -> None:
    """What a rank asks before and while it loads, by the worker's own functions and in their order; without weights,
    and on tensors that hold nothing. `pool_bytes`: what a rank finds to be left. Raises what refuses the start."""
    EngineArgs.model_validate(args.dialect(ENGINE_VERSION))
    with mock.patch.object(event_publisher, "EventPublisher"):
        event_publisher.event_publisher(args, {})
    check_ranks(args.tensor_parallel_size, machine=MACHINES[machine.cpus])
    select_device(args, rank=0, visible=args.tensor_parallel_size if machine.gpu is not None else 0)
    if machine.gpu is not None:
        check_accelerator(args, machine.gpu)
    computed = with_compute_dtype(architecture, args)
    geometry = select_geometry(computed, args)
    kernel_table(machine.gpu, computed, geometry, args, stored)
    _made(computed, stored, args.tensor_parallel_size)
    longest = computed.max_position_embeddings
    drafts = args.speculative
    for batch in heaviest_steps(args, longest=longest, on_gpu=machine.gpu is not None, draft_tokens=drafts.num_tokens):
        most = max(args.max_num_batched_tokens, drafts.step_rows(args.max_num_seqs))
        assert batch.num_tokens <= most
        assert batch.num_requests <= args.max_num_seqs
        assert int((batch.starts + batch.lengths).max()) <= longest
    length = negotiate_model_len(computed, geometry, args, pool_bytes=pool_bytes)
    assert length == args.max_model_len, "as planned"
    KVCache(geometry, pool_bytes, device=torch.device("meta"))


@lru_cache(maxsize=512)
def _made(architecture: ModelArchitecture, stored: WeightFormat | None, ranks: int) -> None:
    """The model of one rank, of no bytes."""
    operations = Operations(resolve(None, architecture, Formats(stored), ranks=ranks), torch.device("cpu"))
    parallel = TensorParallel(0, ranks)
    Gemma4ForCausalLM(architecture, Placement(torch.device("meta"), torch.bfloat16, parallel, stored, operations))


def _models() -> dict[str, ModelFacts]:
    """Published ones, and one in float32."""
    found = {uri: facts for uri in published_uris() if (facts := published_model(uri)) is not None and "-it" in uri}
    small = found["hf://google/gemma-4-E2B-it"]
    narrow = small.architecture.model_copy(update={"dtype": "float32"})
    found["hf://own/float32"] = small.model_copy(update={"architecture": narrow, "format": dense_format("float32")})
    return found


class Draws:
    """Specs and nodes of every kind, of a seed."""

    def __init__(self, seed: int, models: dict[str, ModelFacts]) -> None:
        self._rng, self._uris = random.Random(seed), sorted(models)

    def _maybe(self, share: float, value: Callable[[], Any]) -> Any:
        return value() if self._rng.random() < share else None

    def spec(self, product: str) -> dict[str, Any]:
        """One that the schema allows; rules across fields may still refuse it."""
        rng = self._rng
        tokens = self._maybe(0.3, lambda: rng.choice((16, 17, 64, 256, 2048, 8192, 131_072)))
        length = self._maybe(0.4, lambda: rng.choice((1, 512, 4096, 32_768, 131_072, 262_144, 300_000)))
        drafter = {
            "promptLookup": self._maybe(0.5, lambda: True),
            "published": self._maybe(0.4, lambda: True),
            "numSpeculativeTokens": self._maybe(0.5, lambda: rng.choice((1, 3, 16))),
        }
        asked: dict[str, Any] = {
            "model": {"uri": rng.choice(self._uris), "servedName": self._maybe(0.1, lambda: "gemma")},
            "parallelism": {"tensor": self._maybe(0.6, lambda: rng.choice((1, 2, 2, 3, 4, 8, 16, 64)))},
            "context": {"maxModelLen": length, "minModelLen": length and self._maybe(0.3, lambda: max(1, length // 2))},
            "kvCache": {
                "dtype": self._maybe(0.4, lambda: rng.choice(("bfloat16", "int8", "fp8_e4m3"))),
                "layout": self._maybe(0.3, lambda: rng.choice(("kv", "v_only"))),
                "gpuMemoryUtilization": self._maybe(0.3, lambda: rng.choice(("0.3", "0.5", "0.95", "0.99"))),
                "hostMemory": self._maybe(0.1, lambda: "4Gi"),
            },
            "engine": {
                "maxNumBatchedTokens": tokens,
                "maxNumSeqs": self._maybe(0.3, lambda: rng.choice((1, 4, 16, min(4096, tokens or 256)))),
                "maxNumMixedTokens": self._maybe(0.2, lambda: rng.choice((16, 512, 8192))),
                "profile": self._maybe(0.2, lambda: "exact"),
                "prefixCaching": self._maybe(0.1, lambda: False),
                "kvEventsPort": self._maybe(0.1, lambda: 8001),
            },
            "objective": self._maybe(0.5, lambda: rng.choice(("Throughput", "Latency"))),
            "drafter": self._maybe(0.3, lambda: drafter),
            "accelerators": {"products": ["CPU"]} if product == "CPU" else {},
            "pod": {"resources": {"limits": {"memory": "64Gi"}}} if product == "CPU" else {},
        }
        return _without_none(asked)

    def node(self) -> tuple[str, dict[str, Any]]:
        """A product, or CPU, and a node with its labels: those that are there, wrong or left out."""
        rng = self._rng
        product = rng.choice([*CATALOGUE, "NVIDIA-GB200", "NVIDIA-H300", "NVIDIA-Old", "CPU"])
        listed, memory = CATALOGUE.get(product), rng.choice((16_384, 81_559, 189_471))
        labels = {"nvidia.com/gpu.product": product, "kubernetes.io/arch": self._maybe(0.9, self._cpus)}
        if listed is None or rng.random() < 0.5:
            memory = listed.memory_mib if listed and rng.random() < 0.9 else memory
            labels["nvidia.com/gpu.memory"] = str(memory)
        if rng.random() < 0.5:
            known = listed.compute_capability if listed and rng.random() < 0.7 else None
            major, minor = known or rng.choice(((7, 0), (7, 5), (8, 1), (8, 9), (9, 0), (10, 3), (13, 0)))
            labels |= {"nvidia.com/gpu.compute.major": str(major), "nvidia.com/gpu.compute.minor": str(minor)}
        if rng.random() < 0.1:
            labels["nvidia.com/gpu.product"] = f"{product}-MIG-3g.40gb"
            labels["nvidia.com/gpu.memory"] = "40448"
        count = str(rng.choice((1, 1, 2, 4, 8)))
        return product, {
            "metadata": {"labels": _without_none(labels)},
            "status": {"allocatable": {"nvidia.com/gpu": count}},
        }

    def _cpus(self) -> str:
        return self._rng.choice(("amd64", "amd64", "arm64", "ppc64le"))

    def images(self) -> tuple[str, ...]:
        return self._rng.choice((("amd64",), ("amd64", "arm64"), ("arm64",), ("amd64", "arm64", "ppc64le")))


def _without_none(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kept = {key: _without_none(each) for key, each in value.items() if each is not None}
    return {key: each for key, each in kept.items() if each != {} or key == "pod"}


def _parsed(spec: dict[str, Any]) -> ModelServeSpec:
    return ModelServe.parse({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "g"}, "spec": spec}).spec


def _machine(accelerator: Accelerator, images: tuple[str, ...]) -> Machine:
    """The machine that such labels stand for, where they are right."""
    if accelerator.is_cpu:
        return Machine(images[0], None)
    capability = accelerator.compute_capability if accelerator.compute_capability[0] else (8, 0)
    name = accelerator.product.replace("-MIG-", " MIG ")
    return Machine(accelerator.architecture, DeviceFacts(name, accelerator.visible_bytes, capability))


def _settings(planned: PlanStatus, spec: ModelServeSpec, fit: Fit) -> EngineArgs:
    """As the operator writes them into a revision."""
    args = engine_args_for(planned, spec, model_directory="/model", drafter_directories=("/drafter", "/drafter-2"))
    if fit.accelerator.is_cpu:
        return args
    told = {"accelerator": planned.accelerator, "accelerator_memory_bytes": fit.accelerator.visible_bytes}
    return args.model_copy(update=told)


def test_no_chosen_plan_is_refused_by_a_worker() -> None:
    """`PAIRS` specs on nodes: what is chosen starts, as far as that can be asked without a GPU and weights."""
    models = _models()
    draws, told = Draws(3, models), Counter[str]()
    drawn = [
        (product, node, draws.spec(product), draws.images()) for product, node in (draws.node() for _ in range(PAIRS))
    ]
    # By model: what plans of one have in common is remembered for a while.
    for product, node, document, images in sorted(drawn, key=lambda each: str(each[2]["model"]["uri"])):
        try:
            spec = _parsed(document)
            facts = models[spec.model.uri]
            offers = offers_from_nodes([node]) if product != "CPU" else (AcceleratorOffer(CPU, 0),)
            found = consider(spec, facts.architecture, offers, weight_format=facts.format, image_architectures=images)
        except InvalidInput:
            told["InvalidSpec"] += 1
            continue
        fit = found[0].evaluation if found else None
        if not isinstance(fit, Fit):
            told[fit.limited_by if isinstance(fit, Refusal) else "NoAccelerators"] += 1
            continue
        planned = plan(spec, facts.architecture, offers, weight_format=facts.format, image_architectures=images)
        assert planned.fits
        assert planned.candidates[0].verdict == "Chosen"
        stored = facts.format if facts.format.quantised else None
        pool = fit.memory.kv_pool_bytes // LAYER_ALIGNMENT_BYTES * LAYER_ALIGNMENT_BYTES
        try:
            start(_settings(planned, spec, fit), facts.architecture, stored, _machine(fit.accelerator, images), pool)
        except (InvalidInput, DoesNotFit, TerminalError, ValueError) as error:
            pytest.fail(f"{document} on {node}: chosen {fit.gpus} x {fit.accelerator}, and the worker says: {error!r}")
        told["Chosen"] += 1
        told[f"Chosen on {'the CPU' if fit.accelerator.is_cpu else fit.accelerator.architecture}"] += 1
    assert told["Chosen"] > PAIRS // 5, told
    expected = {
        "Memory",
        "TensorParallel",
        "GPUsPerNode",
        "ComputeCapability",
        "Layout",
        "ContextLength",
        "Architecture",
    }
    assert expected | {"InvalidSpec", "Chosen on arm64", "Chosen on amd64", "Chosen on the CPU"} <= set(told), told
