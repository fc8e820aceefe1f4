"""Which roles make sense, who may move pages, and what of a body is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.engine.building import make_request
from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.serve.callers import PageMoves
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.errors import ApiError
from tokenmill.serve.roles import DEFAULT_LISTEN, Roles, with_role
from tokenmill.serve.tenants.keys import Client

_PEER = "10.0.0.5:7800"


def _roles(options: dict[str, Any], **config: Any) -> Roles:
    return Roles(ServeConfig(**config), options, SimpleNamespace())  # type: ignore[arg-type]


def _body(**fields: Any) -> Any:
    return SimpleNamespace(**({"lease": "lease-01", "address": "", "ttl": 30.0, "salt": None} | fields))


@pytest.mark.parametrize(
    ("config", "engine", "problem"),
    [
        ({"role": "decode"}, {}, "--kv-peer"),
        ({"role": "decode"}, {"kv_peer": (_PEER,), "kv_listen": _PEER}, "--role both"),
        ({"role": "prefill", "prefill_url": ("http://a",)}, {}, "--role both"),
        ({"prefill_url": ("http://a",)}, {}, "one --kv-peer for each"),
        ({"role": "decode", "prefill_url": ("10.0.0.5",)}, {"kv_peer": (_PEER,)}, "http://"),
    ],
)
def test_roles_that_make_no_sense(config: dict[str, Any], engine: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        with_role(ServeConfig(**config), EngineConfig(**engine), 1)


def test_roles_are_of_one_model_and_listen_by_default() -> None:
    assert with_role(ServeConfig(role="prefill"), EngineConfig(), 1).kv_listen == DEFAULT_LISTEN
    assert with_role(ServeConfig(), EngineConfig(), 3) == EngineConfig()
    with pytest.raises(UserError, match="one model"):
        with_role(ServeConfig(role="prefill"), EngineConfig(), 2)


def test_only_some_keys_move_pages_and_only_from_named_peers() -> None:
    roles = _roles({"kv_peer": [_PEER], "kv_listen": ""})
    stranger, trusted, alone = Client("a"), Client("b", kv_transfers=True), Client("c")
    for client in (stranger, trusted):
        client.share_with(2)
    source = _body(address=_PEER)
    with pytest.raises(ApiError) as refused:
        roles.read(stranger, source, None)
    assert refused.value.status == 403
    for client in (trusted, alone):
        moves = roles.read(client, source, None)
        assert moves.source is not None
        assert (moves.source.name, moves.source.address) == ("lease-01", _PEER)
    for fields in ({"address": "169.254.169.254:80"}, {"address": ""}, {"address": _PEER, "lease": "no/such lease"}):
        with pytest.raises(ApiError) as refused:
            roles.read(trusted, _body(**fields), None)
        assert refused.value.status == 400
    with pytest.raises(ApiError, match="--role prefill"):
        roles.read(trusted, None, _body())
    assert not roles.read(stranger, None, None)


def test_a_prefill_server_publishes_and_does_nothing_else() -> None:
    roles = _roles({"kv_listen": _PEER}, role="prefill")
    moves = roles.read(Client(), None, _body(salt="00ff", ttl=5.0))
    request = make_request(20)
    roles.put_into(request, moves, 1)
    assert request.publishes is not None
    assert (request.publishes.name, request.publishes.ttl, request.cache_salt) == ("lease-01", 5.0, b"\x00\xff")
    for fields in ({"salt": "xy"}, {"ttl": 0.0}, {"ttl": 1e9}, {"salt": "00" * 32}):
        with pytest.raises(ApiError):
            roles.read(Client(), None, _body(**fields))
    with pytest.raises(ApiError, match="computes prompts for others"):
        roles.put_into(make_request(20), PageMoves(), 1)
    with pytest.raises(ApiError, match="one prompt"):
        roles.put_into(make_request(20), moves, 2)


def test_long_prompts_go_to_the_least_loaded_peer() -> None:
    peers = [_PEER, "10.0.0.6:7800"]
    config = {"role": "decode", "prefill_url": ("http://a", "http://b"), "split_min_tokens": 16}
    roles = _roles({"kv_peer": peers}, **config)
    short, long = make_request(16), make_request(40)
    for request in (short, long):
        roles.put_into(request, PageMoves(), 1)
    assert short.source is None
    assert long.source is not None
    assert (long.source.min_tokens, long.source.on_demand) == (16, True)
    roles._loads[peers[0]] = 100
    for _ in range(5):
        request = make_request(40)
        roles.put_into(request, PageMoves(), 1)
        assert request.source is not None
        assert request.source.address == peers[1]
