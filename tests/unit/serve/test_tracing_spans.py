"""Spans of a request's own time: queue, prefill with its chunks, decode; read back from memory."""

from __future__ import annotations

import pytest

from tests.unit.serve.test_recent import _answer, _generation
from tokenmill.serve.tracing import Tracing

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="the extra tokenmill[otel] is not installed")


def _spans(answered: bool) -> dict[str, object]:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracer = provider.get_tracer("test")
    generation = _generation([1] * 10)
    if answered:
        _answer(generation, [5, 6], 2, "partial")
        generation.members[0].last_token += 0.25
    with tracer.start_as_current_span("request"):
        Tracing(tracer).on_end(generation.members[0])
    return {span.name: span for span in memory.get_finished_spans()}


def test_queue_prefill_and_decode_are_apart_and_follow_each_other() -> None:
    spans = _spans(answered=True)
    assert list(spans) == ["queue", "prefill", "decode", "request"]
    queue, prefill, decode, request = spans.values()
    assert (queue.end_time, prefill.end_time) == (prefill.start_time, decode.start_time)  # type: ignore[attr-defined]
    seconds = {name: (each.end_time - each.start_time) / 1e9 for name, each in spans.items()}  # type: ignore[attr-defined]
    assert seconds["queue"] == pytest.approx(1.0, abs=1e-3)
    assert seconds["prefill"] == pytest.approx(0.75, abs=1e-3)
    assert seconds["decode"] == pytest.approx(0.25, abs=1e-3)
    (chunk,) = prefill.events  # type: ignore[attr-defined]
    assert dict(chunk.attributes) == {"offset": 2, "tokens": 8, "rows": 2}
    parents = {span.parent.span_id for span in (queue, prefill, decode)}  # type: ignore[attr-defined]
    assert parents == {request.context.span_id}  # type: ignore[attr-defined]
    told = request.attributes  # type: ignore[attr-defined]
    assert told["gen_ai.latency.time_in_model_prefill"] == pytest.approx(0.75)
    assert told["gen_ai.latency.e2e"] == pytest.approx(2.0)


def test_a_request_that_was_never_computed_only_waited() -> None:
    assert list(_spans(answered=False)) == ["queue", "request"]
