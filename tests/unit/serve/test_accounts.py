"""What keys spend: time and tokens in dollars, budgets and their periods, labels within their bound, the usage file."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import pytest

from tokenmill.errors import UserError
from tokenmill.serve import usage_file as usage_module
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.errors import ApiError
from tokenmill.serve.tenants import accounts as accounts_module
from tokenmill.serve.tenants.accounts import OTHER_KEYS, OTHER_MODELS, Accounts
from tokenmill.serve.tenants.key_file import load_keys
from tokenmill.serve.tenants.keys import Client
from tokenmill.serve.tenants.prices import Prices, prices_of
from tokenmill.serve.usage_file import UsageFile

_DAY = 86400.0
_NOW = 1_800_000_000.0
_PRICES = Prices(3.6)  # a thousandth of a dollar per second


class Counts:
    def __init__(self) -> None:
        self.values: defaultdict[tuple[str, str], float] = defaultdict(float)

    def __call__(self, name: str, amount: float, label: str) -> None:
        self.values[name, label] += amount


def client_of(name: str, **settings: object) -> Client:
    client = Client(name, **settings)  # type: ignore[arg-type]
    client.owner = f"name {name}"
    return client


def accounts_of(prices: Prices | None = _PRICES, max_labels: int = 10) -> tuple[Accounts, Counts]:
    counts = Counts()
    return Accounts("m", prices, counts, max_labels, 0.0), counts


def test_device_time_is_paid_for_and_what_nobody_used_is_listed_apart() -> None:
    accounts, counts = accounts_of()
    alice, bob = client_of("alice"), client_of("bob")
    for client in (alice, bob):
        accounts.open(client)
    accounts.add_time({"alice": 10.0, "bob": 5.0}, _NOW)
    accounts.add_time({"alice": 2.5}, _NOW)
    device = accounts.measure(20.0)
    assert (device.busy_seconds, device.idle_seconds) == (17.5, 2.5)
    assert device.busy_cost + device.idle_cost == pytest.approx(20 * 0.001)
    assert accounts.account(alice).cost == pytest.approx(0.0125)
    assert accounts.account(alice).cost + accounts.account(bob).cost == pytest.approx(device.busy_cost)
    assert counts.values["key_cost_dollars", "alice"] == pytest.approx(0.0125)
    assert counts.values["key_device_seconds", "bob"] == 5.0
    accounts.add_request(bob, 100, 40, 7, _NOW)
    assert accounts.usage(bob).cost == pytest.approx(0.005)  # tokens are free here
    assert accounts.usage(bob).cached_tokens == 40
    assert counts.values["key_generation_tokens", "bob"] == 7


def test_a_step_that_is_still_computed_is_taken_off_idle_time_later() -> None:
    accounts, _ = accounts_of()
    accounts.open(client_of("a"))
    assert accounts.measure(10.0).idle_seconds == 10.0  # in fact it has computed for the last 4 s
    accounts.add_time({"a": 5.0}, _NOW)
    assert accounts.measure(11.0).idle_seconds == 10.0
    device = accounts.measure(20.0)
    assert device.busy_seconds + device.idle_seconds == pytest.approx(20.0)


def test_tokens_may_have_prices_instead() -> None:
    config = ServeConfig(input_token_price=2, cached_token_price=0.5, output_token_price=8)
    prices = prices_of(config, "cpu")
    assert prices is not None
    accounts, counts = accounts_of(prices)
    alice = client_of("alice")
    accounts.open(alice)
    accounts.add_request(alice, 1000, 200, 100, _NOW)
    expected = (800 * 2 + 200 * 0.5 + 100 * 8) / 1e6
    assert accounts.account(alice).cost == pytest.approx(expected)
    assert counts.values["key_cost_dollars", "alice"] == pytest.approx(expected)
    assert accounts.measure(50.0).idle_cost == 0.0
    as_others = prices_of(ServeConfig(input_token_price=2), "cpu")
    assert as_others is not None
    assert as_others.of_tokens(10, 10, 0) == pytest.approx(20 / 1e6)


def test_the_price_of_the_device_is_stated_or_the_catalogs() -> None:
    assert prices_of(ServeConfig(), "cpu") is None
    assert prices_of(ServeConfig(price="2.5"), "cpu") == Prices(2.5, basis="stated with --price")
    assert ServeConfig(price=3).price == "3"  # type: ignore[arg-type]  # as a file has it
    found = prices_of(ServeConfig(price="catalog"), "cpu")
    assert found is not None
    assert found.hour is not None
    assert found.hour > 0
    assert "by memory" in found.basis
    for wrong in ("much", "-1", "nan", "inf"):
        with pytest.raises(UserError, match="dollars per hour"):
            ServeConfig(price=wrong)
    with pytest.raises(UserError, match="keep --price or the token prices"):
        ServeConfig(price="1", output_token_price=1)


def test_a_spent_budget_refuses_until_it_is_renewed() -> None:
    accounts, _ = accounts_of()
    alice = client_of("alice", max_budget=0.01, budget_duration="1d")
    accounts.open(alice)
    accounts.check_budget(alice, _NOW)
    accounts.add_time({"alice": 9.9}, _NOW)
    accounts.check_budget(alice, _NOW)
    accounts.add_time({"alice": 0.2}, _NOW + 5)
    with pytest.raises(ApiError) as caught:
        accounts.check_budget(alice, _NOW + 10)
    error = caught.value
    assert (error.status, error.code, error.type) == (429, "insufficient_quota", "insufficient_quota")
    assert error.message.startswith("You exceeded your current quota")
    assert error.headers() == {"retry-after": "3600", "x-should-retry": "false"}
    accounts.check_budget(alice, _NOW + _DAY)
    assert accounts.spent(alice, _NOW + _DAY) == 0.0
    assert accounts.account(alice).cost == pytest.approx(0.0101)  # the bill stays
    assert accounts.resets_at(alice) == _NOW + 2 * _DAY
    accounts.check_budget(alice, _NOW + 10.5 * _DAY)
    assert accounts.resets_at(alice) == _NOW + 11 * _DAY


def test_a_budget_without_a_duration_is_for_ever() -> None:
    accounts, _ = accounts_of()
    alice = client_of("alice", max_budget=0.001)
    accounts.open(alice)
    accounts.add_time({"alice": 1.0}, _NOW)
    with pytest.raises(ApiError) as caught:
        accounts.check_budget(alice, _NOW + 1000 * _DAY)
    assert caught.value.retry_after is None
    alice.adopt(client_of("alice", max_budget=0.002))  # as a reload of the keys does
    accounts.check_budget(alice, _NOW)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("max_budget: -1", "negative"),
        ("max_budget: 1, budget_duration: soon", "like 12h or 30d"),
        ("budget_duration: 30d", "with a max_budget"),
        ("max_budget: much", "wrong type"),
    ],
)
def test_a_budget_that_is_none_is_refused(tmp_path: Path, entry: str, message: str) -> None:
    (tmp_path / "keys.yaml").write_text(f"keys: [{{key: a, {entry}}}]")
    with pytest.raises(UserError, match=message):
        load_keys([], str(tmp_path / "keys.yaml"))


def test_the_number_of_labels_is_bounded() -> None:
    accounts, counts = accounts_of(max_labels=3)
    clients = [client_of(f"key-{number}") for number in range(50)]
    for client in clients:
        accounts.open(client)
        accounts.add_time({client.name: 1.0}, _NOW)
        accounts.add_request(client, 1, 0, 1, _NOW)
    labels = {label for _, label in counts.values}
    assert labels == {"key-0", "key-1", "key-2", OTHER_KEYS}
    assert counts.values["key_device_seconds", OTHER_KEYS] == 47.0
    accounts.add_time({"key-1": 1.0}, _NOW)  # a label once given stays
    assert counts.values["key_device_seconds", "key-1"] == 2.0
    assert sum(each.cost for each in accounts.by_owner.values()) == pytest.approx(0.051)


def test_names_of_adapters_in_an_account_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts_module, "_MAX_MODELS", 3)
    accounts, _ = accounts_of(Prices(input=1.0, output=0.0))
    alice = client_of("alice")
    accounts.open(alice)
    for number in range(50):
        accounts.add_request(alice, 1_000_000, 0, 1, _NOW, f"adapter-{number}")
    accounts.add_request(alice, 1_000_000, 0, 1, _NOW)  # the base has its own numbers all the same
    models = accounts.account(alice).models
    assert set(models) == {"adapter-0", "adapter-1", "adapter-2", OTHER_MODELS, "m"}
    assert sum(each.requests for each in models.values()) == 51
    assert accounts.account(alice).cost == pytest.approx(51.0)


def test_what_was_spent_outlasts_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "usage.json"
    monkeypatch.setattr(usage_module, "_SECONDS", 0.01)
    alice = client_of("alice", max_budget=0.01)

    async def serve(file: UsageFile) -> None:
        accounts, _ = accounts_of()
        file.load_into(accounts)
        accounts.open(alice)
        keeping = asyncio.create_task(file.keep(accounts))
        accounts.add_time({"alice": 6.0}, _NOW)
        async with asyncio.timeout(20):
            while accounts.changed or not path.exists():
                await asyncio.sleep(0.01)
        keeping.cancel()
        written = path.read_bytes()  # as a kill now would leave it
        accounts.add_request(alice, 10, 0, 5, _NOW)
        file.close(accounts)
        assert path.read_bytes() != written

    file = UsageFile(str(path))
    with pytest.raises(UserError, match="--usage-file"):
        UsageFile(str(path))
    asyncio.run(serve(file))
    asyncio.run(serve(UsageFile(str(path))))
    accounts, _ = accounts_of()
    UsageFile(str(path)).load_into(accounts)
    assert accounts.account(alice).cost == pytest.approx(0.012)
    assert accounts.usage(alice).completion_tokens == 10
    assert accounts.device.busy_seconds == 12.0
    with pytest.raises(ApiError):
        accounts.check_budget(alice, _NOW)
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", ["my notes", "[]", '{"version": 9}', '{"accounts": {"a": {"models": 3}}}'])
def test_a_file_that_is_none_of_ours_is_left_alone(tmp_path: Path, content: str) -> None:
    (tmp_path / "usage.json").write_text(content)
    for _ in range(2):  # also a second time: nothing is held
        with pytest.raises(UserError, match="not one of ours"):
            UsageFile(str(tmp_path / "usage.json"))
    assert (tmp_path / "usage.json").read_text() == content
    with pytest.raises(UserError, match="--usage-file"):
        UsageFile(str(tmp_path / "no such folder" / "usage.json"))
