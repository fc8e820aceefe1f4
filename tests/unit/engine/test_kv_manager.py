"""Pages: sharing, copy-on-write, windows, eviction, and the books that must balance."""

from __future__ import annotations

import pytest

from tests.unit.engine.building import FULL, MIXED, SLIDING, compute, make_kv, make_request, tables_of
from tokenmill.engine.kv.policy import POLICIES
from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import LayerKV, build_layout


def test_a_second_request_takes_the_pages_of_the_first() -> None:
    kv = make_kv()
    first, second = make_request(14), make_request([*range(10), 90, 91, 92])
    compute(kv, first)
    assert kv.match(second).num_tokens == 8  # two full pages of four; the third differs
    compute(kv, second)
    assert tables_of(kv, second)[0][:2] == tables_of(kv, first)[0][:2]
    assert not set(tables_of(kv, second)[0][2:]) & set(tables_of(kv, first)[0])
    assert kv.measure().num_pages_held == 4 + 4 - 2


def test_a_match_leaves_one_token_to_compute() -> None:
    kv = make_kv()
    compute(kv, make_request(8))
    assert kv.match(make_request(8)).num_tokens == 4
    assert kv.match(make_request(9)).num_tokens == 8


def test_pages_stay_cached_after_release_and_match_again() -> None:
    kv = make_kv()
    request = make_request(13)
    compute(kv, request)
    kv.release(request)
    kv.check()
    usage = kv.measure()
    assert (usage.num_pages_free, usage.num_pages_cached, usage.num_pages_held) == (
        29,
        3,
        0,
    )  # the partial page is free
    assert kv.match(make_request(13)).num_tokens == 12
    kv.clear()
    kv.check()
    assert kv.measure().num_pages_free == 32
    assert kv.match(make_request(13)).num_tokens == 0


def test_without_prefix_caching_nothing_is_kept() -> None:
    kv = make_kv(prefix_caching=False)
    request = make_request(13)
    compute(kv, request)
    assert kv.match(make_request(13)).num_tokens == 0
    kv.release(request)
    assert kv.measure().num_pages_free == 32


def test_a_page_that_two_computed_is_kept_once() -> None:
    kv = make_kv()
    first, second = make_request(6), make_request(6)
    assert kv.reserve(first, 6)
    assert kv.reserve(second, 6)
    assert kv.measure().num_pages_held == 4
    first.num_computed = second.num_computed = 6
    kv.commit(first)
    own = tables_of(kv, second)[0][0]
    kv.commit(second)
    kv.check()
    assert tables_of(kv, second)[0][0] == tables_of(kv, first)[0][0] != own
    assert kv.measure().num_pages_held == 3


def test_reserve_gives_what_there_is() -> None:
    kv = make_kv(MIXED, num_pages=7)
    request, late = make_request(16), make_request(8, "late")
    assert kv.reserve(request, 16).num_tokens == 12  # four pages in each of two groups would be eight
    request.num_computed = 4
    assert kv.reserve(request, 8).num_tokens == 8
    assert kv.reserve(request, 9).num_tokens == 8
    assert kv.measure().num_pages_free == 1
    slots = kv.reserve(late, 4)
    assert not slots  # nothing, and nothing changed
    assert slots.block_tables == ()
    kv.check()
    assert kv.measure().num_pages_free == 1


def test_spare_slots_leave_a_page_for_every_holder() -> None:
    kv = make_kv(num_pages=6, prefix_caching=False)
    first, second = make_request(4, "a"), make_request(4, "b")
    compute(kv, first)
    compute(kv, second)
    assert kv.reserve(first, 3).num_tokens == 3  # one more page of its own: three are left
    assert kv.reserve(first, 12, only_spare=True).num_tokens == 8  # one more, two stay for the holders
    assert kv.num_available == 2
    assert kv.reserve(second, 1, only_spare=True).num_tokens == 0
    assert kv.reserve(first, 7, only_spare=True).num_tokens == 7  # what it has already costs nobody anything
    assert kv.reserve(second, 12).num_tokens == 8
    kv.check()


def test_eviction_takes_the_oldest_prefix_from_its_end() -> None:
    kv = make_kv(num_pages=6)
    old, new = make_request([1] * 9), make_request([2] * 9)
    for request in (old, new):
        compute(kv, request)
        kv.release(request)
    assert kv.measure().num_pages_cached == 4
    compute(kv, make_request([3] * 12))  # three pages: the two free ones and one evicted
    assert kv.stats.num_evictions == 1
    assert kv.match(make_request([1] * 9)).num_tokens == 4  # its second page went, the first is still there
    assert kv.match(make_request([2] * 9)).num_tokens == 8


