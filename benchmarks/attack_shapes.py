"""The attacks of the suite: each is one round of hostile requests with a tenant's key, or with none at all.

tests/attacks runs a round of each and asserts what the server answers; under_attack.py repeats rounds while it measures
a well-behaved tenant. A round counts the statuses it got; "cut" is a connection that the server closed, "late" an
answer that did not come in time.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks import attack_payloads as payloads
from benchmarks.attack_client import Statuses, Target, answer_to, at_once, in_turn, request_bytes

_LONG = {"prompt": "Once upon a time", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


# --- grammars ---


def grammar_chain(target: Target) -> Statuses:
    """S1: a chain of terminals that overflows a stack."""
    return in_turn(target, "/v1/completions", [payloads.STORY | {"guided_grammar": payloads.chained_terminals()}])


def grammar_newlines(target: Target) -> Statuses:
    """S2: empty lines that are read quadratically."""
    return in_turn(target, "/v1/completions", [payloads.STORY | {"guided_grammar": payloads.newlines()}])


def grammar_corpus(target: Target, without: Collection[str] = ()) -> Statuses:
    """`without`: names of payloads that are left out."""
    corpora = (("guided_grammar", payloads.GRAMMARS), ("guided_regex", payloads.EXPRESSIONS))
    bodies = [
        payloads.STORY | {field: payload}
        for field, corpus in (*corpora, ("guided_json", payloads.SCHEMAS))
        for name, payload in corpus.items()
        if name not in without
    ]
    return at_once(target, "/v1/completions", bodies)


# --- bodies ---


def mixed_ids(target: Target) -> Statuses:
    """S3: one wrong element after many right ones."""
    return in_turn(target, "/v1/completions", [payloads.mixed_ids()])


def empty_messages(target: Target) -> Statuses:
    """S10: more messages than any conversation has."""
    return in_turn(target, "/v1/chat/completions", [payloads.empty_messages()])


def body_corpus(target: Target) -> Statuses:
    return in_turn(target, "/v1/completions", payloads.BODIES.values())


def prompt_logprobs(target: Target) -> Statuses:
    """R9: log-probabilities of 64 long prompts, twenty for each token."""
    prompts = [[300 + number, *range(300, 550)] for number in range(64)]
    return in_turn(target, "/v1/completions", [{"prompt": prompts, "max_tokens": 1, "prompt_logprobs": 20}])


def tokenize_flood(target: Target) -> Statuses:
    """S9: the longest texts that are let in, all to be tokenized."""
    text = "unmetered words cost " * 90_000
    return at_once(target, "/tokenize", [{"prompt": text}] * 8)


def long_prompts(target: Target) -> Statuses:
    """S9: prompts far beyond the context."""
    return at_once(target, "/v1/completions", [{"prompt": "far too long " * 150_000, "max_tokens": 1}] * 8)


# --- shares ---


def priority_flood(target: Target) -> Statuses:
    """S4: everything as urgent as a body can say."""
    return at_once(target, "/v1/completions", [_LONG | {"priority": -100}] * 64)


def sequence_flood(target: Target) -> Statuses:
    """S4: few requests, each with as many sequences as a body can ask for."""
    prompts = [f"Story number {number}" for number in range(64)]
    return at_once(target, "/v1/completions", [{**_LONG, "prompt": prompts, "n": 16, "max_tokens": 64}] * 4)


def pin_flood(target: Target, count: int = 60) -> Statuses:
    """S4: prompts that ask to stay in the cache for ever."""
    control = {"cache_control": {"type": "pin"}}
    bodies = [{"prompt": [300 + number, *range(400, 600)], "max_tokens": 1, **control} for number in range(count)]
    return in_turn(target, "/v1/completions", bodies)


def queue_flood(target: Target, max_tokens: int = 200) -> Statuses:
    """R2: one tenant alone wants the whole queue."""
    return at_once(target, "/v1/completions", [_LONG | {"max_tokens": max_tokens}] * 150)


# --- connections ---


@contextlib.contextmanager
def open_connections(target: Target, count: int, data: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections that have sent `data` and then nothing; those that the server refuses are left out."""
    connections = []
    try:
        for _ in range(count):
            with contextlib.suppress(OSError):
                connection = target.connect(5.0)
                connections.append(connection)
                connection.sendall(data)
        yield connections
    finally:
        for connection in connections:
            connection.close()


def _dribble(target: Target, start: bytes, piece: bytes, count: int, seconds: float) -> Statuses:
    """Many connections that send one piece now and then; how many the server closed meanwhile."""
    cut = 0
    with open_connections(target, count, start) as connections:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.sendall(piece)
            time.sleep(0.25)
        for connection in connections:
            connection.setblocking(False)
            try:
                cut += not connection.recv(1)
            except BlockingIOError:
                pass
            except OSError:
                cut += 1
        return Counter({"cut": cut, "open": len(connections) - cut})


def slow_heads(target: Target, count: int = 400, seconds: float = 3.0) -> Statuses:
    """S6, slowloris: heads that never end."""
    return _dribble(target, b"GET /version HTTP/1.1\r\nHost: localhost\r\nX-A: ", b"a", count, seconds)


def slow_bodies(target: Target, count: int = 200, seconds: float = 3.0) -> Statuses:
    """S6: bodies that never end."""
    head = b"POST /v1/completions HTTP/1.1\r\n" + target.head() + b"Content-Type: application/json\r\n"
    return _dribble(target, head + b"Content-Length: 1000000\r\n\r\n{", b" ", count, seconds)


