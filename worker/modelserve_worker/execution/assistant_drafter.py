"""A drafter that runs an MTP assistant: all drafts of a step are one launch, captured by the number of its requests.

The assistant has no state: what it reads are the hidden state and the token of the step that has just been sampled, and
rows of the target's caches up to the last accepted one. So preemption, aborts and prefix hits are none of its business,
and which drafts were accepted is read where the device has written it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from modelserve.sizing.cuda_graphs import decode_graph_sizes
from modelserve_worker.batch import AdmittedRequest
from modelserve_worker.execution.drafter import Accepted, CacheReader, Proposal, ReaderOf
from modelserve_worker.kernels.compute_stream import check_compute_stream
from modelserve_worker.models.gemma4_assistant import Gemma4Assistant


class AssistantDrafter:
    """`num_tokens` drafts of at most `max_num_seqs` requests."""

    def __init__(self, assistant: Gemma4Assistant, *, num_tokens: int, max_num_seqs: int) -> None:
        self.num_tokens = num_tokens
        self.assistant = assistant
        self._most = max_num_seqs
        self._reader: CacheReader | None = None
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        weight, width = assistant.norm.weight, assistant.architecture.backbone_hidden_size
        places = torch.zeros(3, max_num_seqs, dtype=torch.int32, device=weight.device)
        self._slots, self._tokens, self._positions = places.unbind(0)
        self._hidden = torch.zeros(max_num_seqs, width, dtype=weight.dtype, device=weight.device)
        self._drafts = torch.zeros(max_num_seqs, num_tokens, dtype=torch.int32, device=weight.device)
        self._counts = torch.full((max_num_seqs,), num_tokens, dtype=torch.int32, device=weight.device)

    @property
    def weights_bytes(self) -> int:
        return self.assistant.parameter_bytes()

    def attach(self, reader_of: ReaderOf) -> None:
        architecture = self.assistant.architecture
        self._graphs.clear()
        self._reader = reader_of([architecture.kind(layer) for layer in range(architecture.num_hidden_layers)])

    def admit(self, admitted: Sequence[AdmittedRequest]) -> None:
        """It keeps nothing of a request."""

    def capture(self, pool: Any) -> None:
        for size in reversed(decode_graph_sizes(self._most)):
            self._run(size)  # what is launched depends on the size: a capture neither compiles nor loads a kernel
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._run(size)
            self._graphs[size] = graph

    def propose(self, accepted: Accepted) -> Proposal:
        count = len(accepted.slots)
        size = min((size for size in self._graphs if size >= count), default=count)
        for buffer, values, padding in (
            (self._slots, accepted.slots, -1),
            (self._tokens, accepted.tokens, 0),
            (self._positions, accepted.positions, 0),
        ):
            buffer[:count] = values
            buffer[count:size] = padding
        self._hidden[:count] = accepted.hidden
        if graph := self._graphs.get(size):
            check_compute_stream(torch.cuda.current_stream().cuda_stream)
            graph.replay()
        else:
            self._run(size)
        return Proposal(self._drafts[:count], self._counts[:count])

    @torch.inference_mode()
    def _run(self, size: int) -> None:
        assert self._reader is not None, "the drafter has no caches to read"
        positions = self._positions[:size]
        self._reader.begin(self._slots[:size], positions - 1)
        self._drafts[:size] = self.assistant(
            self._tokens[:size], self._hidden[:size], positions, self._reader, self.num_tokens
        )
