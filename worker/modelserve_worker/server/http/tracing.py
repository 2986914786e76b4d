"""Traces by OpenTelemetry: one span for each inference request, with those of its images within, where
OTEL_EXPORTER_OTLP_ENDPOINT says where to.

The library is the optional extra `otel`; its own environment variables (service name, headers, sampling) hold.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers

from modelserve_worker.server.http.request_context import RequestContext

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

log = logging.getLogger(__name__)


class Tracing:
    """Tells finished requests to `tracer_provider`; a caller's `traceparent` header makes its span the parent."""

    def __init__(self, tracer_provider: Any, model_name: str) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer_provider.get_tracer("modelserve_worker")
        self._model_name = model_name
        self._kind = SpanKind.SERVER
        self._as_parent = set_span_in_context
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], model_name: str) -> Tracing | None:
        """None where no endpoint is set, and, with a warning, where the library is missing."""
        if not any(environment.get(name) for name in _ENDPOINTS):
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            log.warning(
                "an OpenTelemetry endpoint is set, but the library is missing (%s), so there are no traces; "
                "install modelserve[worker,otel], or unset %s",
                error, _ENDPOINTS[0],
            )  # fmt: skip
            return None
        named = "OTEL_SERVICE_NAME" in environment
        provider = TracerProvider(resource=Resource.create({} if named else {"service.name": "modelserve-worker"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider, model_name)

    def record(self, context: RequestContext, headers: Headers, *, method: str, path: str, status: int) -> None:
        """The request has just been answered."""
        now_ns, now_s = time.time_ns(), time.monotonic()
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        span = self._tracer.start_span(
            f"{method} {path}",
            context=self._propagator.extract(carrier),
            kind=self._kind,
            start_time=now_ns - int((now_s - context.arrival_s) * 1e9),
            attributes=self._attributes(context, method, path, status),
        )
        within = self._as_parent(span)
        for each in context.media_spans:
            inner = self._tracer.start_span(
                each.name,
                context=within,
                start_time=now_ns - int((now_s - each.began_s) * 1e9),
                attributes={f"modelserve.{each.name.partition(' ')[0]}": each.items},
            )
            inner.end(now_ns - int((now_s - each.ended_s) * 1e9))
        span.end(now_ns)

    def _attributes(self, context: RequestContext, method: str, path: str, status: int) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "http.request.method": method,
            "url.path": path,
            "http.response.status_code": status,
            "gen_ai.request.id": context.request_id,
            "gen_ai.request.model": self._model_name,
            "gen_ai.usage.input_tokens": context.prompt_tokens,
            "gen_ai.usage.output_tokens": context.completion_tokens,
        }
        for name, at_s in (
            ("gen_ai.latency.time_in_queue", context.admitted_s),
            ("gen_ai.latency.time_to_first_token", context.first_token_s),
        ):
            if at_s is not None:
                attributes[name] = max(0.0, at_s - context.arrival_s)
        return attributes
