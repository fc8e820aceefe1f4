"""Structured output in the sampler, over a vocabulary of bytes: what is allowed, what wins, what ends; and what the
compiler refuses."""

from __future__ import annotations

import gc
import gzip
import json
import threading
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import UserError
from tokenmill.grammar import compiler as compiler_module
from tokenmill.grammar.compiler import CompiledGrammar, GrammarCompiler
from tokenmill.runtime.sampling.sampler import Sampler
from tokenmill.types import Request, SamplingParams, StructuredSpec

_WORDS = [b'{"', b'":', b'": ', b'", "', b'"}', b"true", b"null", b"  ", b"\n", b"name", b"</s>"]
_EOS = 256 + len(_WORDS) - 1
_NUM_LOGITS = 300  # more than the tokenizer has, as with padded vocabularies


class ByteTokens:
    vocab_size = 256 + len(_WORDS)
    bos_id = None
    special_ids = frozenset({_EOS})
    adds_leading_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else _WORDS[token_id - 256]

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:  # noqa: ARG002
        return list(text.encode())


class SpacedTokens(ByteTokens):
    """Puts a space before a text, as SentencePiece does."""

    adds_leading_space = True

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        return super().encode(" " + text, add_special_tokens, parse_special)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(ByteTokens(), [_EOS], seconds=60.0)  # a busy machine is not what is tested


def _request(grammar: CompiledGrammar, spec: StructuredSpec, **params: Any) -> Request:
    options = {"max_tokens": 400, "structured": spec} | params
    return Request("r", [1], SamplingParams(**options), stop_ids=frozenset({_EOS}), grammar=grammar)


def _logits(seed: int) -> torch.Tensor:
    """Random, with a leaning to end: short texts and closing brackets."""
    logits = torch.randn(_NUM_LOGITS, generator=torch.Generator().manual_seed(seed)) * 2
    logits[[ord(each) for each in '"}],:0']] += 3
    logits[_EOS] += 3
    return logits


def _write(request: Request, sampler: Sampler | None = None, seed: int = 0) -> tuple[bytes, bool]:
    """Sample to the end; (text, whether it ended by itself)."""
    sampler = sampler or Sampler()
    for position in range(request.params.max_tokens):
        (token_id,), _ = sampler.sample(_logits(1000 * seed + position).unsqueeze(0), [request])
        assert token_id is not None
        request.token_ids.append(token_id)
        if token_id in request.stop_ids:
            return _text(request.output_ids[:-1]), True
    return _text(request.output_ids), False


def _text(token_ids: list[int]) -> bytes:
    return b"".join(map(ByteTokens().token_bytes, token_ids))


_SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]},
    {"type": "array", "items": {"enum": ["x", 1, None, True]}, "minItems": 2, "maxItems": 4},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^[a-f]{2,4}$"}]},
    {"type": "object", "additionalProperties": {"type": "number", "minimum": 0}, "minProperties": 1},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}}},
    {"type": "object", "properties": {"k": {"const": "v"}}, "required": ["k"], "additionalProperties": False},
    {"type": "integer", "minimum": 10, "maximum": 20, "multipleOf": 5},
]


@pytest.mark.parametrize("schema", _SCHEMAS)
def test_what_ends_by_itself_is_valid(compiler: GrammarCompiler, schema: Any) -> None:
    spec = StructuredSpec("json_schema", json.dumps(schema))
    grammar = compiler.compile(spec)
    num_ended = 0
    for seed in range(6):
        text, ended = _write(_request(grammar, spec), seed=seed)
        if ended:
            num_ended += 1
            jsonschema.validate(json.loads(text), schema)
    assert num_ended > 0


@pytest.mark.parametrize("greedy", [True, False])
def test_no_bias_or_penalty_brings_a_forbidden_token(compiler: GrammarCompiler, greedy: bool) -> None:
    spec = StructuredSpec("regex", "[ab]{3}")
    bias = {ord("c"): 100.0, _EOS: 100.0, ord("a"): -100.0}
    extra = {"logit_bias": bias, "repetition_penalty": 5.0, "temperature": 0.0 if greedy else 1.0, "typical_p": 0.3}
    text, ended = _write(_request(compiler.compile(spec), spec, **extra))
    assert ended
    assert len(text) == 3
    assert set(text) <= set(b"ab")