def idle_connections(target: Target, count: int = 3000, seconds: float = 2.0) -> Statuses:
    """S6: connections that say nothing."""
    with open_connections(target, count) as connections:
        time.sleep(seconds)
        return Counter({"open": len(connections)})


def huge_headers(target: Target, size: int = 8 << 20) -> Statuses:
    """S6: a header of megabytes, and a hundred thousand small ones."""
    many = b"".join(b"X-%d: y\r\n" % number for number in range(100_000))
    shapes = (b"X-Large: " + b"a" * size, many, b"Cookie: " + b"a=b; " * 200_000)
    answers = [answer_to(target, b"GET /version HTTP/1.1\r\n" + target.head() + each + b"\r\n\r\n") for each in shapes]
    return Counter(answer[9:12].decode("latin-1") or "cut" for answer in answers)


def smuggling(target: Target) -> Statuses:
    answers = [answer_to(target, data.replace(b"{head}", target.head()), 0.5) for data in payloads.SMUGGLING.values()]
    return Counter(answer[9:12].decode("latin-1") or "cut" for answer in answers)


def slow_readers(target: Target, count: int = 16, seconds: float = 4.0) -> Statuses:
    """R8: streams whose clients do not read."""
    whole = request_bytes(target, "/v1/completions", {**_LONG, "n": 16, "stream": True, "logprobs": 20})
    with open_connections(target, 0) as connections:
        for _ in range(count):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connections.append(connection)
            with contextlib.suppress(OSError):
                connection.settimeout(5.0)
                if target.source:
                    connection.bind((target.source, 0))
                connection.connect(target.address)
                connection.sendall(whole)
        time.sleep(seconds)
        return Counter({"open": len(connections)})


# --- storms ---


def cancel_storm(target: Target) -> Statuses:
    """Requests that are left as soon as they are sent, streams after the first token."""
    statuses: Statuses = Counter()
    for number in range(60):
        try:
            with (
                target.http(0.02 if number % 2 else 5.0) as http,
                http.stream("POST", "/v1/completions", json={**_LONG, "n": 4, "stream": True}) as answer,
            ):
                statuses[str(answer.status_code)] += 1
                next(answer.iter_lines(), None)
        except httpx.HTTPError:
            statuses["left"] += 1
    return statuses


def reconnect_storm(target: Target) -> Statuses:
    """A thousand connections, each for one request or for none."""
    statuses: Statuses = Counter()
    request = b"GET /version HTTP/1.1\r\n" + target.head() + b"Connection: close\r\n\r\n"
    for number in range(1000):
        with contextlib.suppress(OSError), target.connect(5.0) as connection:
            if number % 2:
                connection.sendall(request)
                statuses[connection.recv(12)[9:12].decode("latin-1") or "cut"] += 1
    return statuses


def key_guessing(target: Target) -> Statuses:
    """Keys that are wrong: random ones, long ones, and neighbours of a real one. "cut": no answer within seconds."""
    real = target.key or "k"
    wrong = [b"guess-%d" % number for number in range(60)]
    wrong += [b"a" * 50_000, "\u00e4\u00f6".encode(), b" ", real[:-1].encode(), real.encode() + b"x"]
    statuses: list[str] = []

    def guess(key: bytes) -> None:
        try:
            answer = http.get("/v1/models", headers={b"Authorization": b"Bearer " + key})
            statuses.append(str(answer.status_code))
        except httpx.HTTPError:
            statuses.append("cut")

    with target.http(5.0, key=False) as http:
        threads = [threading.Thread(target=guess, args=(key,)) for key in wrong]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return Counter(statuses)


@dataclass(frozen=True, slots=True)
class Attack:
    name: str
    finding: str
    round: Callable[[Target], Statuses]


ATTACKS = tuple(
    Attack(name, finding, function)
    for finding, name, function in (
        ("S1", "chained terminals", grammar_chain),
        ("S2", "grammar of newlines", grammar_newlines),
        ("S1, R2", "grammar corpus", grammar_corpus),
        ("S3", "mixed token ids", mixed_ids),
        ("S10", "300,000 messages", empty_messages),
        ("S3", "body corpus", body_corpus),
        ("R9", "prompt_logprobs", prompt_logprobs),
        ("S9", "tokenize", tokenize_flood),
        ("S9", "prompts beyond the context", long_prompts),
        ("S4", "priority", priority_flood),
        ("S4", "sequences", sequence_flood),
        ("S4", "pins", pin_flood),
        ("R2", "queue", queue_flood),
        ("S6", "slow heads", slow_heads),
        ("S6", "slow bodies", slow_bodies),
        ("S6", "idle connections", idle_connections),
        ("S6", "huge headers", huge_headers),
        ("S6", "smuggling", smuggling),
        ("R8", "slow readers", slow_readers),
        ("-", "cancel storm", cancel_storm),
        ("-", "reconnect storm", reconnect_storm),
        ("-", "key guessing", key_guessing),
    )
)


def repeat(name: str, target: Target, ready: Any, stopping: Any, rounds: Any) -> None:
    """Rounds of one attack until `stopping` is set; for a process of its own. `rounds` counts them. Attackers bring
    machines of their own: here theirs takes what the server leaves of this one."""
    _yield_processor()
    attack = next(each for each in ATTACKS if each.name == name)
    ready.set()
    while not stopping.is_set():
        with contextlib.suppress(OSError, httpx.HTTPError):
            attack.round(target)
        rounds.value += 1


def _yield_processor() -> None:
    os.nice(19)
    with contextlib.suppress(OSError):  # Linux may share the processor among sessions first, whatever their niceness
        os.setsid()
        Path("/proc/self/autogroup").write_text("19")
