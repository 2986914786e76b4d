"""How long steps with drafts take, and what they bring: one arithmetic for the worker's choice of k and for plans.

    verifying    the step of decodes with as many rows as it verifies, whose cache is read once for each request, and
                 layers x (drafted_layer_seconds + rows x drafted_row_seconds)
    proposing    k (A / (bandwidth x weight_read) + R (c + 3 g) / (bandwidth x cache_read) + kernels x launch_seconds)
    tokens       R (1 + p_1 + p_1 p_2 + ...) of as many drafts of each request as bring most tokens a second

A bytes of the assistant's weights that a draft reads (of a head with centroids these alone), R requests, c bytes of the
target's caches that its layers read, g bytes of head rows that a row's nearest centroids are (gathered, then read), p_j
the chance of draft j to be right where those before it are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from modelserve.architecture import LayerKind
from modelserve.hardware import Accelerator
from modelserve.planning.engine_rates import engine_rates
from modelserve.planning.step_time import RankSpeed, StepTime
from modelserve.sizing.assistant import assistant_weight_bytes, kernels_per_proposal
from modelserve.sizing.cuda_graphs import decode_graph_rows
from modelserve.sizing.pages import CacheGeometry
from modelserve.sizing.speculation import Speculation
from modelserve.sizing.weights import element_bytes

MOVES_OF_GATHERED_ROWS = 3  # read where they lie, written, and read by the product


def verifying(speed: RankSpeed, *, rows: float, decodes: float, context: float) -> StepTime:
    """A step of so many requests at a mean length of `context` tokens, with `rows` rows of them."""
    one_each = speed.step(decodes=decodes, context=context)
    if rows <= decodes:
        return one_each
    step = speed.step(decodes=rows)
    return step._replace(cache=one_each.cache, attention=speed.drafted_attention_seconds(rows))


def captured_rows(max_num_seqs: int, speculation: Speculation, *, drafted: bool) -> tuple[int, ...]:
    """Rows of the captured steps without chunks that a step takes, rising: with drafts, and of one row a request."""
    wanted = speculation.rows if drafted else 1
    return tuple(sorted(rows for rows, most in decode_graph_rows(max_num_seqs, speculation) if most == wanted))


@dataclass(frozen=True)
class DraftedStep:
    """`time` with the term `drafts`; `tokens` come of each request, `drafts` of each are verified."""

    time: StepTime
    tokens: float
    drafts: int


class DraftedSteps:
    """Expected steps of one rank whose requests' drafts are all as likely to be right."""

    def __init__(
        self,
        speed: RankSpeed,
        device: Accelerator,
        geometry: CacheGeometry,
        *,
        max_num_seqs: int,
        tensor_parallel: int,
        speculation: Speculation,
        chances: Sequence[float],
        fixed: bool,
    ) -> None:
        """`chances` by place; `fixed`: all that is proposed is verified."""
        self._speed, self._speculation = speed, speculation
        self._counts = (speculation.num_tokens,) if fixed else range(speculation.num_tokens + 1)
        self._tokens = tuple(accumulate(_products(chances), initial=1.0))
        self._drafted = captured_rows(max_num_seqs, speculation, drafted=True)
        self._proposal = _Proposal.of(speed, device, geometry, tensor_parallel, speculation)

    def step(self, decodes: float, *, context: float) -> DraftedStep:
        """The one with most tokens a second, as workers choose it: proposals are made whether or not any is verified,
        so their time comes on top."""
        found = max((self._verifying(drafts, decodes, context) for drafts in self._counts), key=_rate)
        proposing = self._proposal.seconds(decodes, context=context)
        return replace(found, time=found.time._replace(drafts=proposing))

    def _verifying(self, drafts: int, decodes: float, context: float) -> DraftedStep:
        rows = decodes * (1.0 + drafts)
        if drafts:
            rows = next((size for size in self._drafted if size >= rows), rows)
        time = verifying(self._speed, rows=rows, decodes=decodes, context=context)
        return DraftedStep(time, self._tokens[drafts], drafts)


def _rate(step: DraftedStep) -> float:
    return step.tokens / step.time.seconds


def _products(chances: Sequence[float]) -> Iterator[float]:
    """Of each place to be right with all before it."""
    product = 1.0
    for chance in chances:
        product *= chance
        yield product


@dataclass(frozen=True)
class _Proposal:
    """Seconds of a proposal: what it takes whoever asks, of each request, and of each request's cached token."""

    constant: float
    request: float
    token: float
    window_token: float
    window: int

    @classmethod
    def of(
        cls, speed: RankSpeed, device: Accelerator, geometry: CacheGeometry, ranks: int, speculation: Speculation
    ) -> _Proposal:
        assistant, k = speculation.assistant, speculation.num_tokens
        if assistant is None:  # three short launches, whatever they find
            return cls(3 * engine_rates(device.compute_capability).launch_seconds, 0.0, 0.0, 0.0, 0)
        rates, size = engine_rates(device.compute_capability), element_bytes(assistant)
        weights, gathered = assistant_weight_bytes(assistant, tensor_parallel_size=ranks), 0
        if assistant.num_centroids:
            weights -= assistant.vocab_size * (assistant.hidden_size * size + 4)
            gathered = MOVES_OF_GATHERED_ROWS * assistant.centroid_tokens * assistant.hidden_size * size
        layers = {
            kind: sum(assistant.kind(layer) is kind for layer in range(assistant.num_hidden_layers))
            for kind in LayerKind
        }
        read = device.bandwidth * rates.cache_read
        of_token = {
            kind: k * count * geometry.page(kind).layer_bytes / geometry.page(kind).page_tokens / read
            for kind, count in layers.items()
        }
        kernels = kernels_per_proposal(assistant, rows=1, num_tokens=k)
        return cls(
            k * weights / (device.bandwidth * rates.weight_read) + kernels * rates.launch_seconds,
            k * gathered / read,
            of_token[LayerKind.GLOBAL],
            of_token[LayerKind.SLIDING],
            speed.window,
        )

    def seconds(self, requests: float, *, context: float) -> float:
        """Of all drafts of so many requests at a mean length of `context` tokens."""
        of_request = self.request + context * self.token + min(context, self.window) * self.window_token
        return self.constant + requests * of_request
