"""Flags made from the records: every field has one, aliases and values arrive, verbs keep their own defaults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tokenmill.cli.options import engine_options, sampling_options
from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.types import SamplingParams

Parse = Callable[..., tuple[EngineConfig, SamplingParams]]


@pytest.fixture
def parse() -> Parse:
    """Arguments -> the records that a verb with all flags is given."""
    app = typer.Typer()
    seen: list[Any] = []

    @app.command()
    @sampling_options(max_tokens=256, temperature=0.0)
    @engine_options(without=("seed",), prefix_caching=False)
    def verb(*, engine: EngineConfig, params: SamplingParams) -> None:
        seen.append((engine, params))

    def run(*arguments: str) -> tuple[EngineConfig, SamplingParams]:
        result = CliRunner().invoke(app, list(arguments))
        if result.exception is not None:
            raise result.exception
        found: tuple[EngineConfig, SamplingParams] = seen.pop()
        return found

    return run


def test_nothing_given_leaves_the_defaults_of_records_and_verb(parse: Parse) -> None:
    engine, params = parse()
    assert engine == EngineConfig(prefix_caching=False)
    assert params == SamplingParams(max_tokens=256, temperature=0.0)


def test_values_are_parsed_by_the_fields_own_parser(parse: Parse) -> None:
    engine, params = parse("--context", "8k", "--memory", "2GiB", "--prefix-caching", "--top-p", "0.9", "--seed", "7")
    assert (engine.context, engine.memory, engine.prefix_caching) == (8192, 2 << 30, True)
    assert (params.top_p, params.seed) == (0.9, 7)


@pytest.mark.parametrize(
    "spec", [spec for spec in fields(EngineConfig) if spec.metadata["aliases"]], ids=lambda s: s.name
)
def test_aliases_mean_the_field(parse: Parse, spec: Any) -> None:
    for alias in spec.metadata["aliases"]:
        flag = f"--{alias.replace('_', '-')}"
        value = [] if isinstance(spec.default, bool) else ["fcfs" if isinstance(spec.default, str) else "33"]
        engine, _ = parse(flag, *value)
        expected = True if isinstance(spec.default, bool) else type(spec.default)(value[0])
        assert getattr(engine, spec.name) == expected


def test_a_field_given_under_two_names_is_refused(parse: Parse) -> None:
    with pytest.raises(UserError, match="given twice"):
        parse("--context", "512", "--max-model-len", "1024")


def test_every_sampling_field_but_prompt_logprobs_has_a_flag(parse: Parse) -> None:
    given = {"n": "2", "max_tokens": "9", "min_tokens": "3", "top_k": "5", "seed": "1", "logprobs": "4"}
    given |= dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "repetition_penalty"), "0.5")
    given |= {"frequency_penalty": "-1", "presence_penalty": "0.25", "logit_bias": "12=-5", "stop": "END"}
    given |= {"stop_token_ids": "2,3"} | dict.fromkeys(("ignore_eos", "include_stop_str_in_output"), "")
    given |= {"skip_special_tokens": "no"}
    assert set(given) == {spec.name for spec in fields(SamplingParams)} - {"prompt_logprobs", "structured", "cache"}
    arguments = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        arguments += [f"--no-{flag}"] if value == "no" else [f"--{flag}"] if value == "" else [f"--{flag}", value]
    _, params = parse(*arguments)
    assert params == SamplingParams(
        n=2,
        max_tokens=9,
        min_tokens=3,
        temperature=0.5,
        top_k=5,
        top_p=0.5,
        min_p=0.5,
        typical_p=0.5,
        repetition_penalty=0.5,
        frequency_penalty=-1,
        presence_penalty=0.25,
        logit_bias={12: -5.0},
        seed=1,
        stop=("END",),
        stop_token_ids=(2, 3),
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=4,
    )


def test_repeatable_flags_collect(parse: Parse) -> None:
    _, params = parse("--stop", "a", "--stop", "b", "--logit-bias", "1=2", "--logit-bias", "3=-4.5")
    assert params.stop == ("a", "b")
    assert params.logit_bias == {1: 2.0, 3: -4.5}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--temperature", "-1"],
        ["--max-tokens", "0"],
        ["--context", "many"],
        ["--concurrency", "0"],
        ["--logit-bias", "x"],
        ["--stop-token-ids", "a,b"],
    ],
    ids=lambda each: each[0],
)
def test_bad_values_are_user_errors_with_a_remedy(parse: Parse, arguments: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse(*arguments)
    assert caught.value.remedy
