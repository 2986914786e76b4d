"""Prometheus metrics under vLLM's names, which dashboards, autoscalers and endpoint pickers read; pages per kind."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from modelserve.measured_speed import STEP_KINDS
from modelserve_worker.request import FinishReason
from modelserve_worker.scheduling.stats import EngineStats, StepEvents

_FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_STEP_SECONDS = (0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 10, 60)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_TOKEN_COUNTS = tuple(1 << power for power in range(19))


class WorkerMetrics:
    """One registry per server; request latencies are observed by the server, the rest is read from the engine."""

    def __init__(self, model_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self.first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_SECONDS
        )
        self.inter_token = _InterTokenLatency(model_name)
        self.registry.register(self.inter_token)
        self.time_per_output_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first.", _TOKEN_SECONDS
        )
        self.queue_time = self._histogram(
            "vllm:request_queue_time_seconds", "From arrival to a place in the batch.", _REQUEST_SECONDS
        )
        self.prefill_time = self._histogram(
            "vllm:request_prefill_time_seconds", "From a place in the batch to the first token.", _REQUEST_SECONDS
        )
        self.decode_time = self._histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last.", _REQUEST_SECONDS
        )
        self.inference_time = self._histogram(
            "vllm:request_inference_time_seconds", "From a place in the batch to the last token.", _REQUEST_SECONDS
        )
        self._step_tokens = self._histogram("vllm:iteration_tokens_total", "Tokens of an engine step.", _STEP_TOKENS)
        step_seconds = Histogram(
            "modelserve_step_seconds",
            "Time that the device had a step, by what was in it.",
            ["model_name", "kind"],
            buckets=_STEP_SECONDS,
            registry=self.registry,
        )
        self._step_seconds = {kind: step_seconds.labels(model_name, kind.lower()) for kind in STEP_KINDS}
        self.request_latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_SECONDS
        )
        self.prompt_lengths = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKEN_COUNTS)
        self.answer_lengths = self._histogram("vllm:request_generation_tokens", "Tokens of an answer.", _TOKEN_COUNTS)
        self._success = Counter(
            "vllm:request_success",
            "Finished requests, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._http = Counter(
            "http_requests", "Answered HTTP requests.", ["method", "handler", "status"], registry=self.registry
        )
        self._loops = Counter(
            "modelserve_looping_answers",
            "Answers that repeated themselves until their length, or until repetition_detection ended them.",
            ["model_name", "ended_by"],
            registry=self.registry,
        )
        for ended_by in ("length", "repetition_detection"):
            self._loops.labels(model_name, ended_by)
        for reason in FinishReason:
            self._success.labels(model_name, reason.value)  # every series exists from the start

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry)
        return histogram.labels(self._model_name)

    def observe_engine(self, stats: Callable[[], EngineStats], *, cache_config: Mapping[str, str]) -> None:
        """Report the engine from now on. `cache_config` becomes the labels of vllm:cache_config_info."""
        self.registry.register(_EngineCollector(stats, self._model_name, cache_config))

    def observe_steps(self, events: StepEvents) -> None:
        """Steps were scheduled, and steps ended."""
        for tokens in events.step_tokens:
            self._step_tokens.observe(tokens)
        for step in events.timed_steps:
            self._step_seconds[step.kind].observe(step.seconds)

    def count_http(self, method: str, route: str, status: int) -> None:
        """One answered HTTP request; `route` is one of the application's, so that labels are bounded."""
        self._http.labels(method, route, str(status)).inc()

    def start_request(self, prompt_tokens: int, *, arrival_s: float) -> RequestTimer:
        """Time one sequence that arrived at `arrival_s` of time.monotonic()."""
        return RequestTimer(self, prompt_tokens, arrival_s=arrival_s)

    def count_loop(self, *, stopped: bool) -> None:
        """An answer ended in a loop; `stopped`: because of it."""
        self._loops.labels(self._model_name, "repetition_detection" if stopped else "length").inc()

    def count_finished(self, reason: FinishReason) -> None:
        self._success.labels(self._model_name, reason.value).inc()


