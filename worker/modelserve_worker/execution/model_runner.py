"""One rank's model runner: packs a step, runs the model through the paged cache, samples, copies the tokens back.

On a GPU nothing here waits for the device. One buffer carries all metadata of a step; tokens stay on the device in a
buffer of one entry per slot, where the next step reads those still in flight; results are copied to pinned memory
behind an event that only `PendingStep.result` waits for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelserve.architecture import LayerKind, ModelArchitecture
from modelserve.errors import InvalidInput
from modelserve_worker.batch import IN_FLIGHT, PendingStep, SampledTokens, ScheduledBatch
from modelserve_worker.execution.input_batch import InputBatch, pack, staging_words
from modelserve_worker.execution.kv_cache import KVCache
from modelserve_worker.execution.paged_attention import PagedAttention
from modelserve_worker.execution.sampler import Sampler, SamplerOutput
from modelserve_worker.execution.sampling_batch import SamplingBatch, slot_histories
from modelserve_worker.execution.staging import StagingBuffer
from modelserve_worker.layers.rotary import rotate
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.request import SampledToken, TokenLogprobs


class NonFiniteLogitsError(RuntimeError):
    """The model produced NaN logits for a request; the text names it."""


class GPUModelRunner:
    """Runs scheduled steps of one rank on its device, a GPU or the CPU, in the order of `execute` calls.

    `max_model_len` sizes the metadata buffer only; what fits in the pool is the scheduler's affair.
    """

    def __init__(
        self,
        model: Gemma4ForCausalLM,
        cache: KVCache,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        device = cache.arena.device
        self.model = model
        self.cache = cache
        self._architecture: ModelArchitecture = model.architecture
        self._staging = StagingBuffer(
            staging_words(
                cache.geometry,
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
            ),
            device,
        )
        self._sampler = Sampler(max_num_seqs=max_num_seqs, vocab_size=self._architecture.vocab_size, device=device)
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def execute(self, batch: ScheduledBatch) -> PendingStep:
        """Launch one step. An error of the launch is raised by the returned step's `result`, not here."""
        try:
            return self._launch(batch)
        except InvalidInput as error:  # from packing, which is the same on every rank
            return FailedStep(error, before_collectives=True)
        except Exception as error:
            return FailedStep(error)

    @torch.inference_mode()
    def forward_hidden(self, batch: ScheduledBatch) -> tuple[InputBatch, Tensor]:
        """Run the model over one step and write its rows: the packed step and hidden states [T, H]."""
        packed = pack(
            batch,
            self.cache,
            self._staging,
            vocab_size=self._architecture.vocab_size,
            eos_token_ids=self._architecture.eos_token_ids,
        )
        self.cache.move(batch.page_moves)
        tokens = torch.where(packed.token_ids == IN_FLIGHT, self._last_tokens[packed.token_slots], packed.token_ids)
        attention = PagedAttention(
            packed, cache=self.cache, architecture=self._architecture, derive_keys=self._derive_keys
        )
        return packed, self.model(tokens, packed.positions, attention)

    @torch.inference_mode()
    def teacher_forced_logits(self, batch: ScheduledBatch) -> Tensor:
        """Run one step without sampling and return the logits of every token, float32 [T, vocab]."""
        return self.model.compute_logits(self.forward_hidden(batch)[1])

    @torch.inference_mode()
    def profile(self, batch: ScheduledBatch, *, rows: int) -> None:
        """Run a step for its memory: all of `batch` through the model, then logits and sampling of `rows` rows.

        Every row samples like the batch's one request; the state of all slots is reset afterwards.
        """
        packed, hidden = self.forward_hidden(batch)
        assert packed.sampling is not None, "a profile step samples"
        every = packed.sampling.repeated(rows)
        self._sampler.sample(self.model.compute_logits(hidden[every.token_rows]), every)
        self._sampler.reset()

    def shutdown(self) -> None:
        """Nothing to end: the device's memory is freed with the runner."""

    @torch.inference_mode()
    def _launch(self, batch: ScheduledBatch) -> PendingStep:
        packed, hidden = self.forward_hidden(batch)
        for history in slot_histories(batch):
            self._sampler.rebuild(history)
        sampling = packed.sampling
        if sampling is None:
            return LaunchedStep(batch.step, None, None)
        sampled = self._sampler.sample(self.model.compute_logits(hidden[sampling.token_rows]), sampling)
        self._last_tokens[sampling.slots] = sampled.tokens.clamp(min=0)
        return LaunchedStep(batch.step, sampling, sampled)

    def _derive_keys(self, layer: int, values: Tensor, positions: Tensor) -> Tensor:
        """K = rope(k_norm.weight * V), in float32 up to the last rounding; values [B, heads, K, D], positions [K]."""
        batch, heads, count, width = values.shape
        scaled = values.float() * self.model.k_norm_weight(layer).float()
        cos, sin = self.model.rope.cos_sin(LayerKind.GLOBAL, positions)
        keys = rotate(scaled.permute(2, 0, 1, 3).reshape(count, batch * heads, width), cos, sin)
        return keys.view(count, batch, heads, width).permute(1, 2, 0, 3).to(values.dtype)


