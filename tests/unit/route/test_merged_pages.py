"""Pages of several engines as one feed: the union, for readers that follow the changes too."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tokenmill.engine.messages import Pages
from tokenmill.route.merged_pages import MergedPages
from tokenmill.serve.supervision.page_feed import PageFeed

_NAMES = st.lists(st.integers(0, 7).map(lambda n: bytes([n])), max_size=4, unique=True)
_STEPS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["change", "restart"]), _NAMES, _NAMES), max_size=40)


@given(_STEPS)
def test_a_page_is_there_while_any_engine_has_it(steps: list[tuple[int, str, list[bytes], list[bytes]]]) -> None:
    feeds = [PageFeed(Path("model"), lambda _message: None) for _ in range(3)]
    merged = MergedPages(feeds)
    seen, sequence = set[bytes](), 0
    for number, what, stored, removed in steps:
        if what == "restart":
            feeds[number].restart()
        else:
            feeds[number].take(Pages([(name, b"root") for name in stored], removed))
        changes = merged.since(merged.feed, sequence)
        assert changes is not None
        for change in changes:
            seen = (seen | {name for name, _ in change.stored}) - set(change.removed)
        sequence = merged.sequence
        assert seen == set(merged.pages) == {name for feed in feeds for name in feed.pages}


def test_the_root_is_that_of_any_engine_that_has_one() -> None:
    feeds = [PageFeed(Path("model"), lambda _message: None) for _ in range(2)]
    merged = MergedPages(feeds)
    assert merged.root == b""
    feeds[1].root = b"name"
    assert merged.root == b"name"
