"""A drafter that runs an MTP assistant: one launch a draft, captured by the number of its requests.

The assistant has no state: what it reads are the hidden state and the token of the step that has just been sampled, and
rows of the target's caches up to the last accepted one. So preemption, aborts and prefix hits are none of its business,
and which drafts were accepted is read where the device has written it.

A draft takes a good part of a step's time, so it makes as many as it is asked for: a graph of the first one, and one of
any that follows, find on the device what the draft before has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modelserve.model.architecture import LayerKind
from modelserve.sizing.cuda_graphs import decode_graph_sizes
from modelserve_worker.batch import AdmittedRequest, Asked, AskedDrafter
from modelserve_worker.drafters.draft_buffers import DraftBuffers, captured_size
from modelserve_worker.drafters.drafter import Accepted, CacheReader, Drafter, Proposal, TargetCaches
from modelserve_worker.kernels.compiling.compute_stream import check_compute_stream
from modelserve_worker.kernels.step import Step
from modelserve_worker.kernels.step_start import Rotation
from modelserve_worker.models.gemma4_assistant import Gemma4Assistant


class _Captured(NamedTuple):
    """Graphs of so many requests."""

    first: torch.cuda.CUDAGraph
    following: torch.cuda.CUDAGraph
    rotations: dict[LayerKind, Rotation]  # which the first one writes and both read: no other graph may have the memory


class AssistantDrafter(Drafter):
    """Up to `num_tokens` drafts of at most `max_num_seqs` requests, where it is asked for them."""

    speaks_unasked = False

    def __init__(self, assistant: Gemma4Assistant, *, num_tokens: int, max_num_seqs: int) -> None:
        self.num_tokens = num_tokens
        self.asked = (AskedDrafter(num_tokens),)
        self.assistant = assistant
        self._most = max_num_seqs
        self._reader: CacheReader | None = None
        self._rotations: dict[LayerKind, Rotation] = {}
        self._graphs: dict[int, _Captured] = {}
        architecture, device = assistant.architecture, assistant.norm.weight.device
        dtype = assistant.norm.weight.dtype
        self._buffers = DraftBuffers(max_num_seqs=max_num_seqs, num_tokens=num_tokens, device=device)
        self._hidden = torch.zeros(max_num_seqs, architecture.backbone_hidden_size, dtype=dtype, device=device)
        self._normed = torch.zeros(max_num_seqs, architecture.hidden_size, dtype=dtype, device=device)

    @property
    def weights_bytes(self) -> int:
        return self.assistant.parameter_bytes()

    def attach(self, caches: TargetCaches) -> None:
        architecture = self.assistant.architecture
        self._graphs.clear()
        self._reader = caches.cache_reader(
            [architecture.kind(layer) for layer in range(architecture.num_hidden_layers)]
        )

    def store(self, step: Step) -> None:
        """It keeps nothing of a step."""

    def admit(self, admitted: Sequence[AdmittedRequest]) -> None:
        """It keeps nothing of a request."""

    def capture(self, pool: Any) -> None:
        for size in reversed(decode_graph_sizes(self._most)):
            self.run(size)  # what is launched depends on the size: a capture neither compiles nor loads a kernel
            first, following = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            for graph, draft in ((first, self._first), (following, self._following)):
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    draft(size)
            self._graphs[size] = _Captured(first, following, self._rotations)

    def run(self, size: int) -> None:
        """Launch one by one what captured drafts of so many requests launch, over whatever the buffers hold."""
        self._first(size)
        self._following(size)

    def propose(self, accepted: Accepted, asked: Asked) -> Proposal:
        count, buffers = len(accepted.slots), self._buffers
        size = captured_size(self._graphs, count)
        if asked.drafts:
            buffers.begin(accepted, size)
            self._hidden[:count] = accepted.hidden
        for place in range(asked.drafts):
            self._draft(size, place)
            buffers.drafts[:count, place] = buffers.tokens[:count]
        return buffers.proposal(count, asked.drafts)

    def _draft(self, size: int, place: int) -> None:
        graphs = self._graphs.get(size)
        if graphs is None:
            (self._following if place else self._first)(size)
            return
        check_compute_stream(torch.cuda.current_stream().cuda_stream)
        (graphs.following if place else graphs.first).replay()

    @torch.inference_mode()
    def _first(self, size: int) -> None:
        assert self._reader is not None, "the drafter has no caches to read"
        slots, positions = self._buffers.slots[:size], self._buffers.positions[:size]
        self._reader.begin(slots, positions - 1)
        self._rotations = self.assistant.rope.rotations(positions)
        self._run(size, self._hidden[:size])

    @torch.inference_mode()
    def _following(self, size: int) -> None:
        self._run(size, self.assistant.next_state(self._normed[:size]))

    def _run(self, size: int, state: Tensor) -> None:
        assert self._reader is not None
        tokens = self._buffers.tokens[:size]
        drafted, self._normed[:size] = self.assistant(tokens, state, self._rotations, self._reader)
        tokens.copy_(drafted)
