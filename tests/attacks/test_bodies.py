"""Request bodies that cost more than their size: validation, nesting, text, numbers, messages."""

from __future__ import annotations

import pytest

from benchmarks import attack_client as client
from benchmarks import attack_payloads as payloads
from benchmarks import attack_shapes as shapes
from benchmarks.soak_verdict import resident
from benchmarks.tenant_keys import key_of
from tests.attacks.conftest import AttackedServer
from tests.attacks.tenant import Prober, streaming

_STILL = 5.0  # seconds that the event loop never stands still, on a busy machine; these bodies held it for much longer


def _attacked(served: AttackedServer, path: str, body: bytes) -> str:
    with streaming(served.url, key_of("good")) as tenant, Prober(served.url, key_of("other")) as prober:
        tenant.wait_for_answers(1)
        statuses = client.in_turn(served.target(), path, [body])
    assert not prober.failures
    assert prober.longest < _STILL, f"the event loop stood still for {prober.longest:.1f} s"
    (status,) = statuses
    return status


def test_s3_one_wrong_element_is_found_without_a_list_of_complaints(served: AttackedServer) -> None:
    before = resident(served.process.pid)
    assert _attacked(served, "/v1/completions", payloads.mixed_ids()) in ("400", "413", "422")
    assert resident(served.process.pid) - before < 256 << 20


@pytest.mark.parametrize("path", ["/v1/embeddings", "/detokenize"])
def test_s3_the_other_doors_read_lists_as_carefully(served: AttackedServer, path: str) -> None:
    field = b'"input"' if path == "/v1/embeddings" else b'"tokens"'
    body = payloads.mixed_ids().replace(b'"prompt"', field)
    assert _attacked(served, path, body) in ("400", "413", "422")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat", "/v1/messages", "/tokenize"])
def test_s10_300_000_messages_do_not_freeze_the_loop(served: AttackedServer, path: str) -> None:
    assert _attacked(served, path, payloads.empty_messages()) in ("400", "413", "422")


def test_s3_a_corpus_of_hostile_bodies(served: AttackedServer) -> None:
    with streaming(served.url, key_of("good")), served.target().http() as http:
        for name, body in payloads.BODIES.items():
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
                status = client.post(http, path, body)
                assert status[0] in "24", f"{name} to {path}: {status}"
    served.wait_idle()


def test_r9_log_probabilities_of_prompts_are_bounded(served: AttackedServer) -> None:
    """64 prompts with twenty candidates for each token: refused, or answered without hundreds of thousands of objects
    in the HTTP process."""
    before = resident(served.process.pid)
    with streaming(served.url, key_of("good")), Prober(served.url, key_of("other")) as prober:
        statuses = shapes.prompt_logprobs(served.target())
    assert set(statuses) <= {"200", "400", "413", "429"}, statuses
    assert resident(served.process.pid) - before < 48 << 20
    assert prober.longest < _STILL


def test_s9_prompts_beyond_the_context_are_not_tokenized_in_full(served: AttackedServer) -> None:
    with streaming(served.url, key_of("good")), Prober(served.url, key_of("other")) as prober:
        statuses = shapes.long_prompts(served.target())
    assert set(statuses) <= {"400", "413", "429"}, statuses
    assert prober.longest < _STILL


def test_s9_tokenize_is_metered(served: AttackedServer) -> None:
    """Eight texts of two megabytes at once: some are refused, and nobody else waits."""
    with streaming(served.url, key_of("good")), Prober(served.url, key_of("other")) as prober:
        statuses = shapes.tokenize_flood(served.target())
        statuses += shapes.tokenize_flood(served.target())
    assert prober.longest < _STILL
    assert set(statuses) <= {"200", "400", "413", "429", "503"}, statuses
    assert statuses["200"] < sum(statuses.values()), "all was tokenized for nothing"


def test_d13_fields_that_change_nothing_are_named(served: AttackedServer) -> None:
    """What is dropped is either obeyed, refused or told."""
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "prompt_logprobs": 2}
    answer = served.http.post("/v1/chat/completions", json=chat)
    told = "prompt_logprobs" in answer.headers.get("x-tokenmill-ignored", "") or "prompt_logprobs" in answer.text
    assert answer.status_code == 400 or told, answer.text
    options = {"model": None, "prompt": "Hi", "options": {"num_ctx": 10**9, "num_predict": 2}, "stream": False}
    answer = served.http.post("/api/generate", json=options)
    assert answer.status_code == 400 or "num_ctx" in answer.headers.get("x-tokenmill-ignored", ""), answer.headers
