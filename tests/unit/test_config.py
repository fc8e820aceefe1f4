"""EngineConfig: sizes and counts, automatic values, who set what, refusals."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict, replace

import pytest

from tokenmill.config import EngineConfig, option_fields, parse_count, parse_milliseconds, parse_size
from tokenmill.errors import UserError


@pytest.mark.parametrize(
    ("text", "size"),
    [("6GiB", 6 << 30), ("500MB", 500 * 10**6), ("2g", 2 * 10**9), ("1.5 KiB", 1536), ("1000", 1000), (7, 7)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(("text", "count"), [("8k", 8192), ("32000", 32000), ("0.5K", 512), (16, 16)])
def test_counts(text: str | int, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "six", "-1", "6XB", "i"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UserError, match="6GiB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "8m", "-1", "a lot"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(UserError, match="8k"):
        parse_count(text)


@pytest.mark.parametrize(("text", "milliseconds"), [("40ms", 40.0), ("0.5s", 500.0), ("25", 25.0), (" 1.5 ms", 1.5)])
def test_times(text: str, milliseconds: float) -> None:
    assert parse_milliseconds(text) == milliseconds
    assert EngineConfig.from_options({"itl": text}, environment={}).itl == milliseconds


@pytest.mark.parametrize("text", ["", "fast", "-4ms", "4 minutes"])
def test_bad_times(text: str) -> None:
    with pytest.raises(UserError, match="not a time"):
        parse_milliseconds(text)


def test_options_take_other_engines_names_dashes_and_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENMILL_THREADS", raising=False)
    config = EngineConfig.from_options({"max_model_len": "4k", "kv-cache-memory-bytes": "1GiB", "max_num_seqs": "3"})
    assert config == EngineConfig(context=4096, memory=1 << 30, concurrency=3)


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'context'"):
        EngineConfig.from_options({"contxt": 1})


def test_an_option_under_two_names_is_refused() -> None:
    with pytest.raises(UserError, match="given twice"):
        EngineConfig.from_options({"context": 1, "max_model_len": 1})


@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": 0},
        {"context": -1},
        {"page_size": 0},
        {"threads": 0},
        {"prefix_caching": 1},
        {"threads": True},
        {"seed": "x"},
        {"gpu_memory_utilization": 90},
        {"device": "tpu"},
    ],
    ids=str,
)
def test_values_out_of_range_or_type_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        EngineConfig.from_options(options)


def test_two_limits_of_the_same_memory_are_refused() -> None:
    with pytest.raises(UserError, match="keep one"):
        EngineConfig(memory=1 << 30, gpu_memory_utilization=0.9)


@pytest.mark.parametrize("value", [None, "auto", "AUTO", ""])
def test_auto_is_a_value_of_every_automatic_option(value: str | None) -> None:
    names = [spec.name for spec in option_fields(EngineConfig) if spec.default is None]
    assert len(names) > 10
    config = EngineConfig.from_options(dict.fromkeys(names, value))
    assert config == EngineConfig()
    assert {config.source(name) for name in names} == {"automatic"}


def test_values_remember_who_set_them() -> None:
    config = EngineConfig.from_options({"context": 512, "seed": 3}, {"context": "from file a.yaml"}, {})
    config = config.fill("a reason", context=1, concurrency=2)
    config = replace(config, prefix_caching=False)
    assert (config.context, config.concurrency) == (512, 2)
    shown = {each.name: (each.value, each.source) for each in config.settings()}
    assert shown["context"] == (512, "from file a.yaml")
    assert shown["seed"] == (3, "set by you")
    assert shown["concurrency"] == (2, "automatic: a reason")
    assert shown["prefix_caching"] == (False, "set by you")
    assert shown["scheduling"] == ("fcfs", "default")
    assert shown["memory"] == (None, "automatic")
    assert [config.is_set(name) for name in ("context", "concurrency", "memory", "scheduling")] == [True, *[False] * 3]


def test_the_sources_survive_the_way_to_another_process() -> None:
    config = EngineConfig.from_options({"context": 512}, "from file a.yaml", {})
    arrived = EngineConfig(**asdict(config))
    assert arrived == config
    assert arrived.source("context") == "from file a.yaml"


def test_the_environment_is_read_after_everything_else() -> None:
    environment = {"TOKENMILL_CONTEXT": "2k", "TOKENMILL_SEED": "5", "TOKENMILL_PREFIX_CACHING": "off"}
    config = EngineConfig.from_options({"seed": 7}, environment=environment)
    assert (config.context, config.seed, config.prefix_caching) == (2048, 7, False)
    assert config.source("context") == "from environment variable TOKENMILL_CONTEXT"
    assert config.source("seed") == "set by you"
    with pytest.raises(UserError, match="TOKENMILL_SEED: seed must be a int"):
        EngineConfig.from_options({}, environment={"TOKENMILL_SEED": "many"})


def test_the_record_is_frozen_and_every_field_has_help() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineConfig().context = 1  # type: ignore[misc]
    assert all(spec.metadata["help"].endswith(".") for spec in option_fields(EngineConfig))
