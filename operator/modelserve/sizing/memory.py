"""Where the memory of one GPU (or of a CPU worker's container) goes: weights, workspace, overhead, and the KV pool.

Every term has a name, its bytes and the source of the figure, and every one can be replaced by a better figure: one
the user assumes, or one that was measured on the same product before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Literal

from modelserve.errors import InvalidInput
from modelserve.hardware import CATALOGUE, Accelerator
from modelserve.model.architecture import ModelArchitecture
from modelserve.sizing.activation import (
    KEYS_PER_PASS,
    PHASES,
    ROWS_PER_SORT,
    SCORES_PER_PASS,
    activation_bytes,
    activation_terms,
    largest_phase,
)
from modelserve.sizing.adapters import slot_bytes
from modelserve.sizing.backends.resolve import takes_model
from modelserve.sizing.communicator import communicator_bytes, communicator_source
from modelserve.sizing.cuda_context import context_bytes, context_source
from modelserve.sizing.cuda_graphs import graphs_bytes
from modelserve.sizing.media.audio_embedder import audio_embedder_bytes
from modelserve.sizing.media.audio_input import audio_host_bytes
from modelserve.sizing.media.embedder import embedder_bytes
from modelserve.sizing.media.image_input import image_host_bytes
from modelserve.sizing.pages import LAYER_ALIGNMENT_BYTES
from modelserve.sizing.rank_settings import RankSettings
from modelserve.sizing.rank_sums import peer_bytes
from modelserve.sizing.weights.drafter import drafter_weight_bytes
from modelserve.sizing.weights.quantised_tiles import tile_padding_bytes
from modelserve.sizing.weights.text import segment_rounding_bytes, weight_bytes
from modelserve.units import MIB

H200 = CATALOGUE["NVIDIA-H200"]

__all__ = [
    "KEYS_PER_PASS",
    "ROWS_PER_SORT",
    "SCORES_PER_PASS",
    "TERM_NAMES",
    "MemoryPlan",
    "MemoryTerm",
    "activation_bytes",
    "activation_terms",
    "memory_plan",
    "overhead_terms",
    "weight_bytes",
]

CPU_PROCESS_BYTES = 614 * MIB  # resident set of the interpreter with torch and the HTTP stack: 0.6 GiB
CPU_HEADROOM = Decimal("0.05")  # of the container's limit: heap growth, and page cache while weights load

NOTHING: Mapping[str, int] = MappingProxyType({})
MemoryGroup = Literal["weights", "activation", "overhead"]
MEMORY_GROUPS: tuple[MemoryGroup, ...] = ("weights", "activation", "overhead")
_SOURCES = {
    "parameters": "tensor shapes x storage format",
    "allocator": "2 MiB segments of PyTorch's allocator",
    "tile_padding": "quantised matrices to whole tiles of the kernels",
    "drafter": "tensor shapes of what drafts",
    "adapters": "slots x factors of the largest rank",
    "residual": "T H e: 2, or 6 on several ranks or with experts",
    "per_layer_inputs": "2 T P e",
    "rope": "4 T (D + D_global)",
    "penalties": "4 S V",
    "token_masks": "S V / 8",
    "prompt_lookup": "4 S longest context",
    "drafts": "S ((H + h) e + 4 (4 + 2 k))",
    "cublas": "two workspaces of at most 32 MiB",
    "segments": "part-filled segments of PyTorch's allocator",
    "dequantised": "largest quantised matrix in the compute type",
    "products": "split sums; a dequantised block or rounded inputs",
    "adapter_sums": "4 splits T P r",
    "block_tables": "4 S entries of both tables",
    "step_metadata": "4 (5 T + 36 S + (5 + 3 S) C)",
    "decode_splits": "4 S splits heads (D + 2)",
    "expanded_keys": "longest context, keys that chunks expand",
    "rotation_tables": "8 pairs of tiles",
    "embedding": "T P e",
    "attention": "projection, queries, output, rows to store",
    "mlp": "3 T I e",
    "sampling": "logits, candidates, one sort",
    "graphs": "kernels of every captured size, two results",
    "peers": "8 MiB; 2 T H e for sums by rows",
    "process": "measured",
    "image_embedder": "tensor shapes x dtype",
    "image_rows": "(T + N) H e, N rows of images while they are made",
    "image_cache": "8 images of H e a row",
    "images": "a decoder, pixels of open requests",
    "audio_embedder": "tensor shapes x dtype",
    "audio_rows": "(T + N) H e, N rows of sounds while they are made, beyond those of images",
    "audio_cache": "8 sounds of H e a row",
    "audio": "a decoder where images have none, spectra of open requests",
    "headroom": "5 % of the container's limit",
}
_PLAIN_SOURCES = {  # of attention in plain PyTorch
    "residual": "2 T H e",
    "per_layer_inputs": "T P e",
    "rope": "T (D + D_global) e",
    "block_tables": "8 S pages",
    "embedding": "8 T P",
    "attention": "projections, one pass of keys, scores",
    "mlp": "4 T I e",
}
TERM_NAMES: tuple[str, ...] = (*MEMORY_GROUPS, *_SOURCES, "context", "nccl")
"""What an override may name: a term, or a whole group."""


@dataclass(frozen=True)
class MemoryTerm:
    """One named part of a rank's memory."""

    group: MemoryGroup
    name: str
    bytes: int
    source: str


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank. `kv_pool_bytes` is what is left of the budget: never negative, a multiple of 128."""

    total_bytes: int
    budget_bytes: int
    terms: tuple[MemoryTerm, ...]
    available_bytes: int  # budget less all terms; negative when they alone do not fit

    def group_bytes(self, group: MemoryGroup) -> int:
        return sum(term.bytes for term in self.terms if term.group == group)

    @cached_property
    def weights_bytes(self) -> int:
        return self.group_bytes("weights")

    @cached_property
    def activation_bytes(self) -> int:
        return self.group_bytes("activation")

    @cached_property
    def overhead_bytes(self) -> int:
        return self.group_bytes("overhead")

    @property
    def kv_pool_bytes(self) -> int:
        return max(0, self.available_bytes) // LAYER_ALIGNMENT_BYTES * LAYER_ALIGNMENT_BYTES


def memory_plan(
    architecture: ModelArchitecture,
    settings: RankSettings,
    *,
    total_bytes: int,
    utilization: Decimal,
    learned: Mapping[str, int] | None = None,
    accelerator: Accelerator = H200,
) -> MemoryPlan:
    """Divide the memory of one rank.

    `total_bytes` is device memory as a process sees it, or the container's memory limit. On a GPU the budget is
    `utilization` of it; on the CPU it is all of it, since the headroom is a term of its own there.
    Buffers are for the architecture's longest context, as the worker makes them before it knows what the pool can hold.
    `learned` replaces predictions by bytes, by the name of a term or of a whole group (`TERM_NAMES`); a group's figure
    wins over those of its terms. `accelerator`: whose driver and communicator take their share.
    Raises InvalidInput when the tensor-parallel size does not divide the model, or an override names nothing.
    """
    learned = learned or {}
    check_overrides(learned)
    terms, captured, peers = _tensor_terms(architecture, settings, learned=tuple(learned.items()))
    overhead = overhead_terms(
        tensor_parallel_size=settings.tensor_parallel_size,
        total_bytes=total_bytes if settings.on_cpu else 0,
        on_cpu=settings.on_cpu,
        captured_bytes=captured,
        peer_buffer_bytes=peers,
        accelerator=accelerator,
        media=cpu_media_bytes(settings),
    )
    sources = {**_SOURCES, "context": context_source(accelerator), "nccl": communicator_source(accelerator)}
    if not captured:
        sources["graphs"] = "none are captured"
    terms = (*terms, *_terms("overhead", overhead, learned, sources))
    budget = total_bytes if settings.on_cpu else int(total_bytes * utilization)
    return MemoryPlan(total_bytes, budget, terms, available_bytes=budget - sum(term.bytes for term in terms))


@lru_cache(maxsize=512)  # products differ in memory and overhead, not in these
def _tensor_terms(
    architecture: ModelArchitecture, settings: RankSettings, *, learned: tuple[tuple[str, int], ...]
) -> tuple[tuple[MemoryTerm, ...], int, int]:
    """The terms of weights and activation; predicted bytes of graphs, and of buffers that other ranks write into."""
    tp, on_cpu, given = settings.tensor_parallel_size, settings.on_cpu, dict(learned)
    weight_format = settings.weight_format
    weights = {"parameters": weight_bytes(architecture, tensor_parallel_size=tp, weight_format=weight_format)}
    if not on_cpu:
        weights["allocator"] = segment_rounding_bytes(
            architecture, tensor_parallel_size=tp, weight_format=weight_format
        )
        padding = tile_padding_bytes(architecture, tensor_parallel_size=tp, weight_format=weight_format)
        if padding and takes_model(architecture):
            weights["tile_padding"] = padding
    if drafters := settings.speculation.drafters:
        weights["drafter"] = sum(drafter_weight_bytes(each, tensor_parallel_size=tp) for each in drafters)
    if (adapters := settings.adapters) is not None:
        weights["adapters"] = adapters.slots * slot_bytes(architecture, adapters, tensor_parallel_size=tp)
    if (images := settings.images) is not None:
        weights["image_embedder"] = embedder_bytes(images.architecture, architecture, segments=not on_cpu)
    if (audio := settings.audio) is not None:
        weights["audio_embedder"] = audio_embedder_bytes(audio.architecture, architecture, segments=not on_cpu)
    always, predicted_phases = activation_terms(architecture, settings)
    phases = {**predicted_phases, **{name: given[name] for name in PHASES if name in given}}
    activation = {**always} | {name: phases[name] for name in largest_phase(phases)}
    plain = on_cpu or not takes_model(architecture)
    sources = _SOURCES | _PLAIN_SOURCES if plain else _SOURCES
    terms = (*_terms("weights", weights, given, sources), *_terms("activation", activation, given, sources))
    peers = peer_bytes(architecture, tensor_parallel_size=tp, rows=settings.step_rows)
    return terms, graphs_bytes(architecture, settings), peers


def cpu_media_bytes(settings: RankSettings) -> dict[str, int]:
    """What reading `images` and `audio` takes of a CPU worker's container, as far as they are taken; on GPUs it is host
    memory, which the pod asks for."""
    if not settings.on_cpu:
        return {}
    ranks, whole = settings.tensor_parallel_size, {}
    if settings.images is not None:
        whole["images"] = image_host_bytes(settings.images, ranks=ranks, on_cpu=True)
    if settings.audio is not None:
        decoders = settings.images is None
        whole["audio"] = audio_host_bytes(settings.audio, ranks=ranks, on_cpu=True, decoders=decoders)
    return {name: -(-size // ranks) for name, size in whole.items()}


def check_overrides(learned: Mapping[str, int]) -> None:
    """Raises InvalidInput for a name that is no term, or a figure that is no number of bytes."""
    for name, value in learned.items():
        if name not in TERM_NAMES:
            raise InvalidInput(f"{name!r} is not a memory term; terms are {', '.join(TERM_NAMES)}")
        if not 0 <= value < 1 << 50:
            raise InvalidInput(f"memory term {name} of {value} bytes: it must be 0 or more and below 1 PiB")


def _terms(
    group: MemoryGroup, predicted: dict[str, int], learned: Mapping[str, int], sources: Mapping[str, str]
) -> list[MemoryTerm]:
    if group in learned:
        return [MemoryTerm(group, group, learned[group], "given")]
    return [
        MemoryTerm(group, name, learned.get(name, size), "given" if name in learned else sources[name])
        for name, size in predicted.items()
    ]


def overhead_terms(
    *,
    tensor_parallel_size: int,
    total_bytes: int,
    on_cpu: bool,
    captured_bytes: int = 0,
    peer_buffer_bytes: int = 0,
    media: Mapping[str, int] = NOTHING,
    accelerator: Accelerator = H200,
) -> dict[str, int]:
    """Bytes of one process beside weights, a step and the pool, by name.

    `captured_bytes`: of `graphs_bytes`; `peer_buffer_bytes`: of `peer_bytes`; `media`: of `cpu_media_bytes`.
    """
    if on_cpu:
        return {"process": CPU_PROCESS_BYTES, "headroom": int(total_bytes * CPU_HEADROOM), **media}
    terms = {"context": context_bytes(accelerator), "graphs": captured_bytes}
    if tensor_parallel_size > 1:
        nccl = communicator_bytes(accelerator, tensor_parallel_size)
        terms |= {"nccl": nccl, "peers": peer_buffer_bytes}
    return terms