class FailedStep:
    """A step that could not be launched. `before_collectives`: every rank of the group failed it in the same way."""

    def __init__(self, error: Exception, *, before_collectives: bool = False) -> None:
        self._error = error
        self.before_collectives = before_collectives

    def done(self) -> bool:
        return True

    def result(self) -> SampledTokens:
        raise self._error


class LaunchedStep:
    """A step on its way; its tokens arrive in pinned memory when the event has passed."""

    def __init__(self, step: int, sampling: SamplingBatch | None, sampled: SamplerOutput | None) -> None:
        self._step = step
        self._request_ids: tuple[str, ...] = ()
        self._wanted: tuple[int | None, ...] = ()
        self._logprobs: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self._event: torch.cuda.Event | None = None
        if sampling is None or sampled is None:
            return
        self._request_ids, self._wanted = sampling.request_ids, sampling.logprobs
        self._tokens = _to_host(sampled.tokens)
        if sampled.logprobs is not None:
            reported = sampled.logprobs
            self._logprobs = (
                _to_host(reported.chosen),
                _to_host(reported.rank),
                _to_host(reported.top_tokens),
                _to_host(reported.top_logprobs),
            )
        if sampled.tokens.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def done(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def result(self) -> SampledTokens:
        """Wait for the device. Raises NonFiniteLogitsError, or what the device failed with."""
        if self._event is not None:
            self._event.synchronize()
        if not self._request_ids:
            return SampledTokens(self._step, {})
        tokens: list[int] = self._tokens.tolist()
        for request_id, token in zip(self._request_ids, tokens, strict=True):
            if token < 0:
                raise NonFiniteLogitsError(f"step {self._step}: the logits of request {request_id} are not numbers")
        reported = [self._reported(row) for row in range(len(tokens))]
        return SampledTokens(
            self._step,
            {
                request_id: SampledToken(token, logprobs)
                for request_id, token, logprobs in zip(self._request_ids, tokens, reported, strict=True)
            },
        )

    def _reported(self, row: int) -> TokenLogprobs | None:
        wanted = self._wanted[row]
        if wanted is None or self._logprobs is None:
            return None
        chosen, rank, top_tokens, top_logprobs = self._logprobs
        top = zip(top_tokens[row, :wanted].tolist(), top_logprobs[row, :wanted].tolist(), strict=True)
        return TokenLogprobs(float(chosen[row]), int(rank[row]), tuple(top))


def _to_host(values: Tensor) -> Tensor:
    """Start the copy to pinned memory; on the CPU the tensor itself."""
    if not values.is_cuda:
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
