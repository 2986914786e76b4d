"""A drafter that proposes a whole block at once, by a network over keys and values made of the target's hidden states.

What its layers keep of a token they keep in the target's pages, from the step that computes the token: prefix hits,
preemption, host memory and aborts carry it as they carry the target's own rows, and a request that resumes drafts as
one that has computed all. Rows of the block itself are kept nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from modelserve.sizing.cuda_graphs import decode_graph_sizes
from modelserve.sizing.speculation import STEP_DRAFTS
from modelserve_worker.batch import AdmittedRequest, Asked, AskedDrafter
from modelserve_worker.drafters.draft_buffers import DraftBuffers, captured_size
from modelserve_worker.drafters.drafter import Accepted, Drafter, DraftLayers, DraftRows, Proposal, TargetCaches
from modelserve_worker.kernels.compiling.compute_stream import check_compute_stream
from modelserve_worker.kernels.step import Step
from modelserve_worker.models.dflash import DFlash
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM


class BlockDrafter(Drafter):
    """Up to `num_tokens` drafts of at most `max_num_seqs` requests, where it is asked for them: of many requests no
    more each than a step verifies of all."""

    speaks_unasked = False

    def __init__(
        self, network: DFlash, target: Gemma4ForCausalLM, *, num_tokens: int, max_num_seqs: int, step_rows: int
    ) -> None:
        """`step_rows`: most rows of a step of the target."""
        architecture, device = network.architecture, target.norm.weight.device
        self.num_tokens = min(num_tokens, architecture.num_drafts)
        self.asked = (AskedDrafter(self.num_tokens, at_once=True),)
        self.network = network
        self._most = max_num_seqs
        self._taps = target.tap(architecture.taps, rows=step_rows)
        self._layers = DraftLayers(architecture.layer_windows, architecture.causal, architecture.attention_scale)
        self._rows: DraftRows | None = None
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.buffers = DraftBuffers(max_num_seqs=max_num_seqs, num_tokens=self.num_tokens, device=device)

    @property
    def weights_bytes(self) -> int:
        count: int = self.network.parameter_bytes()
        return count

    def attach(self, caches: TargetCaches) -> None:
        self._graphs.clear()
        self._rows = caches.draft_rows(self._layers)

    def admit(self, admitted: Sequence[AdmittedRequest]) -> None:
        """What it keeps of a request lies in the request's pages."""

    def store(self, step: Step) -> None:
        assert self._rows is not None, "the drafter has no caches to write"
        context = self.network.context(self._taps.of(len(step.positions)))
        self._rows.store(step, self.network.context_rows(context, step.positions))

    def capture(self, pool: Any) -> None:
        for size in reversed(decode_graph_sizes(self._most)):
            self.run(size)  # what is launched depends on the size: a capture neither compiles nor loads a kernel
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self.run(size)
            self._graphs[size] = graph

    def proposed(self, requests: int) -> int:
        """Drafts that so many requests get at most, of each."""
        count: int = min(self.num_tokens, max(1, STEP_DRAFTS // requests))
        return count

    @torch.inference_mode()
    def run(self, size: int) -> None:
        """Launch what captured drafts of so many requests launch, over whatever the buffers hold."""
        assert self._rows is not None
        buffers, positions = self.buffers, self.buffers.positions[:size]
        self._rows.begin(buffers.slots[:size], positions)
        drafted = self.network(buffers.tokens[:size], positions, self._rows, asked=self.proposed(size))
        buffers.drafts[:size, : drafted.tokens.shape[1]] = drafted.tokens

    def propose(self, accepted: Accepted, asked: Asked) -> Proposal:
        count = len(accepted.slots)
        size = captured_size(self._graphs, count)
        tokens = min(asked.drafts, self.proposed(size))
        if tokens:
            self.buffers.begin(accepted, size)
            if (graph := self._graphs.get(size)) is None:
                self.run(size)
            else:
                check_compute_stream(torch.cuda.current_stream().cuda_stream)
                graph.replay()
        return self.buffers.proposal(count, tokens)
