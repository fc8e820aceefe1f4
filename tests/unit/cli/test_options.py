"""Flags made from the records: every field has one, other engines' flags arrive, verbs keep their own defaults."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tokenmill.cli.options import engine_options, sampling_options
from tokenmill.cli.peer_flags import PEER_FLAGS, accept_peer_flags, rewrite
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

    accept_peer_flags(app)

    def run(*arguments: str) -> tuple[EngineConfig, SamplingParams]:
        result = CliRunner().invoke(app, list(arguments))
        if result.exception is not None:
            raise result.exception
        found: tuple[EngineConfig, SamplingParams] = seen.pop()
        return found

    return run


def test_nothing_given_leaves_the_defaults_of_records_and_verb(monkeypatch: pytest.MonkeyPatch, parse: Parse) -> None:
    monkeypatch.delenv("TOKENMILL_THREADS", raising=False)
    engine, params = parse()
    assert engine == EngineConfig(prefix_caching=False)
    assert params == SamplingParams(max_tokens=256, temperature=0.0)


def test_values_are_parsed_by_the_fields_own_parser(parse: Parse) -> None:
    engine, params = parse("--context", "8k", "--memory", "2GiB", "--prefix-caching", "--top-p", "0.9", "--seed", "7")
    assert (engine.context, engine.memory, engine.prefix_caching) == (8192, 2 << 30, True)
    assert (params.top_p, params.seed) == (0.9, 7)


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--max-model-len", "4k"], "context", 4096),
        (["--max_model_len=512"], "context", 512),
        (["-c", "512"], "context", 512),
        (["--max-num-seqs", "33"], "concurrency", 33),
        (["--no-enable-prefix-caching"], "prefix_caching", False),
        (["--enable-prefix-caching"], "prefix_caching", True),
        (["--disable-radix-cache"], "prefix_caching", False),
        (["--enforce-eager"], "executor", "eager"),
        (["--swap-space", "2"], "kv_host_memory", 2 << 30),
        (["-ngl", "0"], "device", "cpu"),
        (["-tp", "1"], "concurrency", None),
        (["-t", "2"], "threads", 2),
        (["--batch_tokens", "64"], "batch_tokens", 64),
        (["--threads", "auto"], "threads", None),
        (["--context", "auto"], "context", None),
    ],
    ids=str,
)
def test_flags_of_other_engines_mean_ours(parse: Parse, arguments: list[str], name: str, value: object) -> None:
    engine, _ = parse(*arguments)
    assert getattr(engine, name) == value


def test_sampling_flags_of_other_engines_mean_ours(parse: Parse) -> None:
    _, params = parse("-n", "7", "--temp", "0.5")
    assert (params.max_tokens, params.temperature) == (7, 0.5)


@pytest.mark.parametrize("flag", PEER_FLAGS)
def test_no_flag_of_the_table_is_left_to_the_parser(flag: str) -> None:
    for value in ([], ["1"]):
        rewritten: list[str] = []
        with contextlib.suppress(UserError):  # test_peer_options.py looks at what it says
            rewritten = rewrite([flag, *value], {"--context"}, "tokenmill run")
        assert flag not in rewritten


def test_text_after_two_dashes_is_left_alone() -> None:
    assert rewrite(["a", "--", "--max-model-len"], {"--context"}, "run") == ["a", "--", "--max-model-len"]


def test_a_refused_flag_says_what_to_use(parse: Parse) -> None:
    with pytest.raises(UserError, match="--distributed-executor-backend ray: ranks are processes of one host"):
        parse("--distributed-executor-backend", "ray")
    with pytest.raises(UserError, match="needs a value"):
        parse("--max-num-seqs")
    with pytest.raises(UserError, match="--allowed-origins means --cors-origin"):
        parse("--allowed-origins", "*")


def test_flags_environment_and_verb_say_who_set_the_value(parse: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_CONTEXT", "1k")
    engine, _ = parse("--concurrency", "64")
    assert engine.source("concurrency") == "set by you"
    assert (engine.context, engine.source("context")) == (1024, "from environment variable TOKENMILL_CONTEXT")
    assert engine.source("prefix_caching") == "default"
    monkeypatch.setenv("TOKENMILL_PREFIX_CACHING", "on")
    assert parse()[0].prefix_caching is True


def test_a_field_given_under_two_names_is_refused(parse: Parse) -> None:
    with pytest.raises(UserError, match="given twice"):
        parse("--context", "512", "--max-model-len", "1024")


def test_every_sampling_field_but_prompt_logprobs_has_a_flag(parse: Parse) -> None:
    given = {"n": "2", "max_tokens": "9", "min_tokens": "3", "top_k": "5", "seed": "1", "logprobs": "4"}
    given |= dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "repetition_penalty"), "0.5")
    given |= {"frequency_penalty": "-1", "presence_penalty": "0.25", "logit_bias": "12=-5", "stop": "END"}
    given |= {"stop_token_ids": "2,3"} | dict.fromkeys(("ignore_eos", "include_stop_str_in_output"), "")
    given |= {"skip_special_tokens": "no", "allowed_token_ids": "4 5", "bad_words": "oops"}
    without = {"prompt_logprobs", "structured", "cache", "reasoning", "bad_word_ids"}
    assert set(given) == {spec.name for spec in fields(SamplingParams)} - without
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
        allowed_token_ids=(4, 5),
        bad_words=("oops",),
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
