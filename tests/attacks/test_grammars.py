"""Grammars, expressions and schemas that are made to crash, freeze or fill a compiler."""

from __future__ import annotations

import select

import httpx
import pytest

from benchmarks import attack_client as client
from benchmarks import attack_payloads as payloads
from benchmarks import attack_shapes as shapes
from benchmarks.tenant_keys import key_of
from tests.attacks.conftest import AttackedServer
from tests.attacks.tenant import streaming

_ANSWERED = {"200", "400", "413", "422", "429", "503"}


def test_s1_a_chain_of_terminals_costs_its_sender_only(served: AttackedServer) -> None:
    with streaming(served.url, key_of("good")):
        statuses = shapes.grammar_chain(served.target())
    assert set(statuses) <= {"400", "429"}, statuses


def test_s2_a_grammar_of_newlines_freezes_nobody(served: AttackedServer) -> None:
    with streaming(served.url, key_of("good")):
        statuses = shapes.grammar_newlines(served.target())
    assert set(statuses) <= {"200", "400", "429"}, statuses


@pytest.mark.parametrize(
    "without",
    [
        pytest.param(("many properties", "conditions"), id="quick"),  # the rest compiles for seconds
        pytest.param((), id="all", marks=pytest.mark.slow),
    ],
)
def test_s1_a_corpus_of_hostile_grammars(served: AttackedServer, without: tuple[str, ...]) -> None:
    with streaming(served.url, key_of("good")):
        statuses = shapes.grammar_corpus(served.target(), without)
    assert set(statuses) <= _ANSWERED - {"503"}, statuses
    served.wait_idle()


def _slow_schema(number: int) -> dict[str, object]:
    """Small, right, and seconds of work for a compiler; no two are the same."""
    return {"type": "object", "properties": {f"p{number}-{each}": {"type": "string"} for each in range(4000)}}


def test_r2_slow_grammars_of_one_tenant_do_not_hold_up_those_of_another(served: AttackedServer) -> None:
    """One queue of grammars: the small one of a second tenant waits behind all that the first one sent."""
    slow = [payloads.STORY | {"guided_json": _slow_schema(number)} for number in range(5)]
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    attack = client.pending(served.target(), "/v1/completions", slow)
    with streaming(served.url, key_of("good")) as tenant, attack as connections:
        tenant.wait_for_answers(1)
        answer = served.http.post("/v1/completions", json=payloads.STORY | {"guided_json": schema}, timeout=60)
        assert answer.status_code == 200, answer.text
        answered = select.select(connections, [], [], 0)[0]
        assert len(answered) < len(slow), "all slow ones were answered before: there was nothing to wait for"
        assert select.select(connections, [], [], 60)[0], "no slow one is ever answered"
        codes = {each.recv(12)[9:] for each in select.select(connections, [], [], 0)[0]}
        assert codes <= {b"200", b"400"}, codes  # compiled, or given up after seconds of work: none was turned away
    served.wait_idle()


def test_r2_a_cancelled_grammar_leaves_its_place(served: AttackedServer) -> None:
    with streaming(served.url, key_of("good")):
        for number in range(100, 112):
            body = payloads.STORY | {"guided_json": _slow_schema(number)}
            with served.target().http(0.1) as http, pytest.raises(httpx.TimeoutException):
                http.post("/v1/completions", json=body)
        body = payloads.STORY | {"guided_regex": "[a-c]{3}"}
        with served.target("vip").http(8) as http:  # nothing that was cancelled is in the way
            answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
    served.wait_idle()
