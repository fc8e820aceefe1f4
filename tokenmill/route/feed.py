"""What one model of a replica tells: its pages in order, its load, how its prompts become tokens.

Answers of the replica's event route go in; numbers that are missing, or another feed (the engine restarted), make the
next answer bring all names. Pages of all models are kept together by the target: a page's name begins with a hash of
its model, so that they never meet. Pure bookkeeping; replica.py does the asking.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.route.target import LoadReport, Pages

_TAKES = ("ready", "asleep", "stopped")  # states of an engine that a request wakes up


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is needed to tokenize as the replica does."""

    path: str
    load_format: str
    chat_template: str
    names: tuple[str, ...]


class ModelFeed:
    def __init__(self, name: str | None, pages: Pages) -> None:
        """`name`: as the replica calls the model; None for its first. `pages`: of the whole replica."""
        self.name = name
        self.root, self.page_size = b"", 0
        self.model: ServedModel | None = None
        self.load = LoadReport()
        self.state = "not reached yet"
        self._pages = pages
        self._names: set[bytes] = set()  # of this model's pages
        self._feed, self._sequence = "", 0

    @property
    def takes_requests(self) -> bool:
        return self.state in _TAKES

    def query(self, wait: float) -> dict[str, str | int | float]:
        asked: dict[str, str | int | float] = {"feed": self._feed, "after": self._sequence, "wait": wait}
        return asked if self.name is None else {**asked, "model": self.name}

    def start_over(self) -> None:
        """The next answer shall have all names."""
        self._feed, self._sequence = "", 0

    def forget(self) -> None:
        """The replica no longer has this model."""
        self._pages.apply((), self._names)
        self._names = set()

    def take(self, told: Mapping[str, Any]) -> tuple[bool, bool]:
        """An answer of the replica -> (whether its engine is another one, whether numbers were missing). Raises
        KeyError, TypeError or ValueError if it makes no sense."""
        load = told["load"]
        report = LoadReport(
            **{name: load[name] for name in ("slots", "active", "waiting", "waiting_tokens")},
            prompt_token_seconds=float(load["prompt_token_seconds"]),
            service_seconds=float(load["service_seconds"]),
            kv_usage=float(load["kv_usage"]),
        )
        is_new = is_gap = False
        if "snapshot" in told:
            is_new = told["feed"] != self._feed
            self._take_snapshot(told)
        elif told["feed"] == self._feed and self._in_order(told):
            for change in told["changes"]:
                stored = [page_name(each[0]) for each in change["stored"]]
                removed = [page_name(each) for each in change["removed"]]
                self._names.update(stored)
                self._names.difference_update(removed)
                self._pages.apply(stored, removed)
            self._sequence = told["sequence"]
        else:
            is_gap = True
            self.start_over()
        self.load, self.state = report, str(load["state"])
        return is_new, is_gap

    def _take_snapshot(self, told: Mapping[str, Any]) -> None:
        model = told["model"]
        names = {page_name(each[0]) for each in told["snapshot"]}
        served = ServedModel(
            model["path"], model["load_format"], model["chat_template"], tuple(map(str, model["names"]))
        )
        self.root, self.page_size, self.model = page_name(told["root"]), int(told["page_size"]), served
        self._pages.apply(names - self._names, self._names - names)
        self._names = names
        # A root that is not known yet comes with a later snapshot.
        self._feed, self._sequence = (told["feed"], told["sequence"]) if self.root else ("", 0)

    def _in_order(self, told: Mapping[str, Any]) -> bool:
        numbers = [change["sequence"] for change in told["changes"]]
        return numbers == list(range(self._sequence + 1, told["sequence"] + 1))


def total_load(feeds: Iterable[ModelFeed]) -> LoadReport:
    """Of a replica: its models share the machine, so what any of them has to do is in the way of the others."""
    loads = [feed.load for feed in feeds]
    return LoadReport(
        slots=sum(each.slots for each in loads),
        active=sum(each.active for each in loads),
        waiting=sum(each.waiting for each in loads),
        waiting_tokens=sum(each.waiting_tokens for each in loads),
        prompt_token_seconds=max(each.prompt_token_seconds for each in loads),
        service_seconds=max(each.service_seconds for each in loads),
        kv_usage=max(each.kv_usage for each in loads),
    )


def page_name(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
