"""A request on its way through the engine: what was asked, what was produced, why it ended. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from modelserve.sizing.pages import KVCacheDtype
from modelserve_worker.embedded_spans import EmbeddedSpan

GRAMMAR_FIELD = "grammar"  # in errors: the engine does not know which of its client's fields asked for it
_ROWS_AT_ONCE = 256


class FinishReason(StrEnum):
    """Why a request ended. STOP and LENGTH are OpenAI's words; ABORT means nobody waits for it any more."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. Validated by the server's protocol models; ranges are OpenAI's and vLLM's.

    temperature 0 is greedy. top_k 0 is off; top_p 1.0 and min_p 0.0 are off; repetition_penalty 1.0 is off.
    `seed` is always set (drawn by the server when the client gave none): random numbers are keyed by (seed, position),
    so a preempted and recomputed request draws with the same ones, from logits that are equal within rounding.
    `logprobs`: number of top alternatives to report per token; None reports nothing; 0 reports the chosen token only.
    `stop_token_ids` end the request like EOS does; EOS ids come from the model unless ignore_eos.
    Stop *strings* are the detokenizer's business and are not here.
    `prompt_logprobs` is for the prompt's tokens what `logprobs` is for the answer's.
    """

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of one sampled position, before temperature and penalties."""

    logprob: float
    rank: int  # 1 = the most likely token
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Natural-log probabilities of N consecutive prompt tokens, each given all tokens before it; the first has none.

    Columns, since a prompt is long: pickling them costs nothing per token.
    """

    logprobs: NDArray[np.float32]  # [N]
    ranks: NDArray[np.int32]  # [N], 1 = the most likely token
    top_tokens: NDArray[np.int32]  # [N, k], most likely first
    top_logprobs: NDArray[np.float32]  # [N, k]

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def nbytes(self) -> int:
        """Bytes of the columns."""
        return sum(each.nbytes for each in (self.logprobs, self.ranks, self.top_tokens, self.top_logprobs))

    def __getitem__(self, rows: slice) -> PromptLogprobs:
        return PromptLogprobs(self.logprobs[rows], self.ranks[rows], self.top_tokens[rows], self.top_logprobs[rows])

    def rows(self) -> Iterator[TokenLogprobs]:
        """An object per token, a few at a time: all of a long prompt's would be hundreds of megabytes."""
        for begin in range(0, len(self), _ROWS_AT_ONCE):
            part = self[begin : begin + _ROWS_AT_ONCE]
            columns = (part.logprobs, part.ranks, part.top_tokens, part.top_logprobs)
            for logprob, rank, tokens, logprobs in zip(*(column.tolist() for column in columns), strict=True):
                yield TokenLogprobs(logprob, rank, tuple(zip(tokens, logprobs, strict=True)))

    @classmethod
    def joined(cls, parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
        names = ("logprobs", "ranks", "top_tokens", "top_logprobs")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


class TokenConstraint(Protocol):
    """Which tokens may follow in one answer. `consume` hears each sampled token, in order, but the one that ended it.

    `propose` goes on as if a token were sampled and says whether it may follow; `roll_back` takes back as many.
    `complete`: the answer is whole and nothing may follow. `error`: it cannot go on, and why; an InvalidInput where
    that is the client's doing. `dear`: its masks take so long that nobody else is to wait for them, so its next token
    is scheduled when it is `ready`, and never ahead of the one before.
    """

    @property
    def complete(self) -> bool: ...

    @property
    def error(self) -> Exception | None: ...

    @property
    def dear(self) -> bool: ...

    def ready(self) -> bool:
        """Whether the next mask is there. A dear one begins to be computed where this is first asked, so it is asked
        when no token of the answer is in flight."""
        ...

    def consume(self, token_id: int) -> None: ...

    def propose(self, token_id: int) -> bool: ...

    def roll_back(self, count: int) -> None: ...

    def mask(self, row: NDArray[np.int32]) -> None:
        """Write the tokens that may be sampled, int32 [ceil(vocab / 32)], bit i of word w: token 32 w + i."""
        ...


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Tokens that the thoughts of an answer may have. `begun`: the prompt has begun one.

    A thought begins with the token `opens` and ends with one of `closes`, the first of which is sampled at its end.
    """

    tokens: int
    opens: int
    closes: tuple[int, ...]
    begun: bool


@dataclass(frozen=True, slots=True)
class CacheTrial:
    """A request that measures a cache, alone on an idle engine: in steps of at most `slice_tokens` rows, behind each of
    which whoever has come is served. `rounded_to`: its rows are kept as a cache of that dtype decodes them. It leaves
    nothing to others, and its times are nobody's."""

    slice_tokens: int
    rounded_to: KVCacheDtype | None = None


@dataclass(slots=True)
class Request:
    """One sequence (n > 1 is n requests). Written by the engine alone once it has been added.

    The server's prompts are `array("i")`, from a body's check to the step's buffer: 4 bytes a token, pickled, cut and
    checked without a loop over tokens.
    `grammar` (as `modelserve_worker.grammar` writes it) is what the answer must match; of it and of `thinking_budget`
    the engine makes the `constraint`, which goes with the request through preemptions.
    Rows are shared by requests of one `tenant` and `cache_salt`, and count as bytes of `client` in a prefix cache. At
    `checkpoints`, positions of the prompt, later requests will begin to differ. `predicted_token_ids` are what its
    client expects the answer to be, or else what others went on with, which changes none of its tokens. `spans` are the
    prompt's rows that begin from embeddings. `adapter` is the digest of a LoRA adapter; empty: the model's own weights.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    arrival_s: float = field(default_factory=time.monotonic)
    grammar: str | None = None
    thinking_budget: ThinkingBudget | None = None
    cache_salt: str = ""
    tenant: str = ""
    client: str = ""
    checkpoints: tuple[int, ...] = ()
    predicted_token_ids: Sequence[int] = ()
    spans: tuple[EmbeddedSpan, ...] = ()
    adapter: str = ""
    trial: CacheTrial | None = None
    output_token_ids: list[int] = field(default_factory=list)
    admitted: bool = False  # it has been in a slot, which a preemption may have taken
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)  # computed so far, without gaps
    constraint: TokenConstraint | None = None
    cached_tokens: int = 0  # of its prompt, which it found computed when it was first admitted
    host_cached_tokens: int = 0  # of these, those that came from host memory

    @property
    def cache_namespace(self) -> str:
        """Requests of one namespace read each other's rows. An engine has one model, dtype and layout."""
        return f"{self.adapter}\0{self.tenant}\0{self.cache_salt}"

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and sampled; a token still in flight on the device is not counted."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


class AdapterStrength(NamedTuple):
    """How large an adapter's term is beside the product that it is added to: the ratio of their norms over some rows,
    None: nothing is known. `silent`: which of the stacked matrices have a term of zeros."""

    linear: str
    layer: int | None
    ratio: float | None
    silent: tuple[int, ...] = ()


class RequestOutput(NamedTuple):
    """What one engine step produced for one request. `finish_reason` set: nothing follows.

    `logprobs` is as long as `token_ids` where the request asked for log probabilities, else empty.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the EOS or stop id that ended it; it is the last of `token_ids`
    error: str | None = None
    error_field: str | None = None  # of the request, or GRAMMAR_FIELD, where the error is its client's doing
    logprobs: tuple[TokenLogprobs, ...] = ()
    admitted_s: float | None = None  # with its first output: when it left the queue, in time.monotonic() of this host
    cached_tokens: int = 0  # with its first output: of its prompt, those that were not computed
    prompt_logprobs: PromptLogprobs | None = None  # with the first token, of all prompt tokens but the first
    drafts: int = 0  # that the step verified: of `token_ids` all but the last were among them
