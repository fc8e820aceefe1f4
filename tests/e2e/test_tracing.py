"""Traces of a real server, read back by a collector that speaks just enough OTLP."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import serving, wait_until

_FLAGS = ("--context", "256", "--concurrency", "4")
_BODY = {"prompt": "Once upon a secret time", "max_tokens": 5, "temperature": 0}


@contextlib.contextmanager
def collecting(spans: list[Any]) -> Iterator[dict[str, str]]:
    """The environment of a server whose spans go to the list."""
    collector = _collector(spans)
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    try:
        yield {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
    finally:
        collector.shutdown()
        collector.server_close()
        thread.join()


def _collector(spans: list[Any]) -> HTTPServer:
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra tokenmill[otel] is not installed")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            import gzip

            data = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                data = gzip.decompress(data)
            request = service.ExportTraceServiceRequest.FromString(data)
            spans.extend(span for each in request.resource_spans for scope in each.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    return HTTPServer(("127.0.0.1", 0), Handler)


def test_a_request_is_one_trace_under_its_caller(model_path: Callable[[str], Path]) -> None:
    spans: list[Any] = []
    with collecting(spans) as environment, serving(model_path("stories15m"), *_FLAGS, env=environment) as server:
        headers = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "x-request-id": "mine"}
        for stream in (False, True):
            body = {**_BODY, "stream": stream}
            assert server.http.post("/v1/completions", json=body, headers=headers).status_code == 200
        server.http.get("/load")
        wait_until(lambda: len(spans) >= 8, 20)
    names = ("POST /v1/completions", "decode", "prefill", "queue")
    assert sorted(span.name for span in spans) == [name for name in names for _ in range(2)]
    assert {span.trace_id.hex() for span in spans} == {"ab" * 16}
    roots = [span for span in spans if span.name.startswith("POST")]
    assert {span.parent_span_id.hex() for span in roots} == {"cd" * 8}
    assert {span.parent_span_id for span in spans if span not in roots} == {span.span_id for span in roots}
    for span in spans:
        assert span.end_time_unix_nano >= span.start_time_unix_nano
        assert "secret" not in str(span)
    attributes = {each.key: each.value for span in spans for each in span.attributes}
    assert attributes["gen_ai.usage.output_tokens"].int_value == 5
    assert attributes["http.response.status_code"].int_value == 200
    assert attributes["tokenmill.request_id"].string_value == "mine"


def test_without_the_package_one_line_says_so(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    hidden = "import sys\nsys.modules['opentelemetry.exporter'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(hidden)  # as if it were not installed
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "PYTHONPATH": str(tmp_path)}
    with serving(model_path("stories15m"), *_FLAGS, env=environment) as server:
        assert server.http.post("/v1/completions", json=_BODY).status_code == 200
        server.logged("tokenmill[otel]")
        assert server.log.count("tokenmill[otel]") == 1
