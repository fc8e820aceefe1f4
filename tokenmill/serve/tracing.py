"""OpenTelemetry traces, if OTEL_EXPORTER_OTLP_ENDPOINT is set and the extra `tokenmill[otel]` is installed.

One span per HTTP request, child of the caller's if it sent `traceparent`; under it, for each prompt, the queue, the
prefill with an event for each of its chunks, and the decode. Never holds text. OTEL_* variables set sampling, headers
and the service name. Wraps the application and observes the engine client.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill import __version__
from tokenmill.engine.stats import EngineStats
from tokenmill.log import get_logger
from tokenmill.serve.generation import Member

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_log = get_logger(__name__)
_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_QUIET_PATHS = ("/livez", "/readyz", "/health", "/ping", "/metrics", "/load")  # polled by probes: too many spans


UNKNOWN = "unknown"
_METHODS = ("GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_MAX_TRACESTATE = 512


def span_name(scope: Scope) -> str:
    """Method and route template: a client must not choose names, or a collector would hold one series per path."""
    path = getattr(scope.get("route"), "path", None)
    return f"{scope['method']} {path}" if path and scope["method"] in _METHODS else UNKNOWN


def trace_context(headers: Headers) -> dict[str, str]:
    """The caller's trace headers if they are well formed."""
    parents = headers.getlist("traceparent")
    if len(parents) != 1 or not _TRACEPARENT.fullmatch(parents[0]):
        return {}
    state = ",".join(headers.getlist("tracestate"))
    return {"traceparent": parents[0]} | ({"tracestate": state} if 0 < len(state) <= _MAX_TRACESTATE else {})


def start_tracing() -> Tracing | None:
    """None unless an endpoint is set; a missing package is logged once."""
    if not any(os.environ.get(name) for name in _VARIABLES):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        _log.warning("no traces: %s is not installed; run pip install 'tokenmill[otel]'", error.name)
        return None
    name = os.environ.get("OTEL_SERVICE_NAME", "tokenmill")
    provider = TracerProvider(resource=Resource.create({"service.name": name, "service.version": __version__}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))  # sent from a thread of its own
    return Tracing(provider.get_tracer("tokenmill", __version__))


class Tracing:
    def __init__(self, tracer: Tracer) -> None:
        from opentelemetry import trace

        self._tracer = tracer
        self._trace = trace
        self._epoch = time.time_ns() - time.monotonic_ns()

    def around(self, app: ASGIApp) -> ASGIApp:
        """`app` with a span around each request but the polled ones."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator = TraceContextTextMapPropagator()

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] in _QUIET_PATHS:
                await app(scope, receive, send)
                return
            caller = propagator.extract(trace_context(Headers(scope=scope)))
            kind = self._trace.SpanKind.SERVER
            with self._tracer.start_as_current_span(UNKNOWN, context=caller, kind=kind) as span:
                try:
                    await app(scope, receive, _recording_status(send, span))
                finally:
                    span.update_name(span_name(scope))  # the router has found the route by now
                record = scope.get("state", {}).get("record")
                if record is not None:
                    span.set_attribute("tokenmill.request_id", record.request_id)
                    if record.error:
                        span.set_attribute("error.message", record.error)

        return traced

    # --- from the engine client ---

    def on_step(self, stats: EngineStats) -> None:
        pass

    def on_tokens(self, member: Member, num_tokens: int) -> None:
        pass

    def on_restart(self, reason: str) -> None:
        pass

    def on_end(self, member: Member) -> None:
        """Called in the request's own task, so that the spans fall under its span."""
        output = member.output
        attributes: dict[str, Any] = {
            "gen_ai.usage.input_tokens": len(member.request.prompt_ids),
            "gen_ai.usage.output_tokens": sum(len(each.token_ids) for each in output.outputs),
            "tokenmill.cached_tokens": output.num_cached_tokens or 0,
            "gen_ai.response.finish_reasons": [each.finish_reason or "abort" for each in output.outputs],
        }
        arrived, first, line = member.arrived, member.first_token, member.timeline
        if line is None or not line.chunks:  # it left, or was refused, before the engine came to it
            self._span("queue", arrived, time.monotonic(), attributes)
            return
        started, answered = line.chunks[0].began, first if first is not None else line.chunks[-1].ended
        last = max(answered, member.last_token)
        attributes["tokenmill.preemptions"] = line.num_preemptions
        chunks = [(each.ended, {"offset": each.start, "tokens": each.count, "rows": each.num_rows})
                  for each in line.chunks]  # fmt: skip
        self._span("queue", arrived, started, attributes)
        self._span("prefill", started, answered, attributes, chunks)
        self._span("decode", answered, last, attributes)
        self._trace.get_current_span().set_attributes(
            {
                "gen_ai.latency.time_in_queue": started - arrived,
                "gen_ai.latency.time_in_model_prefill": answered - started,
                "gen_ai.latency.time_in_model_decode": last - answered,
                "gen_ai.latency.time_to_first_token": answered - arrived,
                "gen_ai.latency.e2e": last - arrived,
            }
        )

    def _span(
        self,
        name: str,
        start: float,
        end: float,
        attributes: dict[str, Any],
        events: Sequence[tuple[float, dict[str, int]]] = (),
    ) -> None:
        span = self._tracer.start_span(name, start_time=self._nanoseconds(start), attributes=attributes)
        for moment, told in events:
            span.add_event("chunk", told, self._nanoseconds(moment))
        span.end(self._nanoseconds(max(start, end)))

    def _nanoseconds(self, moment: float) -> int:
        return self._epoch + int(moment * 1e9)


def _recording_status(send: Send, span: Any) -> Send:
    async def noting(message: Message) -> None:
        if message["type"] == "http.response.start":
            span.set_attribute("http.response.status_code", message["status"])
        await send(message)

    return noting