class RequestTimer:
    """Latencies of one sequence. One that was aborted or failed counts by its reason only."""

    def __init__(self, metrics: WorkerMetrics, prompt_tokens: int, *, arrival_s: float) -> None:
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._arrival_s = arrival_s
        self._first_s = self._last_s = arrival_s
        self._admitted_s: float | None = None
        self._num_tokens = 0

    def tokens(self, count: int) -> None:
        """`count` tokens came now, in one step."""
        if not count:
            return
        now = self._metrics.clock()
        if self._num_tokens:
            self._metrics.inter_token.observe((now - self._last_s) / count, count)
        else:
            self._metrics.first_token.observe(now - self._arrival_s)
            self._first_s = now
        self._last_s = now
        self._num_tokens += count

    def admitted(self, at_s: float) -> None:
        """The request got a place in the batch at `at_s` of time.monotonic()."""
        self._admitted_s = max(at_s, self._arrival_s)

    def finish(self, reason: FinishReason) -> None:
        self._metrics.count_finished(reason)
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        if self._admitted_s is not None:
            self._metrics.queue_time.observe(self._admitted_s - self._arrival_s)
            self._metrics.prefill_time.observe(max(0.0, self._first_s - self._admitted_s))
            self._metrics.decode_time.observe(self._last_s - self._first_s)
            self._metrics.inference_time.observe(max(0.0, self._last_s - self._admitted_s))
        self._metrics.request_latency.observe(self._last_s - self._arrival_s)
        self._metrics.prompt_lengths.observe(self._prompt_tokens)
        self._metrics.answer_lengths.observe(self._num_tokens)
        if self._num_tokens > 1:
            mean = (self._last_s - self._first_s) / (self._num_tokens - 1)
            self._metrics.time_per_output_token.observe(mean)