def test_a_complete_grammar_ends_before_min_tokens(compiler: GrammarCompiler) -> None:
    spec = StructuredSpec("choice", choices=("yes", "no"))
    text, ended = _write(_request(compiler.compile(spec), spec, min_tokens=50, ignore_eos=True))
    assert ended
    assert text in (b"yes", b"no")


def test_min_tokens_holds_while_the_grammar_can_go_on(compiler: GrammarCompiler) -> None:
    spec = StructuredSpec("regex", "[a-c]+")
    text, ended = _write(_request(compiler.compile(spec), spec, min_tokens=30))
    assert ended
    assert len(text) >= 30


def test_siblings_and_neighbours_do_not_touch_each_other(compiler: GrammarCompiler) -> None:
    spec = StructuredSpec("json_schema", json.dumps(_SCHEMAS[0]))
    grammar = compiler.compile(spec)
    alone = [_write(_request(grammar, spec), seed=seed) for seed in range(3)]
    sampler, requests = Sampler(), [_request(grammar, spec) for _ in range(3)]
    free = Request("free", [1], SamplingParams(temperature=0.0))
    for position in range(400):
        rows = [_logits(1000 * seed + position) for seed in range(3)]
        token_ids, _ = sampler.sample(torch.stack([*rows, _logits(9)]), [*requests, free])
        assert token_ids[3] == int(_logits(9).argmax())
        for request, token_id in zip(requests, token_ids, strict=False):
            if not request.output_ids or request.output_ids[-1] != _EOS:
                assert token_id is not None
                request.token_ids.append(token_id)
    assert [_text([each for each in request.output_ids if each != _EOS]) for request in requests] == [
        text for text, _ in alone
    ]


def test_a_request_goes_on_from_its_tokens_alone(compiler: GrammarCompiler) -> None:
    """After preemption, and even in another sampler, the output so far decides what may come."""
    spec = StructuredSpec("json_schema", json.dumps(_SCHEMAS[0]))
    grammar = compiler.compile(spec)
    whole = _request(grammar, spec)
    _write(whole)
    for cut in range(0, len(whole.output_ids), 3):
        again = _request(grammar, spec)
        again.token_ids += whole.output_ids[:cut]
        (token_id,), _ = Sampler().sample(_logits(cut).unsqueeze(0), [again])
        assert token_id == whole.output_ids[cut]


def test_finished_requests_are_forgotten(compiler: GrammarCompiler) -> None:
    spec = StructuredSpec("regex", "a+")
    sampler, request = Sampler(), _request(compiler.compile(spec), spec)
    sampler.sample(_logits(0).unsqueeze(0), [request])
    feature = next(each for each in sampler._logit_features if each.active(request.params))
    assert len(feature._progress) == 1  # type: ignore[attr-defined]
    del request
    gc.collect()
    assert len(feature._progress) == 0  # type: ignore[attr-defined]


def test_where_no_token_is_possible_the_row_says_so(compiler: GrammarCompiler) -> None:
    spec = StructuredSpec("regex", "ab")
    broken, good = _request(compiler.compile(spec), spec, logprobs=1), _request(compiler.compile(spec), spec)
    broken.token_ids.append(ord("z"))  # cannot happen but by a limit of the library
    token_ids, logprobs = Sampler().sample(torch.stack([_logits(0), _logits(1)]), [broken, good])
    assert token_ids == [None, ord("a")]
    assert logprobs[0] is None


@settings(max_examples=40, deadline=None)
@given(
    choices=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6), min_size=1, max_size=5)
)
def test_every_choice_and_nothing_else_is_allowed(compiler: GrammarCompiler, choices: list[str]) -> None:
    grammar = compiler.compile(StructuredSpec("choice", choices=tuple(choices)))
    for text in {*choices, choices[0] + "x", choices[0][:-1], "\\" + choices[0]}:
        matcher, data = grammar.matcher(), list(text.encode())
        matches = matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()
        assert matches == (text in choices)


