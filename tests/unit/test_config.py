"""EngineConfig: sizes and counts, aliases, refusals."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from tokenmill.config import EngineConfig, parse_count, parse_size
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


def test_options_take_aliases_dashes_and_text() -> None:
    config = EngineConfig.from_options({"max_model_len": "4k", "kv-cache-memory-bytes": "1GiB", "max_num_seqs": 3})
    assert config == EngineConfig(context=4096, memory=1 << 30, concurrency=3)


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'context'"):
        EngineConfig.from_options({"contxt": 1})


def test_an_option_under_two_names_is_refused() -> None:
    with pytest.raises(UserError, match="given twice"):
        EngineConfig.from_options({"context": 1, "max_model_len": 1})


@pytest.mark.parametrize(
    "options",
    [{"concurrency": 0}, {"context": -1}, {"page_size": 0}, {"prefix_caching": 1}, {"threads": True}, {"seed": "x"}],
    ids=str,
)
def test_values_out_of_range_or_type_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        EngineConfig.from_options(options)


def test_the_record_is_frozen_and_every_field_has_help() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineConfig().context = 1  # type: ignore[misc]
    assert all(spec.metadata["help"].endswith(".") for spec in fields(EngineConfig))


def test_no_two_fields_share_a_name() -> None:
    names = [name for spec in fields(EngineConfig) for name in (spec.name, *spec.metadata["aliases"])]
    assert len(names) == len(set(names))
