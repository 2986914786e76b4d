"""Speed in `status` of a ModelServe: expected, term by term, and expected beside measured."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from modelserve.api.schema_types import ApiModel, Bytes, Count, DecimalString, SignedDecimalString, Tokens
from modelserve.measured_speed import StepKind

TokenCount = Annotated[int, Field(ge=0, le=1 << 24, json_schema_extra={"format": "int32"})]


class TimeTerms(ApiModel):
    """Where the time goes, in milliseconds; terms that round to nothing are left out."""

    weights: DecimalString | None = Field(default=None, description="Reading the weights.")
    linears: DecimalString | None = Field(
        default=None, description="Matrix products, as far as they do not hide behind reading the weights."
    )
    cache: DecimalString | None = Field(default=None, description="Reading the cache of the requests that decode.")
    attention: DecimalString | None = Field(default=None, description="Attention of the prompt's rows.")
    elementwise: DecimalString | None = Field(default=None, description="Norms, activations and the like.")
    launches: DecimalString | None = Field(default=None, description="Starting kernels, and the gaps between them.")
    all_reduces: DecimalString | None = Field(default=None, description="Sums over the GPUs of the replica.")
    prompts: DecimalString | None = Field(
        default=None, description="Rows of other requests' prompts that share the steps of a token."
    )
    drafts: DecimalString | None = Field(default=None, description="Proposing tokens that the model verifies.")


class ExpectedDrafts(ApiModel):
    """What drafts are expected to bring: the speed beside it has them, this one has what it would be without."""

    acceptance: DecimalString = Field(
        description="Chance of the first draft of a step to be right; later ones where those before them are."
    )
    source: Literal["Given", "Measured", "Assumed"] = Field(
        description="Given in workload.draftAcceptance, Measured by workers of this model, or Assumed."
    )
    drafter: str | None = Field(
        default=None, max_length=512, description="Which of two drafters these requests are drafted by."
    )
    per_request: TokenCount = Field(description="Drafts that a step verifies of each request.")
    tokens_per_step: DecimalString = Field(description="Tokens that a step brings of each request.")
    time_per_output_token_ms: DecimalString = Field(description="timePerOutputTokenMs without drafts.")
    output_tokens_per_second: DecimalString = Field(description="outputTokensPerSecond without drafts.")


class ExpectedSpeed(ApiModel):
    """What the speed model expects under spec.workload; docs/sizing.md has its formulas and how true they were."""

    concurrency: Tokens = Field(description="Requests that are open at a time, as many as one replica holds.")
    time_to_first_token_ms: DecimalString = Field(description="Prefill of one prompt with nothing else running.")
    time_per_output_token_ms: DecimalString = Field(
        description="Mean time between tokens of an answer, with the prompts of the other requests in between."
    )
    output_tokens_per_second: DecimalString = Field(description="Of one replica, prefill of the prompts included.")
    first_token: TimeTerms | None = Field(
        default=None, description="Terms of timeToFirstTokenMs; of the chosen candidate."
    )
    drafts: ExpectedDrafts | None = Field(
        default=None, description="Where drafts are planned and it is known how often they are right."
    )
    output_token: TimeTerms | None = Field(
        default=None, description="Terms of timePerOutputTokenMs; of the chosen candidate."
    )


class ExpectedReuse(ApiModel):
    """What the prefix cache is expected to find of spec.workload's sessions; docs/sizing.md has the formulas."""

    gpu_percent: DecimalString = Field(description="Of all prompt tokens, those whose rows the pool still has.")
    host_percent: DecimalString = Field(description="Those that are copied back from kvCache.hostMemory.")
    computed_percent: DecimalString = Field(description="Those that are computed.")
    session_bytes: Bytes = Field(description="Of each GPU, what a session that waits for its user keeps, on average.")
    sessions_on_gpu: DecimalString = Field(
        description="Such sessions that the pool has room for beside workload.concurrency requests in progress."
    )
    sessions_in_host: DecimalString = Field(description="Such sessions that kvCache.hostMemory has room for.")
    next_turn_ms: DecimalString | None = Field(
        default=None, description="To the first token of a turn in the middle of a session, found on the GPU."
    )
    next_turn_from_host_ms: DecimalString | None = Field(
        default=None, description="The same where its rows come from host memory, where there is any."
    )
    next_turn_computed_ms: DecimalString | None = Field(default=None, description="The same where nothing is found.")


class CalibrationSpeed(ApiModel):
    """Recent steps of one kind, on all ready workers: expected beside measured time."""

    kind: StepKind = Field(description="Decode, Prefill (prompts alone) or Mixed (both).")
    steps: Count = Field(description="Steps that were measured.")
    requests: DecimalString | None = Field(default=None, description="Requests decoded in a step, on average.")
    context_tokens: TokenCount | None = Field(default=None, description="Tokens in the cache of each, on average.")
    prompt_tokens: TokenCount | None = Field(default=None, description="Tokens of prompts in a step, on average.")
    predicted_ms: DecimalString = Field(description="What the formulas expect of just these steps, on average.")
    measured_ms: DecimalString = Field(description="What they took, on average.")
    error_percent: SignedDecimalString = Field(description="(measured - predicted) / predicted, in percent.")
