"""Host and Origin of requests to a local server without keys, and keys that are guessed."""

from __future__ import annotations

import pytest

from tokenmill.serve.transport.key_guessing import _MAX_ADDRESSES, WrongKeys
from tokenmill.serve.transport.site import SiteCheck, host_name


def _code(check: SiteCheck, method: str = "POST", **headers: str) -> str | int | None:
    refusal = check.refusal(method, {name.replace("_", "-"): value for name, value in headers.items()})
    return None if refusal is None else refusal.code


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "LOCALHOST:1", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000", "a.localhost"]
)
def test_loopback_names_are_served(host: str) -> None:
    assert _code(SiteCheck(True, (), ()), host=host) is None


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost@evil.example", "[::1", "10.0.0.1"],
)
def test_other_names_are_refused_on_a_local_server_only(host: str) -> None:
    assert _code(SiteCheck(True, (), ()), "GET", host=host) == "host_not_allowed"
    assert _code(SiteCheck(False, (), ()), "GET", host=host) is None


def test_allowed_hosts_are_a_list_wherever_it_is_given() -> None:
    for local in (True, False):
        check = SiteCheck(local, ("API.example", "*.corp.example"), ())
        assert _code(check, host="api.example:443") is None
        assert _code(check, host="a.b.corp.example") is None
        assert _code(check, host="corp.example") == "host_not_allowed"
        assert _code(check, host="localhost") == (None if local else "host_not_allowed")
    assert _code(SiteCheck(True, ("*",), ()), host="anything") is None


def test_browsers_of_another_origin_may_not_post() -> None:
    check = SiteCheck(True, (), ("https://app.example",))
    host = "localhost:8000"
    assert _code(check, host=host) is None  # not a browser
    assert _code(check, host=host, origin="http://localhost:8000") is None
    assert _code(check, host=host, origin="https://app.example") is None
    for origin in ("https://evil.example", "null", "http://localhost:3000", "http://localhost:8000.evil.example"):
        assert _code(check, host=host, origin=origin) == "origin_not_allowed"
        assert _code(check, "GET", host=host, origin=origin) is None
    assert _code(check, host=host, sec_fetch_site="cross-site") == "origin_not_allowed"
    assert _code(SiteCheck(True, (), ("*",)), host=host, origin="null") is None
    assert _code(SiteCheck(False, (), ()), host=host, origin="null") is None


@pytest.mark.parametrize(
    ("host", "name"), [("a.example.", "a.example"), ("[::1]:80", "::1"), ("a:b@c", ""), ("[::g]", ""), ("", "")]
)
def test_host_names_are_read_strictly(host: str, name: str) -> None:
    assert host_name(host) == name


def test_wrong_keys_are_slow_after_a_few_and_forgiven_with_time() -> None:
    wrong = WrongKeys(3)
    assert [wrong.record("a", 1.0) for _ in range(3)] == [0.0] * 3
    assert wrong.record("a", 1.0) == pytest.approx(20.0)
    assert wrong.record("b", 1.0) == 0.0
    assert wrong.record("a", 22.0) == 0.0
    assert wrong.record("a", 22.0) > 0.0
    assert WrongKeys(0).record("a", 1.0) == 0.0


def test_the_table_of_addresses_is_bounded() -> None:
    wrong = WrongKeys(1)
    for number in range(_MAX_ADDRESSES + 50):
        wrong.record(f"address-{number}", 1.0)
    assert len(wrong) == _MAX_ADDRESSES
    assert wrong.record("address-0", 1.0) == 0.0  # forgotten
    assert wrong.record(f"address-{_MAX_ADDRESSES + 49}", 1.0) > 0.0