def test_a_match_protects_from_eviction() -> None:
    kv = make_kv(num_pages=6)
    for token in (1, 2):
        request = make_request([token] * 9)
        compute(kv, request)
        kv.release(request)
    compute(kv, make_request([1] * 20))  # takes both pages of the ones, three more: evicts the newer twos
    assert kv.match(make_request([1] * 9)).num_tokens == 8
    assert kv.match(make_request([2] * 9)).num_tokens == 4


def test_matched_pages_are_not_counted_as_available() -> None:
    kv = make_kv(num_pages=4)
    request = make_request(13)
    compute(kv, request)
    kv.release(request)
    again = make_request([*range(12), *[70] * 10])
    match = kv.match(again)
    assert (match.num_tokens, match.fits) == (12, True)  # nobody else holds pages
    assert kv.reserve(again, 5, match).num_tokens == 4  # four pages, three of them matched
    again.num_computed = match.num_tokens
    kv.check()


def test_a_request_fits_if_all_of_it_does_and_others_can_grow() -> None:
    kv = make_kv(num_pages=5)
    holder = make_request([90] * 4)
    compute(kv, holder)
    assert kv.match(make_request(12)).fits  # three pages, and one for the holder
    assert not kv.match(make_request(13)).fits
    assert kv.match(make_request(13), without=[holder]).fits


def test_evicting_a_page_drops_all_that_follows_it() -> None:
    kv = make_kv(MIXED)
    request = make_request(17)
    compute(kv, request)
    kv.release(request)
    head = kv._tree.match(request.token_ids, 1)[0].pages[0]
    kv._pool.uncache(head)
    kv.check()
    assert kv.measure().num_pages_cached == 0
    assert not kv._tree.root.children


# --- forks ---


def fork(kv, parent, length):
    child = make_request(parent.token_ids[:length], "child")
    child.num_computed = length - 1
    kv.fork(parent, child)
    kv.check()
    return child


def test_a_fork_shares_until_someone_writes() -> None:
    kv = make_kv(prefix_caching=False)
    parent = make_request(6)
    compute(kv, parent)
    child = fork(kv, parent, 6)
    assert tables_of(kv, child) == tables_of(kv, parent)
    assert kv.measure().num_pages_held == 2
    shared = tables_of(kv, parent)[0][1]
    parent.token_ids.append(50)
    assert kv.reserve(parent, 1)
    own = tables_of(kv, parent)[0][1]
    assert own != shared
    assert kv.take_copies() == [(shared, own)]
    assert kv.reserve(child, 1)  # alone with the old page now
    assert tables_of(kv, child)[0][1] == shared
    assert kv.take_copies() == []
    kv.check()


def test_a_fork_whose_last_token_opens_a_page_copies_nothing() -> None:
    kv = make_kv()
    parent = make_request(5)
    compute(kv, parent)
    child = fork(kv, parent, 5)
    assert kv.reserve(child, 1)  # rewrites slot 0 of page 1, all that there is
    assert tables_of(kv, child)[0][1] != tables_of(kv, parent)[0][1]
    assert kv.take_copies() == []


def test_a_fork_does_not_write_to_a_cached_page() -> None:
    kv = make_kv()
    parent = make_request(8)
    compute(kv, parent)
    child = fork(kv, parent, 8)
    kv.release(parent)
    page = tables_of(kv, child)[0][1]
    assert page in kv._tree.owner
    assert kv.reserve(child, 1)
    assert tables_of(kv, child)[0][1] == page  # nobody else holds it: no copy, but out of the tree
    assert page not in kv._tree.owner
    assert kv.take_copies() == []
    child.num_computed = 8
    kv.commit(child)
    kv.check()
    assert page in kv._tree.owner


def test_copies_count_when_pages_are_scarce() -> None:
    kv = make_kv(num_pages=2, prefix_caching=False)
    parent = make_request(6)
    compute(kv, parent)
    child = fork(kv, parent, 6)
    assert not kv.reserve(child, 1)
    kv.check()
    kv.release(parent)
    assert kv.reserve(child, 4).num_tokens == 3


def test_a_copy_for_a_request_that_lets_go_is_not_made() -> None:
    kv = make_kv(prefix_caching=False)
    parent = make_request(6)
    compute(kv, parent)
    child = fork(kv, parent, 6)
    assert kv.reserve(child, 1)
    kv.release(child)
    assert kv.take_copies() == []


# --- windows ---


def test_pages_that_left_the_window_are_let_go_of() -> None:
    kv = make_kv(MIXED, prefix_caching=False)  # window 6, pages of 4
    request = make_request(16)
    compute(kv, request)
    assert kv.measure().num_pages_held == 8
    request.token_ids.append(90)
    compute(kv, request)
    full, sliding = tables_of(kv, request)
    assert all(page >= 0 for page in full)
    assert sliding[:2] == [-1, -1]  # token 16 sees 11..16: pages 2, 3, 4
    assert all(page >= 0 for page in sliding[2:])
    assert kv.measure().num_pages_held == 5 + 3


