"""The metric table: both families of names from one value, counters that survive an engine, histograms that add up."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tokenmill.engine import messages
from tokenmill.engine.stats import DraftingStats, EngineStats, TierStats, metrics_of
from tokenmill.serve.metrics import METRICS, Metrics, render

_EXPECTED_BY_DASHBOARDS = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "generation_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "lora_requests_info",
    "admission_rejections",
]


def _samples(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        sample.name + str(sample.labels.get("le", "")): sample.value for family in families for sample in family.samples
    }


def test_names_are_unique_and_vllms_are_there() -> None:
    names = [spec.name for spec in METRICS]
    assert len(set(names)) == len(names)
    assert set(_EXPECTED_BY_DASHBOARDS) <= {spec.vllm for spec in METRICS}


def test_both_names_show_one_value() -> None:
    metrics = Metrics("m")
    metrics.on_step(EngineStats(num_running=3, num_waiting=2, kv_usage=0.25))
    samples = _samples(metrics)
    assert samples["tokenmill_requests_running"] == samples["vllm:num_requests_running"] == 3
    assert samples["vllm:kv_cache_usage_perc"] == 0.25


def test_counters_go_on_when_the_engine_starts_over() -> None:
    metrics = Metrics("m")
    metrics.on_step(EngineStats(num_steps=10, num_prefix_hit_tokens=5))
    metrics.on_restart("killed")
    metrics.on_step(EngineStats(num_steps=4, num_prefix_hit_tokens=1))
    samples = _samples(metrics)
    assert samples["tokenmill_engine_steps_total"] == 14
    assert samples["vllm:prefix_cache_hits_total"] == 6
    assert samples["tokenmill_engine_restarts_total"] == 1


def test_an_engine_that_was_unloaded_is_no_restart() -> None:
    metrics = Metrics("m")
    metrics.on_step(EngineStats(num_steps=10, num_running=2))
    metrics.on_stopped()
    assert _samples(metrics)["tokenmill_requests_running"] == 0
    metrics.on_step(EngineStats(num_steps=4))
    samples = _samples(metrics)
    assert samples["tokenmill_engine_steps_total"] == 14
    assert samples["tokenmill_engine_restarts_total"] == 0


def test_models_of_one_server_are_told_apart() -> None:
    models = [Metrics("a"), Metrics("b")]
    models[1].add("model_loads", 2.0, "wake")
    for number, metrics in enumerate(models):
        metrics.observe("ttft_seconds", 1.0 + number)
    text = render(models).decode()
    assert text.count("# TYPE tokenmill_model_loads_total counter") == 1
    samples = {
        (sample.name, sample.labels["model_name"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["tokenmill_model_loads_total", "b"] == 2
    assert [samples["tokenmill_ttft_seconds_sum", name] for name in "ab"] == [1.0, 2.0]


def test_histograms_are_cumulative() -> None:
    metrics = Metrics("m")
    for value in (0.0005, 0.03, 0.03, 1000.0):
        metrics.observe("ttft_seconds", value)
    samples = _samples(metrics)
    assert samples["vllm:time_to_first_token_seconds_bucket0.001"] == 1
    assert samples["vllm:time_to_first_token_seconds_bucket0.04"] == 3
    assert samples["vllm:time_to_first_token_seconds_bucket80.0"] == 3
    assert samples["vllm:time_to_first_token_seconds_bucket+Inf"] == 4
    assert samples["vllm:time_to_first_token_seconds_count"] == 4
    assert metrics.get("ttft_seconds") == 4


def test_what_the_engine_counts_is_a_metric_by_its_declaration_alone() -> None:
    """The record is the only list: every declared field crosses the wire and is shown."""
    declared = [*metrics_of(EngineStats), *metrics_of(TierStats), *metrics_of(DraftingStats)]
    assert [spec for _, spec in declared] == list(METRICS[: len(declared)])
    tier = TierStats("disk", **{name: {"hash": 3} if name == "rejected" else 3 for name, _ in metrics_of(TierStats)})
    drafting = DraftingStats("suffix", "1", "measured to pay", on=3, gain=3)
    stats = EngineStats(
        tiers=[tier],
        drafting=[drafting],
        **{name: 2 for name, _ in metrics_of(EngineStats) if name != "pages_consistent"},
    )
    received = messages.decode_from_engine(messages.encode(messages.Events([], stats)))
    assert isinstance(received, messages.Events)
    metrics = Metrics("m")
    metrics.on_step(received.stats)
    samples = _samples(metrics)
    for name, spec in declared:
        shown = samples[f"tokenmill_{spec.name}" + ("_total" if spec.kind == "counter" else "")]
        assert shown == (1 if name == "pages_consistent" else 3 if spec.labels else 2), name
