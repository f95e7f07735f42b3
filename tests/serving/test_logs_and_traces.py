"""What operators read: logs as JSON, and spans that a collector of OpenTelemetry's understands."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from http_server import refusal, running, wait_for

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_log_of_json(processes: str) -> None:
    with running("--log-format", "json", "--access-log", "--api-processes", processes) as server:
        assert server.http.get("/v1/models").status_code == 200
        server.stop()
        lines = [json.loads(line) for line in server.log if line.startswith("{")]
    (asked,) = [line for line in lines if line["logger"] == "uvicorn.access"]
    assert (asked["method"], asked["path"], asked["status"], asked["level"]) == ("GET", "/v1/models", 200, "info")
    assert time.strftime("%Y-%m-%dT") in asked["time"]
    others = [line for line in server.log if not line.startswith("{")]
    assert len(others) == 1, others  # the address, on standard output


class Collector:
    """Takes what an OTLP exporter sends."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.names: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.names |= {v.value.string_value for v in resource.resource.attributes}
                    collector.spans += [span for scope in resource.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def named(self, start: str) -> list[Any]:
        return [span for span in self.spans if span.name.startswith(start)]


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


def test_a_request_is_a_span_of_the_clients_trace(collector: Collector, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("alice: {key: a}")
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace_id}-{span_id}-01", "authorization": "Bearer a"}
    flags = ("--otlp-traces-endpoint", collector.url, "--api-keys", str(keys), "--model.dry.step_ms", "20")
    before = time.time_ns()
    with running(*flags, environ={"OTEL_BSP_SCHEDULE_DELAY": "50"}) as server:
        body = {"prompt": "a" * 40, "max_tokens": 4, "ignore_eos": True}
        assert server.http.post("/v1/completions", json=body, headers=headers).status_code == 200
        wait_for(lambda: len(collector.spans) == 4)
        with server.http.stream(
            "POST", "/v1/completions", json={**body, "max_tokens": 900, "stream": True}, headers=headers
        ) as answer:
            next(answer.iter_lines())
        server.stop()  # what is left is sent
    (whole, left) = collector.named("generate dry")
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (trace_id, span_id)
    assert collector.names == {"mini-infer"} or "mini-infer" in collector.names
    attributes = {item.key: item.value for item in whole.attributes}
    assert attributes["gen_ai.usage.input_tokens"].int_value == 40
    assert attributes["gen_ai.usage.output_tokens"].int_value == 4
    assert attributes["mini_infer.key"].string_value == "alice"
    parts = [span for span in collector.spans if span.parent_span_id == whole.span_id]
    assert [span.name for span in parts] == ["queue", "prefill", "decode"]
    edges = [edge for span in parts for edge in (span.start_time_unix_nano, span.end_time_unix_nano)]
    assert edges == sorted(edges)
    assert abs(whole.start_time_unix_nano - edges[0]) < 20_000_000  # two clocks, a process each
    assert abs(whole.end_time_unix_nano - edges[-1]) < 20_000_000
    assert before < whole.start_time_unix_nano < whole.end_time_unix_nano < time.time_ns()
    assert parts[2].end_time_unix_nano - parts[2].start_time_unix_nano > 3 * 15_000_000  # three steps
    parts = [span for span in collector.spans if span.parent_span_id == left.span_id]
    assert [span.name for span in parts] == ["queue", "prefill", "decode"], "its client left, and the engine tells"


def test_a_collector_that_is_not_there_costs_nobody_anything() -> None:
    patience = {"OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "1"}  # of the exporter, in seconds, when the server ends
    with running("--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces", environ=patience) as server:
        server.check_unharmed()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from mini_infer.core.errors import ConfigError
    from mini_infer.serving.settings import ServerSettings

    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match=r"-e '\.\[otel\]'"):  # before minutes go into a model
        ServerSettings(otlp_traces_endpoint="http://localhost")
    assert refusal("--dry-run", "--log-format", "xml")[0] == 2