@pytest.mark.parametrize(
    ("regex", "good", "bad"),
    [
        ("^ab$", "ab", "abc"),
        ("^a|b$", "b", "ab"),
        (r"a\$", "a$", "a"),
        (r"a\\$", "a\\", "a\\$"),
        ("x{2,3}", "xx", "x"),
    ],
)
def test_the_whole_output_must_match_a_regex(compiler: GrammarCompiler, regex: str, good: str, bad: str) -> None:
    grammar = compiler.compile(StructuredSpec("regex", regex))
    for text, expected in ((good, True), (bad, False)):
        matcher, data = grammar.matcher(), list(text.encode())
        assert (matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()) is expected


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (StructuredSpec("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (StructuredSpec("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}'), "not"),
        (StructuredSpec("json_schema", '{"$ref": "https://example.com/a.json"}'), "example.com"),
        (StructuredSpec("json_schema", '{"$ref": "#"}'), "no output"),
        (StructuredSpec("json_schema", '{"oneOf": [{"minimum": 1}, {"maximum": 5}]}'), "oneOf"),
        (StructuredSpec("json_schema", '{"type": "object", "minProperties": 2}'), "minProperties"),
        (StructuredSpec("json_schema", '{"anyOf": [{"type": "object", "minProperties": 3}]}'), "minProperties"),
        (StructuredSpec("json_schema", "false"), "nothing|anything"),
        (StructuredSpec("json_schema", "{"), "not JSON"),
        (StructuredSpec("json_schema", '{"a":' * 100 + "1" + "}" * 100), "deep"),
        (StructuredSpec("json_schema", "[" * 100_000), "deep|not JSON"),
        (StructuredSpec("regex", "("), "unclosed"),
        (StructuredSpec("regex", "(?=a)b"), "look-around"),
        (StructuredSpec("grammar", "start: missing"), "missing"),
        (StructuredSpec("grammar", "root ::= missing"), "missing"),
        (StructuredSpec("grammar", "start: " + "(" * 50_000), "nested"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(compiler: GrammarCompiler, spec: StructuredSpec, named: str) -> None:
    with pytest.raises(UserError, match=named):
        compiler.compile(spec)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "xml"},
        {"kind": "json_schema"},
        {"kind": "choice"},
        {"kind": "choice", "choices": ("a", "")},
        {"kind": "regex", "text": "a" * (1 << 18) + "a"},
    ],
)
def test_a_spec_says_what_is_wrong_with_it(fields: Any) -> None:
    with pytest.raises(UserError):
        StructuredSpec(**fields)


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, let_go, compile_for_real = StructuredSpec("regex", "slow"), threading.Event(), compiler_module.compile_grammar

    def compile_when_let(spec: StructuredSpec, *others: Any) -> CompiledGrammar:
        if spec == slow:
            let_go.wait()  # real slow grammars depend on the machine: a fast one refuses them for their size instead
        return compile_for_real(spec, *others)

    monkeypatch.setattr(compiler_module, "compile_grammar", compile_when_let)
    compiler = GrammarCompiler(ByteTokens(), [_EOS], seconds=0.25)
    with pytest.raises(UserError, match=r"more than 0\.25 s"):
        compiler.compile(slow)
    compiler._seconds = 60.0  # a busy machine is not what is tested
    # The slow one still holds its thread: another takes over.
    assert compiler.compile(StructuredSpec("regex", "b")).matcher().try_consume_tokens([ord("b")]) == 1
    let_go.set()


def test_a_tokenizer_that_adds_a_space_makes_no_difference() -> None:
    spec = StructuredSpec("json_schema", json.dumps(_SCHEMAS[5]))
    text, ended = _write(_request(GrammarCompiler(SpacedTokens(), [_EOS]).compile(spec), spec))
    assert ended
    jsonschema.validate(json.loads(text), _SCHEMAS[5])


def test_the_same_grammar_is_prepared_once(compiler: GrammarCompiler) -> None:
    spec = StructuredSpec("json_schema", json.dumps(_SCHEMAS[0]))
    assert compiler.compile(spec) is compiler.compile(StructuredSpec("json_schema", json.dumps(_SCHEMAS[0])))


def test_the_json_schema_test_suite_is_kept_or_refused(compiler: GrammarCompiler, data_path: Path) -> None:
    """No instance that is invalid can be written under a schema that is not refused."""
    with gzip.open(data_path / "json" / "json_schema_test_suite.jsonl.gz", "rt", encoding="utf-8") as file:
        cases = [json.loads(line) for line in file]
    num_kept = 0
    for case in cases:
        try:
            grammar = compiler.compile(StructuredSpec("json_schema", json.dumps(case["schema"])))
        except UserError:
            continue
        num_kept += 1
        for test in case["tests"]:
            matcher, data = grammar.matcher(), list(json.dumps(test["data"], ensure_ascii=False).encode())
            accepted = matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()
            assert test["valid"] or not accepted, (case["description"], test["description"])
    assert num_kept >= 160
