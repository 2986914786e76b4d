"""One rank's model runner: packs a step, runs the model through the paged cache, samples, copies the tokens back.

On a GPU nothing here waits for the device. One buffer carries all metadata of a step; tokens stay on the device in a
buffer of one entry per slot, where the next step reads those still in flight; results are copied to pinned memory
behind an event that only `PendingStep.result` waits for. Steps replay captured graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from modelserve.errors import InvalidInput
from modelserve.model.architecture import LayerKind
from modelserve.sizing.backends.table import KernelTable
from modelserve.sizing.cuda_graphs import last_row_sizes
from modelserve.sizing.speculation import Speculation
from modelserve_worker.adapters.store import AdapterStore
from modelserve_worker.attention.exact_attention import ExactAttention
from modelserve_worker.attention.page_groups import page_groups
from modelserve_worker.attention.paged_attention import PagedAttention
from modelserve_worker.attention.target_caches import PoolOfTarget
from modelserve_worker.batch import AskedDrafter, FailedStep, Int32Array, PendingStep, ScheduledBatch, row_places
from modelserve_worker.cache.host_memory import HostMemory
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.drafters.drafter import Drafter, TargetCaches, accepted_of
from modelserve_worker.host_pages import HostProgress
from modelserve_worker.kernels.step import Step
from modelserve_worker.layers.attention import AttentionBackend
from modelserve_worker.layers.rotary import rotate
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.runner.launched_step import CheckedStep, Drafted, LaunchedStep, UnsampledStep, to_host
from modelserve_worker.runner.prompt_scores import PromptScorer, ScoredChunk
from modelserve_worker.runner.step_graphs import WARM_ROWS, StepGraphs
from modelserve_worker.step.block_tables import BlockTables
from modelserve_worker.step.embedded_rows import MOST_ROWS, MostRows, SlotEmbeddings
from modelserve_worker.step.input_batch import StepPacker
from modelserve_worker.step.sampler import Sampler, SamplerOutput
from modelserve_worker.step.staging import upload
from modelserve_worker.step.step_size import QueryBlocks, StepSize
from modelserve_worker.step.token_masks import TokenMaskBuffer, TokenMasks

if TYPE_CHECKING:
    from modelserve_worker.attention.fast_attention import KernelAttention

_NO_BLOCKS = QueryBlocks(1, 1, 1)  # plain attention reads the batch itself


class GPUModelRunner:
    """Runs scheduled steps of one rank on its device, a GPU or the CPU, in the order of `execute` calls.

    `table` says what attends, and is that of the model's operations unless another is given.
    """

    def __init__(
        self,
        model: Gemma4ForCausalLM,
        cache: KVCache,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        table: KernelTable | None = None,
        drafter: Drafter | None = None,
        adapters: AdapterStore | None = None,
        most_media: MostRows = MOST_ROWS,
    ) -> None:
        device, architecture = cache.arena.device, model.architecture
        self.model, self.adapters, self.cache = model, adapters, cache
        self.host: HostMemory | None = None  # of cached pages
        model.share_workspace()
        self._on_gpu = self.launches_ahead = device.type == "cuda"
        self._drafter = drafter
        self.draft_tokens = 0 if drafter is None else drafter.num_tokens
        self.asked_drafts: Sequence[AskedDrafter] = () if drafter is None else drafter.asked
        most_rows = 1 + self.draft_tokens
        self._few_rows = few_rows = Speculation(self.draft_tokens).step_rows(max_num_seqs)
        self.tables = BlockTables(cache.geometry, max_num_seqs=max_num_seqs, max_model_len=max_model_len, device=device)
        self._kernels: KernelAttention | None = None
        self.table = model.operations.table if table is None else table
        if self.table.on_kernels:
            from modelserve_worker.attention.fast_attention import KernelAttention  # Triton, on GPUs alone

            self._kernels = KernelAttention(
                model, cache, self.tables, self.table, max_model_len=max_model_len, few_rows=few_rows
            )
        self._packer = StepPacker(
            cache.geometry, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs,
            max_model_len=max_model_len, vocab_size=architecture.vocab_size, device=device, most_rows=most_rows,
            blocks=_NO_BLOCKS if self._kernels is None else self._kernels.blocks, exact=model.operations.exact,
            adapters=None if adapters is None else adapters.slots.limits,
        )  # fmt: skip
        self._sampler = Sampler(
            max_num_seqs=max_num_seqs,
            vocab_size=architecture.vocab_size,
            softcap=architecture.final_logit_softcapping,
            parallel=model.parallel,
            device=device,
            backend=model.operations.sampling,
        )
        self._scorer = PromptScorer(softcap=architecture.final_logit_softcapping, device=device)
        self._most = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        self._embeddings = SlotEmbeddings(model, device=device, most=most_media, **self._most)
        self._masks = TokenMaskBuffer(max_num_seqs=few_rows, vocab_size=architecture.vocab_size, device=device)
        self._backend = model.operations.step
        self.slot_positions = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self.slot_tokens = torch.zeros(max_num_seqs, most_rows, dtype=torch.int32, device=device)
        # What captured steps without chunks leave for a drafter beside their logits: hidden states of all rows.
        self._decoded = None if drafter is None else torch.zeros(
            few_rows, architecture.hidden_size, dtype=model.dtype, device=device
        )  # fmt: skip
        self._graphs: StepGraphs | None = None
        self._unsound = torch.zeros(0)  # what the last step with checks has found
        if drafter is not None:
            drafter.attach(self.caches())

    def use_cache(self, cache: KVCache) -> None:
        """Run over another pool of the same geometry from now on. Graphs captured before are gone."""
        self.cache = cache
        self._graphs = None
        if self._kernels is not None:
            self._kernels.use(cache)
        if self._drafter is not None:
            self._drafter.attach(self.caches())

    def caches(self) -> TargetCaches:
        """What a drafter has of the pool that it runs over at present."""
        return PoolOfTarget(
            self.model, self.cache, self.tables, kernels=self._kernels, derive_keys=self._derive_keys,
        )  # fmt: skip

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Capture steps of every size bucket over the present pool. Every kernel must have run before.

        All ranks capture the same sizes in the same order, since collectives are captured with them.
        Audited steps are not captured: a replay would show the audit nothing.
        """
        if self._kernels is not None and self.cache.stamps is None:
            warm = WARM_ROWS if self.model.parallel.size > 1 else 0
            last_rows = last_row_sizes(self.model.architecture, self._few_rows)
            self._graphs = StepGraphs(
                self._packer, **self._most, last_rows=last_rows, logits=self._logits, hidden=self._hidden,
                warm_rows=warm,
            )  # fmt: skip
            if self._drafter is not None:
                self._drafter.capture(self._graphs.pool)

    @property
    def captured_rows(self) -> tuple[int, ...]:
        """Sizes of the captured steps with prompts, rising; none on the CPU."""
        return () if self._graphs is None else self._graphs.mixed_rows

    def execute(self, batch: ScheduledBatch) -> PendingStep:
        """Launch one step. An error of the launch is raised by the returned step's `result`, not here."""
        try:
            step = self._launch(batch)
            return CheckedStep(step, self._unsound) if batch.checks else step
        except InvalidInput as error:  # from packing, which is the same on every rank
            return FailedStep(error, before_collectives=True)
        except Exception as error:
            return FailedStep(error)

    @torch.inference_mode()
    def profile(self, batches: Sequence[ScheduledBatch]) -> None:
        """Run steps for their memory and their kernels; the state of all slots is reset afterwards."""
        for batch in batches:
            self._launch(batch).result()
        self._sampler.reset()

    def host_progress(self) -> HostProgress:
        """Nothing has come where there is no host memory. Raises EngineDead as `check` does."""
        self.check()
        return HostProgress() if self.host is None else self.host.progress

    def check(self) -> None:
        """Raise EngineDead where copies beside the steps met a fault of the device: others show in their steps."""
        if self.host is not None:
            self.host.check()

    def shutdown(self) -> None:
        """Let go of captured steps: NCCL's communicators wait for graphs that hold collectives."""
        self._graphs = None

    @torch.inference_mode()
    def _launch(self, batch: ScheduledBatch) -> PendingStep:
        if not batch.num_requests:
            self._move_pages(batch)
            return LaunchedStep(batch.step, None, on_gpu=self._on_gpu)
        self.cache.rounded_to = None if batch.trial is None else batch.trial.rounded_to
        size = None if self._graphs is None or batch.trial is not None else self._graphs.size_for(batch)
        step = self._pack(batch, padded_to=size)
        captured = self._graphs is not None and size is not None
        if self._graphs and size:
            result = self._graphs.replay(step, size)
        else:
            with self._scratch():
                result = self._hidden(step, batch)
        self._sampler.admit(batch.admitted)  # the device has the model to compute while these are written
        if batch.admitted:
            self._scorer.admit(batch.admitted)
        if self._drafter is not None:
            self._drafter.admit(batch.admitted)
        # A captured step without chunks ends with the head.
        ended = captured and step.chunks is None
        lengths = batch.lengths if step.narrowed is None else batch.kept

        def logits(some: Tensor | slice) -> Tensor:
            if ended and isinstance(some, slice):
                return result[some]
            with self._scratch():
                return result[some] if ended else self.model.head(result[some])

        scored: list[ScoredChunk] = []
        if len(batch.given):
            scored = self._scorer.score(batch, lengths, lambda some: self.model.parallel.all_gather(logits(some)))
        if step.sampled_slots is None:
            return LaunchedStep(batch.step, None, on_gpu=self._on_gpu, scored=scored)
        hidden = self._decoded if ended else result
        sample = partial(self._sampled, batch, step, logits(_sampled_rows(step)), hidden, scored)
        return UnsampledStep(sample) if len(batch.constrained) else sample()

    def _scratch(self) -> AbstractContextManager[None]:
        """Where what is gone with its step takes its memory from: sizes that differ from step to step would each stay
        in PyTorch's own."""
        return nullcontext() if self._graphs is None else self._graphs.memory()

    def _pack(self, batch: ScheduledBatch, *, padded_to: StepSize | None = None) -> Step:
        step = self._packer.pack(batch, padded_to=padded_to)
        self._embeddings.admit(batch.admitted)
        if self.cache.stamps is not None:
            positions = self.slot_positions if self.draft_tokens else None
            self.cache.stamps.texts.begin(batch, self.slot_tokens, positions)
        self._move_pages(batch)
        return step

    def _move_pages(self, batch: ScheduledBatch) -> None:
        """Bring pages and tables to where the step finds them, and start its copies to and from host memory."""
        updates = {LayerKind.GLOBAL: batch.global_updates, LayerKind.SLIDING: batch.sliding_updates}
        for kind, entries in updates.items():
            self.tables.check(kind, entries, num_pages=self.cache.num_pages[kind])
        if batch.loads_awaited and self.host is not None:
            self.host.await_loads(batch.loads_awaited)
        if self.adapters is not None:
            self.adapters.follow(batch)
        self.cache.move(batch.page_moves)
        if batch.checks:  # of the heads that any rank has
            with self._scratch():
                unsound = self.cache.unsound(batch.checks).float()[:, None]
            self._unsound = to_host(self.model.parallel.all_gather(unsound).any(-1))
        self.tables.apply(updates)
        if self.host is not None:
            self.host.launch(batch)

    def _hidden(self, step: Step, batch: ScheduledBatch | None = None) -> Tensor:
        """`batch` None: the step is captured."""
        if batch is not None:
            step = self._embeddings.put(step, batch)
        self.model.placement.adapter_rows.begin(step)
        assert step.token_ids is not None
        if step.assumed is not None:
            self._settle(step, step.assumed)
        tokens = self._backend.tokens(step.token_ids, step.global_slots, self.slot_tokens)
        attention = self._attention(step, batch)
        hidden: Tensor = self.model(
            tokens, step.positions, attention, num_rows=step.num_rows, narrowed=step.narrowed, embedded=step.embedded
        )
        if self._drafter is not None:
            self._drafter.store(step)
        return hidden

    def _settle(self, step: Step, assumed: Tensor) -> None:
        placed = [(step.positions, step.global_slots)]
        if step.decode is not None:
            placed.append((step.decode.starts, step.decode.slots))
        if step.narrowed is not None and step.narrowed.decode is not None:
            kept, few = step.narrowed, step.narrowed.decode
            placed += [(kept.positions, kept.global_slots), (few.starts, few.slots)]
        self._backend.settle(placed, assumed, self.slot_positions)

    def _logits(self, step: Step) -> Tensor:
        """Raw logits of every row, of this rank's tokens."""
        hidden = self._hidden(step)
        if self._decoded is not None:
            self._decoded[: len(hidden)].copy_(hidden)
        return self.model.head(hidden)

    @torch.inference_mode()
    def _sampled(
        self,
        batch: ScheduledBatch,
        step: Step,
        logits: Tensor,
        hidden: Tensor | None,
        scored: Sequence[ScoredChunk],
        masks: Int32Array | None = None,
    ) -> LaunchedStep:
        """Launch the sampling of a step, and what its drafter proposes from the step's `hidden` states; `masks` are
        those of its constrained rows."""
        drawn = batch.drawn
        sent = None
        if masks is not None:
            constrained = np.zeros(np.count_nonzero(drawn), dtype=np.bool_)
            constrained[batch.constrained] = True
            rows = np.flatnonzero(np.repeat(constrained, drawn[drawn > 0])).astype(np.int32)
            sent = self._masks.send(rows, masks, rows=len(logits))
        sampled = self._sample(batch, step, logits, sent)
        assert step.draws is not None
        assert step.token_ids is not None
        counts = self._backend.accept(
            sampled.tokens, step.token_ids, step.positions, step.draws, self.slot_tokens, self.slot_positions
        )
        proposal, drafter = None, self._drafter
        if drafter is not None and (batch.asked.drafts or drafter.speaks_unasked):
            assert hidden is not None
            slots = step.draws.slots
            accepted = accepted_of(step, sampled.tokens, counts, hidden, self.slot_tokens, self.slot_positions)
            proposal = drafter.propose(accepted, batch.asked)
            self.slot_tokens[slots, 1:] = proposal.tokens
        drafted = None
        if proposal is not None or drawn.max() > 1:
            drafted = Drafted(drawn[drawn > 0], counts, proposal)
        return LaunchedStep(batch.step, sampled, on_gpu=self._on_gpu, scored=scored, drafted=drafted)

    def _sample(self, batch: ScheduledBatch, step: Step, logits: Tensor, masks: TokenMasks | None) -> SamplerOutput:
        slots, positions, counts = step.sampled_slots, step.sampled_positions, step.output_counts
        assert slots is not None and positions is not None and counts is not None  # noqa: PT018 - all or none
        if step.assumed is not None:
            self._backend.settle([(positions, slots), (counts, slots)], step.assumed, self.slot_positions)
        segments, offsets = row_places(batch.drawn)
        return self._sampler.sample(
            logits,
            slots=slots,
            positions=positions,
            output_counts=counts,
            host_slots=batch.slots[segments],
            masks=masks,
            offsets=offsets if offsets.any() else None,
            proposed=self._fed_next(batch, step) if offsets.any() else None,
        )

    def _fed_next(self, batch: ScheduledBatch, step: Step) -> Tensor:
        """int32 [N]: the draft that the row behind each drawn one was fed with; -1 behind a segment's last."""
        assert step.token_ids is not None
        drawn = batch.drawn
        segments, offsets = row_places(drawn)
        rows = (np.cumsum(batch.lengths) - drawn)[segments] + offsets + 1
        last = offsets + 1 == drawn[segments]
        where, behind = (upload(each, step.token_ids.device) for each in (np.where(last, 0, rows), last))
        return step.token_ids[where].masked_fill_(behind, -1)

    def _attention(self, step: Step, batch: ScheduledBatch | None) -> AttentionBackend:
        if self._kernels is not None and self.cache.stamps is None:
            self._kernels.begin(step, batch)
            return self._kernels
        assert batch is not None
        if step.assumed is not None and step.decode is not None:
            starts, decodes = batch.starts.copy(), batch.decodes(self._packer.most_rows)
            firsts = (np.cumsum(batch.lengths) - batch.lengths)[:decodes]
            starts[:decodes] = step.positions.cpu().numpy()[firsts]
            batch = replace(batch, starts=starts)
        if self._kernels is not None:
            self._kernels.begin(step, batch)
            return self._kernels
        kept = 1 if step.narrowed is None else int(batch.kept.max())
        attention = ExactAttention if self.model.operations.exact else PagedAttention
        return attention(
            batch,
            partial(page_groups, cache=self.cache, tables=self.tables, kept=kept),
            cache=self.cache,
            architecture=self.model.architecture,
            derive_keys=self._derive_keys,
        )

    def _derive_keys(self, layer: int, values: Tensor, positions: Tensor) -> Tensor:
        """K = rope(k_norm.weight * V), in float32 up to the last rounding; values [B, heads, K, D], positions [K].

        Rows hold the unrotated columns first, then both halves of the rotated pairs.
        """
        pairs, width = self.model.architecture.global_rotary_pairs, values.shape[-1]
        scaled = values.float() * self.model.stored_k_norm_weight(layer)
        cos, sin = self.model.rope.cos_sin(LayerKind.GLOBAL, positions)
        turned = scaled[..., width - 2 * pairs :].flatten(0, 1).transpose(0, 1)  # [K, B * heads, 2 P]
        rotated = rotate(turned, cos[:, :pairs], sin[:, :pairs]).transpose(0, 1)
        scaled[..., width - 2 * pairs :] = rotated.reshape(*values.shape[:-1], 2 * pairs)
        return scaled.to(values.dtype)


def _sampled_rows(step: Step) -> Tensor | slice:
    """Where the rows that are sampled stand among those that a step ends with."""
    assert step.sampled_slots is not None
    return slice(len(step.sampled_slots)) if step.sampled_rows is None else step.sampled_rows
