"""Metrics of adapters: vLLM's, by which pickers send requests to where an adapter is in use, and our own."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from modelserve_worker.server.adapters.service import AdapterService
from modelserve_worker.server.adapters.versions import AdapterState

_LABELS = ["model_name", "adapter", "version"]


class AdapterMetrics(Collector):
    """Reads the service as it is scraped; what is let go of is told no more."""

    def __init__(self, service: AdapterService, model_name: str) -> None:
        self._service, self._model_name = service, model_name

    def collect(self) -> Iterator[Metric]:
        versions = tuple(self._service.versions)
        running = sorted({each.name for each in versions if each.running})
        waiting = sorted({each.name for each in versions if each.open > each.running})
        info = GaugeMetricFamily(
            "vllm:lora_requests_info", "Names of adapters with running and with waiting requests; the time in seconds.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )  # fmt: skip
        info.add_metric([str(self._service.limits.slots), ",".join(running), ",".join(waiting)], time.time())
        yield info
        states = Counter(each.state for each in versions)
        by_state = GaugeMetricFamily(
            "modelserve_adapter_versions", "Versions of adapters, by state.", labels=["model_name", "state"]
        )
        for state in AdapterState:
            by_state.add_metric([self._model_name, state.value], states[state])
        yield by_state
        requests = CounterMetricFamily("modelserve_adapter_requests", "Requests that it was asked for.", labels=_LABELS)
        ready = GaugeMetricFamily("modelserve_adapter_ready", "1: it answers requests.", labels=_LABELS)
        seconds = GaugeMetricFamily(
            "modelserve_adapter_load_seconds", "From its address to Ready, the probe included.", labels=_LABELS
        )
        divergence = GaugeMetricFamily(
            "modelserve_adapter_probe_kl", "How far its answers are from the base's, in nats a token.", labels=_LABELS
        )
        strengths = GaugeMetricFamily(
            "modelserve_adapter_probe_strength",
            "How large its terms are beside the products that they are added to, by kind of linear layer.",
            labels=[*_LABELS, "linear"],
        )
        drafts = {each.adapter: each for each in self._service.stats().adapter_drafts}
        drafted = CounterMetricFamily(
            "modelserve_adapter_draft_tokens", "Drafts that were verified of its requests.", labels=_LABELS
        )
        accepted = CounterMetricFamily(
            "modelserve_adapter_accepted_draft_tokens", "Of these, those that were right.", labels=_LABELS
        )
        for each in versions:
            labels = [self._model_name, each.name, each.wanted.id]
            requests.add_metric(labels, each.total)
            ready.add_metric(labels, each.state is AdapterState.READY)
            if each.load_seconds is not None:
                seconds.add_metric(labels, each.load_seconds)
            if each.probe is not None:
                divergence.add_metric(labels, each.probe.kl)
                for linear, ratio in each.probe.by_linear.items():
                    strengths.add_metric([*labels, linear], ratio)
            if (known := drafts.get(each.digest or "")) is not None:
                drafted.add_metric(labels, known.tokens)
                accepted.add_metric(labels, known.accepted)
        yield from (requests, ready, seconds, divergence, strengths, drafted, accepted)
