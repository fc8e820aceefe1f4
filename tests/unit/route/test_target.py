"""What a router knows of a replica: pages, pending pages, load that requests own; and what policies make of it."""

from __future__ import annotations

from collections import Counter

import pytest

from tokenmill.engine.kv.page_names import page_names, salted_root
from tokenmill.engine.kv.prefix_tree import child_name, salt_key
from tokenmill.route.policies import POLICIES
from tokenmill.route.policies.least_wait import LeastWait
from tokenmill.route.prompt import Prompt
from tokenmill.route.target import PENDING_SECONDS, LoadReport, Target

_IDS = list(range(64))


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _targets(number: int, clock: _Clock | None = None) -> list[Target]:
    found = [Target(each, clock or _Clock()) for each in range(number)]
    for each in found:
        each.root, each.page_size = b"root", 16
        each.take(LoadReport(slots=4, prompt_token_seconds=0.001, service_seconds=1.0))
    return found


def test_names_are_those_of_the_tree() -> None:
    names = page_names(b"root", _IDS[:40], 16)
    assert names == [first := child_name(b"root", tuple(_IDS[:16])), child_name(first, tuple(_IDS[16:32]))]
    assert salted_root(b"root", b"salt") == child_name(b"root", salt_key(b"salt"))


def test_pages_are_pending_until_the_event_or_for_half_a_minute() -> None:
    clock = _Clock()
    target = _targets(1, clock)[0]
    prompt, names = Prompt(_IDS), page_names(b"root", _IDS, 16)
    ticket = target.open(prompt)
    assert (ticket.matched, ticket.uncached, target.matched_tokens(prompt)) == (0, 64, 64)
    target.pages.apply(names[:2], [])
    clock.now = PENDING_SECONDS + 1
    target.pages.drop_expired()
    assert target.matched_tokens(prompt) == 32
    assert not target.pages.pending
    target.pages.apply([], names[1:2])  # a page in the middle: nothing behind it is of use
    assert target.matched_tokens(prompt) == 16


def test_pages_of_a_request_that_failed_are_not_expected() -> None:
    target = _targets(1)[0]
    target.open(Prompt(_IDS)).close(failed=True)
    assert target.matched_tokens(Prompt(_IDS)) == 0


def test_load_belongs_to_open_requests() -> None:
    target = _targets(1)[0]
    first, second = target.open(Prompt(_IDS), 10), target.open(Prompt((), 100), 20)
    assert (target.outstanding, target.waiting, target.waiting_tokens) == (2, 2, 164)
    assert target.outstanding_tokens == 194
    first.started()
    first.started()
    target.take(LoadReport(slots=4))  # a report resets nothing
    assert (target.outstanding, target.waiting, target.waiting_tokens) == (2, 1, 100)
    for ticket in (first, first, second):
        ticket.close()
    assert (target.outstanding, target.outstanding_tokens, target.waiting, target.waiting_tokens) == (0, 0, 0, 0)


def test_what_others_sent_counts_too() -> None:
    target = _targets(1)[0]
    target.take(LoadReport(slots=4, active=3, waiting=2, waiting_tokens=1000, prompt_token_seconds=0.001))
    assert target.wait_seconds(100) == pytest.approx(1.1)
    ticket = target.open(Prompt((), 500))
    target.take(LoadReport(slots=4, active=3, waiting=2, waiting_tokens=1000, prompt_token_seconds=0.001))
    assert target.wait_seconds(100) == pytest.approx(1.1)  # one of the two is ours: 500 of ours, 500 of others
    ticket.close()


def test_full_slots_cost_time() -> None:
    target = _targets(1)[0]
    for _ in range(4):
        target.open(Prompt((), 10)).started()
    assert target.wait_seconds(0) == pytest.approx(0.25)  # one of four must end first


def test_the_cached_prefix_wins_by_the_time_it_saves() -> None:
    targets, policy = _targets(3), LeastWait()
    targets[2].pages.apply(page_names(b"root", _IDS, 16), [])
    assert policy.choose(Prompt(_IDS), targets) is targets[2]
    targets[2].open(Prompt((), 50))  # 50 tokens to compute first: still sooner than 64
    assert policy.choose(Prompt(_IDS), targets) is targets[2]
    targets[2].open(Prompt((), 50))
    assert policy.choose(Prompt(_IDS), targets) is not targets[2]


def test_equals_are_drawn_and_a_session_stays() -> None:
    targets, policy = _targets(4), LeastWait()
    counts = Counter(policy.choose(Prompt((), 100), targets).number for _ in range(2000))
    assert all(400 < counts[each] < 600 for each in range(4))
    assert len({policy.choose(Prompt((), 100, session="s"), targets).number for _ in range(20)}) == 1
    assert len({policy.choose(Prompt((), 100, session=f"s{n}"), targets).number for n in range(50)}) == 4


@pytest.mark.parametrize("name", POLICIES.names())
def test_every_policy_takes_live_replicas(name: str) -> None:
    targets = _targets(3)
    assert POLICIES.get(name)().choose(Prompt(_IDS), targets) in targets


def test_another_root_is_another_pool() -> None:
    first, second = _targets(2)
    second.root = b"new model"
    for each in (first, second):
        each.pages.apply(page_names(b"root", _IDS, 16), [])
    assert (first.matched_tokens(Prompt(_IDS)), second.matched_tokens(Prompt(_IDS))) == (64, 0)
    assert first.matched_tokens(Prompt(_IDS, roots={0: (b"of this caller", 16)})) == 0