class _InterTokenLatency(Collector):
    """A histogram that takes all tokens of an event at once. For one thread: prometheus_client's own has locks, which
    cost a token more than counting it does.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._counts = [0] * (len(_TOKEN_SECONDS) + 1)  # by the least bucket that holds them, the last one unbounded
        self._sum_s = 0.0
        self._created_s = time.time()

    def observe(self, seconds: float, count: int) -> None:
        """`count` tokens came, each `seconds` after the one before."""
        self._counts[bisect_left(_TOKEN_SECONDS, seconds)] += count
        self._sum_s += seconds * count

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "Between two tokens of one answer.", labels=["model_name"]
        )
        bounds = [*map(floatToGoString, _TOKEN_SECONDS), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric([self._model_name], buckets, self._sum_s)
        family.add_sample(f"{family.name}_created", {"model_name": self._model_name}, self._created_s)
        yield family


class _EngineCollector(Collector):
    """Reads one consistent snapshot of the engine per scrape."""

    def __init__(self, stats: Callable[[], EngineStats], model_name: str, cache_config: Mapping[str, str]) -> None:
        self._stats = stats
        self._model_name = model_name
        self._cache_config = dict(cache_config)

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        host = stats.tier("host")
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in the running batch.", stats.num_running),
            ("vllm:num_requests_waiting", "Requests waiting to be admitted.", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "Held bytes of the KV pool, 1.0 is all.", stats.kv_cache_usage),
            ("modelserve_kv_pool_bytes", "Bytes of the KV pool of one GPU.", stats.pool_bytes),
            ("modelserve_kv_held_bytes", "Bytes of the KV pool in use.", stats.held_bytes),
            ("modelserve_kv_cached_bytes", "Free bytes of the KV pool that hold prefixes.", stats.cached_bytes),
            (
                "modelserve_host_cache_capacity_bytes",
                "Host memory of one GPU that is pinned for prefixes.",
                host.capacity_bytes,
            ),
            ("modelserve_host_cache_used_bytes", "Bytes of it that hold prefixes.", host.used_bytes),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        off = GaugeMetricFamily(
            "modelserve_host_cache_off", "1: an error has ended the copies in this direction.",
            labels=["model_name", "direction"],
        )  # fmt: skip
        for direction, value in (("stores", host.stores_off), ("loads", host.loads_off)):
            off.add_metric([self._model_name, direction], value)
        yield off
        yield self._pages("modelserve_pages_used", "Pages in use.", stats.global_pages_used, stats.sliding_pages_used)
        yield self._pages(
            "modelserve_pages_total",
            "Pages in use, and those the free bytes would make if this kind took them all.",
            stats.global_pages_total,
            stats.sliding_pages_total,
        )
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens, those that were cached included.", stats.prompt_tokens_total),
            ("vllm:prompt_tokens_cached", "Prompt tokens that were cached.", stats.prompt_tokens_cached_total),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries_total),
            ("vllm:prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits_total),
            (
                "vllm:external_prefix_cache_queries",
                "Prompt tokens that the pool did not have, looked up in host memory.",
                host.queries_total,
            ),
            ("vllm:external_prefix_cache_hits", "Prompt tokens found in host memory.", host.hits_total),
            ("modelserve_host_stored_bytes", "Bytes copied to host memory.", host.stored_bytes_total),
            ("modelserve_host_restored_bytes", "Bytes copied from host memory.", host.restored_bytes_total),
            ("modelserve_host_evictions", "Resume points that host memory gave up.", host.evictions_total),
            ("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens_total),
            ("vllm:num_preemptions", "Requests preempted for lack of pages.", stats.preemptions_total),
            ("modelserve_page_moves", "Pages moved inside the pool.", stats.page_moves_total),
            ("modelserve_page_copies", "Pages copied before they were written.", stats.page_copies_total),
            ("modelserve_prefix_evictions", "Resume points given up for memory.", stats.prefix_evictions_total),
            ("modelserve_failed_steps", "Engine steps that raised.", stats.failed_steps_total),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter
        if stats.accepted_per_position:
            yield from self._drafts(stats)
        cached, from_host = stats.prompt_tokens_cached_total, stats.prompt_tokens_host_total
        sources = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Prompt tokens, by where they came from.", labels=["model_name", "source"]
        )
        sources.add_metric([self._model_name, "local_compute"], stats.prompt_tokens_total - cached)
        sources.add_metric([self._model_name, "local_cache_hit"], cached - from_host)
        sources.add_metric([self._model_name, "external_kv_transfer"], from_host)
        yield sources
        info = InfoMetricFamily("vllm:cache_config", "Configuration of the KV cache.")
        info.add_metric([], {"model_name": self._model_name, **self._cache_config})
        yield info

    def _drafts(self, stats: EngineStats) -> Iterator[Metric]:
        accepted = stats.accepted_per_position
        for name, text, value in (
            ("vllm:spec_decode_num_drafts", "Proposals that were verified.", stats.drafts_total),
            ("vllm:spec_decode_num_draft_tokens", "Tokens of these.", stats.draft_tokens_total),
            ("vllm:spec_decode_num_accepted_tokens", "Accepted ones.", sum(accepted)),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter
        by_place = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted ones, by place in their proposal, from 0.",
            labels=["model_name", "position"],
        )  # fmt: skip
        for position, count in enumerate(accepted):
            by_place.add_metric([self._model_name, str(position)], count)
        yield by_place
        low = GaugeMetricFamily(
            "modelserve_low_draft_acceptance", "1: under 5 % of draft tokens were accepted for minutes.",
            labels=["model_name"],
        )  # fmt: skip
        low.add_metric([self._model_name], stats.low_acceptance)
        yield low

    def _pages(self, name: str, text: str, global_pages: int, sliding_pages: int) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=["model_name", "kind"])
        gauge.add_metric([self._model_name, "global"], global_pages)
        gauge.add_metric([self._model_name, "sliding"], sliding_pages)
        return gauge
