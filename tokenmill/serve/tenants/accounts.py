"""What each key has used and what that cost, by model; and what is left of its budget.

An account belongs to the owner that a key stands for, so it goes on when keys are reloaded or, through usage_file.py,
when the server is started again. Device time arrives from the engine by tenant, which is the name of a client; tokens
come with the requests that end. Metrics have a bounded number of labels. Pure bookkeeping: the caller passes the time,
which is that of the calendar unless a comment says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime

import msgspec

from tokenmill.serve.errors import ApiError
from tokenmill.serve.tenants.keys import Client
from tokenmill.serve.tenants.prices import Prices

OTHER_KEYS = "other"  # label of the keys beyond the bound
OTHER_MODELS = "other"  # adapters of an account beyond the bound, added up
_MAX_MODELS = 256  # names of an account: adapters come and go, and a key may choose their names
_MAX_WAIT = 3600.0  # of Retry-After
_CODE = "insufficient_quota"  # OpenAI's

# name of a metric, amount, label
Count = Callable[[str, float, str], None]


class Usage(msgspec.Struct):
    """Of one key and one model."""

    requests: int = 0  # prompts
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of them
    completion_tokens: int = 0
    device_seconds: float = 0.0
    cost: float = 0.0  # dollars


class Account(msgspec.Struct):
    name: str = ""  # of the key, when it was last used
    models: dict[str, Usage] = {}
    period_began: float = 0.0  # of the budget
    period_cost: float = 0.0  # dollars since then

    @property
    def cost(self) -> float:
        return sum(each.cost for each in self.models.values())


class DeviceTime(msgspec.Struct):
    """Of the device: what keys have used of it, and what nobody has."""

    busy_seconds: float = 0.0
    idle_seconds: float = 0.0
    busy_cost: float = 0.0  # dollars
    idle_cost: float = 0.0


class Accounts:
    def __init__(
        self,
        model: str,
        prices: Prices | None,
        count: Count,
        max_labels: int,
        began: float,
        beside: Accounts | None = None,
    ) -> None:
        """`count` adds to a metric that has a label for the key; at most `max_labels` keys have one of their own.
        `began`: since when the device is paid for, by the monotonic clock. `beside`: the accounts of another model of
        this server, which hold what keys have used of both: budgets are for all models together."""
        self._head: Accounts = self if beside is None else beside._head
        self.prices = prices
        self.by_owner: dict[str, Account] = {}
        self.device = DeviceTime()
        self.changed = False  # since this was last set back
        self._model = model
        self._count = count
        self._max_labels = max_labels
        self._labels: set[str] = set()
        self._clients: dict[str, Client] = {}  # by name: those that have sent requests
        self._measured = began  # up to when idle time is counted
        self._busy = 0.0  # seconds since then

    # --- what was used ---

    def open(self, client: Client) -> None:
        """A request of the client goes to the engine: device time may come under its name."""
        self._head._clients[client.name] = client
        self.account(client).name = client.name

    @property
    def clients(self) -> list[Client]:
        """Those that have sent requests."""
        return list(self._head._clients.values())

    def add_time(self, seconds_by_tenant: Mapping[str, float], now: float) -> None:
        for tenant, seconds in seconds_by_tenant.items():
            client = self._head._clients[tenant]
            cost = self.prices.of_time(seconds) if self.prices is not None else 0.0
            self._head._busy += seconds
            self._head.device.busy_seconds += seconds
            self._head.device.busy_cost += cost
            self.usage(client).device_seconds += seconds
            self._count("key_device_seconds", seconds, self.label(client))
            self._charge(client, cost, now)

    def measure(self, now: float) -> DeviceTime:
        """With the idle time up to `now`, by the monotonic clock. Steps are known when they end: what a step of now
        takes counts as idle until then, and is taken off later."""
        idle = now - self._head._measured - self._head._busy
        if idle > 0 and self.prices is not None and self.prices.by_device:
            self._head.device.idle_seconds += idle
            self._head.device.idle_cost += self.prices.of_time(idle)
            self._head._measured, self._head._busy = now, 0.0
        return self._head.device

    def add_request(
        self, client: Client, prompt: int, cached: int, output: int, now: float, model: str | None = None
    ) -> None:
        """A prompt whose computation had begun has ended, by itself or not. `model`: an adapter, if not the base."""
        usage, label = self.usage(client, model), self.label(client)
        usage.requests += 1
        usage.prompt_tokens += prompt
        usage.cached_tokens += cached
        usage.completion_tokens += output
        for name, amount in (("requests", 1), ("prompt_tokens", prompt), ("generation_tokens", output)):
            self._count(f"key_{name}", amount, label)
        cost = self.prices.of_tokens(prompt, cached, output) if self.prices is not None else 0.0
        self._charge(client, cost, now, model)

    def account(self, client: Client) -> Account:
        return self._head.by_owner.setdefault(client.owner, Account(client.name))

    def usage(self, client: Client, model: str | None = None) -> Usage:
        """Of an adapter, or of the model that is served; of adapters beyond the bound together."""
        models = self.account(client).models
        if model is not None and model not in models and len(models) >= _MAX_MODELS:
            model = OTHER_MODELS
        return models.setdefault(model or self._model, Usage())

    def label(self, client: Client) -> str:
        """Of the client in metrics: its name, for as many as there may be; a label once given stays."""
        if client.name in self._head._labels:
            return client.name
        if len(self._head._labels) >= self._max_labels:
            return OTHER_KEYS
        self._head._labels.add(client.name)
        return client.name

    # --- budgets ---

    def spent(self, client: Client, now: float) -> float:
        """Dollars in the current period of its budget."""
        account = self.account(client)
        seconds = client.budget_seconds
        if seconds and now >= account.period_began + seconds:
            # Periods follow each other without gaps from the first request on.
            passed = (now - account.period_began) // seconds
            account.period_began = account.period_began + passed * seconds if account.period_began else now
            account.period_cost = 0.0
        return account.period_cost

    def within_budget(self, client: Client, now: float) -> bool:
        return not client.max_budget or self.spent(client, now) < client.max_budget

    def check_budget(self, client: Client, now: float) -> None:
        """Raise ApiError if the key has spent what it may."""
        if self.within_budget(client, now):
            return
        reset, name = self.resets_at(client), f"key '{client.name}'"
        renewed = "" if reset is None else f"; it is renewed at {_moment(reset)}"
        problem = f"You exceeded your current quota: {name} has spent its budget of ${client.max_budget:g}{renewed}"
        wait = None if reset is None else min(max(1.0, reset - now), _MAX_WAIT)
        raise ApiError(429, problem, code=_CODE, retry_after=wait)

    def resets_at(self, client: Client) -> float | None:
        """When its budget is whole again; None: never."""
        return self.account(client).period_began + client.budget_seconds if client.budget_seconds else None

    def _charge(self, client: Client, cost: float, now: float, model: str | None = None) -> None:
        self._head.changed = True
        if not cost:
            return
        self.spent(client, now)  # a period that is over ends before
        self.account(client).period_cost += cost
        self.usage(client, model).cost += cost
        self._count("key_cost_dollars", cost, self.label(client))


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
