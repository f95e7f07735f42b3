"""Traces for OpenTelemetry: a span for each request, and within it one for each part of its time."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from mini_infer.core.errors import ConfigError
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.serving.link.stream import Stream

NS = 1_000_000_000


def require_opentelemetry() -> None:
    """Raises ConfigError where it is not installed."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as error:
        missing = "otlp_traces_endpoint needs OpenTelemetry: pip install -e '.[otel]'"
        raise ConfigError(f"{missing} ({error})") from error


class Tracer:
    """Sends spans from a thread of its own, and drops them where nobody takes them.

    Args:
        endpoint: URL of a collector that speaks OTLP over HTTP, such as http://localhost:4318/v1/traces.
        model: as clients know it.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        name = os.environ.get("OTEL_SERVICE_NAME", "mini-infer")
        self._model = model
        self._trace = trace
        self._parent = TraceContextTextMapPropagator().extract
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("mini_infer")

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()

    def ended(
        self, stream: Stream, params: SamplingParams, arrival: float, key: str, headers: Mapping[str, str]
    ) -> None:
        """Tells of a request that has ended.

        Args:
            arrival: seconds on time.perf_counter.
            key: the client's name; empty: nobody asked for it.
            headers: the request's, which may name the span that it is a part of (W3C's traceparent).
        """
        now = time.perf_counter()
        to_wall = time.time_ns() - int(now * NS)
        usage = stream.usage
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "generate",
            "gen_ai.request.model": self._model,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "mini_infer.cached_tokens": usage.cached_tokens,
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        if key:
            attributes["mini_infer.key"] = key
        whole = self._tracer.start_span(
            f"generate {self._model}",
            context=self._parent(headers),
            kind=self._trace.SpanKind.SERVER,
            attributes=attributes,
            start_time=to_wall + int(arrival * NS),
        )
        if stream.error is not None:
            status = self._trace.Status(self._trace.StatusCode.ERROR, str(stream.error))
            whole.set_status(status)
        within = self._trace.set_span_in_context(whole)
        if stream.spans is not None:
            lasted = {name: seconds for name, seconds in stream.spans.items() if name != "transfer"}
            lasted["decode"] = now - arrival - sum(lasted.values())
            start = arrival
            for name, seconds in lasted.items():
                span = self._tracer.start_span(name, context=within, start_time=to_wall + int(start * NS))
                start += seconds
                span.end(to_wall + int(start * NS))
        whole.end(to_wall + int(now * NS))
