"""Chat templates that come with a checkpoint and hang whoever renders them (S7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from benchmarks import attack_client as client
from benchmarks.tenant_keys import key_of
from tests.attacks.conftest import AttackedServer, chat_model
from tests.attacks.tenant import Prober, streaming

# Lists that hold themselves twice, forty times over: small in memory, endless for whoever walks through them.
_DOUBLED = (
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(40) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)
HOSTILE = {
    "compared": _DOUBLED + "{{ ns.a == ns.b }}",
    "dumped": _DOUBLED + "{{ ns.a | tojson }}",
    "printed": _DOUBLED + "{{ ns.a }}",
    "sorted": _DOUBLED + "{{ [ns.a, ns.b] | sort }}",
    "contained": _DOUBLED + "{{ ns.a in [ns.b] }}",
    "powers": "{% set ns = namespace(n=7) %}{% for i in range(100000) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "text": "{% set ns = namespace(t='x' * 1000) %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "replaced": "{{ ('a' * 90000) | replace('a', 'b' * 90000) | length }}",
    "attribute": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
}
_ALL = "{% set k = messages[0].content %}" + "".join(
    f"{{% if k == '{name}' %}}{source}{{% endif %}}" for name, source in HOSTILE.items()
)


def test_s7_a_hostile_template_costs_nobody_else_anything(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    """One checkpoint with all of them: the message says which one is rendered. Each kind once: work inside one
    operation, memory, an escape, endless calls."""
    model = chat_model(model_path("stories15m"), tmp_path / "hostile", _ALL)
    server = AttackedServer(model, tmp_path / "keys.json")
    try:
        with streaming(server.url, key_of("good")), Prober(server.url, key_of("other")) as prober:
            statuses = _chats(server, ("compared", "text", "attribute", "recursion"))
        assert all(status in ("400", "413", "429") for status in statuses.values()), statuses
        assert not prober.failures
        assert prober.longest < 5.0, f"the event loop stood still for {prober.longest:.1f} s"
    finally:
        server.stop()


@pytest.mark.slow
def test_s7_every_hostile_template_of_the_corpus(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    model = chat_model(model_path("stories15m"), tmp_path / "hostile", _ALL)
    server = AttackedServer(model, tmp_path / "keys.json")
    try:
        with streaming(server.url, key_of("good")), Prober(server.url, key_of("other")) as prober:
            statuses = _chats(server, HOSTILE)
        assert all(status in ("200", "400", "413", "429") for status in statuses.values()), statuses
        assert prober.longest < 5.0
    finally:
        server.stop()


def test_s7_variables_of_the_client_cost_nobody_anything(served: AttackedServer) -> None:
    nested: list[object] = []
    for _ in range(400):
        nested = [nested]
    bodies = [
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "chat_template_kwargs": {"x": value}}
        for value in (nested, ["y"] * 500_000, {f"k{number}": number for number in range(100_000)})
    ]
    with streaming(served.url, key_of("good")), Prober(served.url, key_of("other")) as prober:
        statuses = client.in_turn(served.target(), "/v1/chat/completions", bodies)
    assert set(statuses) <= {"200", "400", "413", "429"}, statuses
    assert prober.longest < 5.0


def _chats(server: AttackedServer, names: Iterable[str]) -> dict[str, str]:
    """The status of each, up to the first that is not answered."""
    statuses: dict[str, str] = {}
    with server.target().http(60) as http:
        for name in names:
            body = {"messages": [{"role": "user", "content": name}], "max_tokens": 1}
            statuses[name] = client.post(http, "/v1/chat/completions", body)
            if statuses[name] == "late":
                break
    return statuses