def test_a_window_hit_needs_only_what_the_window_sees() -> None:
    kv = make_kv(MIXED)
    request = make_request(24)
    compute(kv, request)
    kv.release(request)
    second = kv._tree.match(request.token_ids, 2)
    for node in second:
        kv._pool.uncache(node.pages[1])  # pages 0 and 1 of the sliding group
    kv.check()
    assert kv.match(make_request(25)).num_tokens == 24
    # Token 16 sees 11..15: page 2 and 3, which are there. Token 12 sees 7..11: page 1 is gone.
    assert kv.match(make_request(17)).num_tokens == 16
    assert kv.match(make_request(13)).num_tokens == 0
    match = kv.match(make_request(17))
    again = make_request(17)
    assert kv.reserve(again, 1, match)
    again.num_computed = match.num_tokens
    assert tables_of(kv, again)[1][:2] == [-1, -1]
    kv.check()


def test_a_layout_of_windows_only_keeps_prefixes_whose_head_is_gone() -> None:
    kv = make_kv(SLIDING)
    request = make_request(24)
    compute(kv, request)
    kv.release(request)
    for node in kv._tree.match(request.token_ids, 3):
        kv._pool.uncache(node.pages[0])
    kv.check()
    assert kv.match(make_request(25)).num_tokens == 24
    kv.clear()
    kv.check()
    assert not kv._tree.root.children


def test_an_evicted_window_page_is_filled_in_again() -> None:
    kv = make_kv(MIXED)
    request = make_request(12)
    compute(kv, request)
    kv.release(request)
    node = kv._tree.match(request.token_ids, 1)[0]
    kv._pool.uncache(node.pages[1])
    assert node.pages[1] == -1
    again = make_request(6)
    compute(kv, again)
    assert node.pages == [tables_of(kv, again)[0][0], tables_of(kv, again)[1][0]]


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 5, 6, 17])
def test_peak_pages_is_what_a_growing_sequence_needs(page_size: int, window: int) -> None:
    layers = [LayerKV("full", 1, 8), LayerKV("sliding", 1, 8, window)]
    for length in (1, 5, 23, 40):
        peak = build_layout(layers, page_size).peak_pages(length)
        kv = make_kv(layers, peak, page_size, prefix_caching=False)
        request = make_request(length)
        lowest = peak
        while request.num_computed < length:
            compute(kv, request, 1)
            lowest = min(lowest, kv.measure().num_pages_free)
        assert lowest == 0


# --- the books ---


def test_waste_is_the_unfilled_part_of_last_pages() -> None:
    kv = make_kv(prefix_caching=False)
    request = make_request(5)
    compute(kv, request)
    assert kv.measure().kv_waste == 3 / 8
    fork(kv, request, 5)
    assert 0 < kv.measure().kv_waste < 1
    assert kv.measure().kv_padding == 0


def test_padding_counts_layers_that_do_not_exist() -> None:
    layers = [LayerKV("full", 1, 8)] * 2 + [LayerKV("sliding", 1, 8, 6)] * 3
    kv = make_kv(layers)
    assert [len(group.layers) for group in kv.layout.groups] == [2, 2, 1]
    compute(kv, make_request(4))
    assert kv.measure().kv_padding == pytest.approx(1 / 6)


def test_queries_and_hits_are_counted_when_admitted() -> None:
    kv = make_kv()
    compute(kv, make_request(9))
    again = make_request(10)
    kv.match(again)
    assert (kv.stats.num_prefix_query_tokens, kv.stats.num_prefix_hit_tokens) == (9, 0)
    compute(kv, again)
    assert (kv.stats.num_prefix_query_tokens, kv.stats.num_prefix_hit_tokens) == (19, 8)


@pytest.mark.parametrize("damage", ["leak", "double", "free in use", "table"])
def test_check_finds_damage(damage: str) -> None:
    kv = make_kv(FULL)
    request = make_request(9)
    compute(kv, request)
    if damage == "leak":
        kv._pool._free.pop()
    elif damage == "double":
        kv._pool._free.append(kv._pool._free[0])
    elif damage == "free in use":
        kv._pool.drop(tables_of(kv, request)[0][2])
    else:
        tables_of(kv, request)[0][0] = tables_of(kv, request)[0][1]
    with pytest.raises(AssertionError):
        kv.check()


def test_an_unknown_policy_is_named_with_the_valid_ones() -> None:
    with pytest.raises(UserError, match="valid: lfu, lru"):
        POLICIES.get("fifo")
