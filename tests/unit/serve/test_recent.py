"""A key's last requests: bounded, its own, and where one prompt parts from the one before."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from tokenmill.checkpoint.number_tokenizer import numbering_tokenizer
from tokenmill.engine.collector import RequestCollector
from tokenmill.serve.generation import Generation
from tokenmill.serve.prefix_breaks import common_length, prefix_break
from tokenmill.serve.recent import RecentPrompt, RecentRequest, RecentRequests
from tokenmill.timeline import PromptChunk, Timeline
from tokenmill.types import CacheReport, Request, SamplingParams, TokenEvent

_PAGE = 4


def _generation(prompt: list[int], salt: bytes = b"") -> Generation:
    generation = Generation(False, lambda _: None)
    request = Request("r", prompt, SamplingParams(max_tokens=8), cache_salt=salt)
    generation.add(request, RequestCollector(request, None, numbering_tokenizer(1000)))
    return generation


def _answer(generation: Generation, tokens: list[int], cached: int, reason: str) -> None:
    member = generation.members[0]
    began = member.arrived + 1.0
    line = Timeline(began, [PromptChunk(began, began + 0.5, cached, 8, 2)], 1)
    member.take(TokenEvent("r", 0, tokens, [], [], cached, "length", cache=CacheReport(reason=reason), timeline=line))
    member.first_token = member.last_token = began + 0.75


def _sent(recent: RecentRequests, name: str, prompt: list[int], answer: list[int], cached: int = 0) -> RecentRequest:
    generation = _generation(prompt)
    recent.open("key", name, generation)
    _answer(generation, answer, cached, "partial")
    recent.close("key", generation)
    found = recent.find("key", name)
    assert found is not None
    return found


def test_a_key_sees_its_own_requests_newest_first() -> None:
    recent = RecentRequests(8)
    for name in ("a", "b"):
        _sent(recent, name, [1, 2, 3], [4])
    assert [each.request_id for each in recent.of("key")] == ["b", "a"]
    assert recent.of("other") == []
    assert recent.find("other", "a") is None


def test_requests_and_tokens_are_bounded() -> None:
    recent = RecentRequests(3, max_tokens=20)
    for number in range(6):
        _sent(recent, str(number), [number] * 4, [1])
    assert [each.request_id for each in recent.of("key")] == ["5", "4", "3"]
    _sent(recent, "long", [7] * 14, [1])
    assert [each.request_id for each in recent.of("key")] == ["long", "5"]
    generation = _generation([1] * 50)
    recent.open("key", "too long", generation)
    recent.close("key", generation)
    assert recent.of("key") == []
    assert RecentRequests(0).enabled is False


def test_the_timeline_splits_waiting_computing_and_answering() -> None:
    request = _sent(RecentRequests(1), "a", [1] * 10, [5, 6], cached=2)
    line = request.timeline
    (prompt,) = line["prompts"]
    assert (prompt["prompt_tokens"], prompt["cached_tokens"], prompt["output_tokens"]) == (10, 2, 2)
    assert prompt["prefill"]["seconds"] == 0.75
    assert prompt["prefill"]["chunks"][0] | {"at": 0} == {
        "at": 0,
        "seconds": 0.5,
        "offset": 2,
        "tokens": 8,
        "rows": 2,
    }
    assert prompt["decode"]["seconds"] == 0.0
    assert prompt["finish_reasons"] == ["length"]
    assert 0.9 < prompt["queue"]["seconds"] < 1.1


def _broken(recent: RecentRequests, name: str, prompt: list[int], cached: int) -> dict[str, object]:
    request = _sent(recent, name, prompt, [9], cached)
    earlier = recent.before("key", request)
    return prefix_break(request.prompts[0], earlier, _PAGE, lambda tokens: " ".join(map(str, tokens)))


def test_where_a_prompt_parts_from_the_last_one() -> None:
    recent = RecentRequests(8)
    _sent(recent, "first", [1, 2, 3, 4, 5, 6, 7, 8], [50, 51])
    found = _broken(recent, "second", [1, 2, 3, 4, 5, 60, 61, 62], cached=4)
    assert (found["compared_with"], found["offset"], found["matching_tokens"]) == ("first", 5, 5)
    assert (found["reusable_tokens"], found["cached_tokens"]) == (4, 4)
    assert found["text_before"] == "1 2 3 4 5"
    assert found["text_then"] == "6 7 8 50 51"
    assert found["text_now"] == "60 61 62"
    assert found["within"] == "prompt"
    assert "differs from this token on" in str(found["explanation"])


def test_an_answer_that_comes_back_changed_is_found() -> None:
    recent = RecentRequests(8)
    _sent(recent, "turn 1", [1, 2, 3, 4], [50, 51, 52, 53])
    found = _broken(recent, "turn 2", [1, 2, 3, 4, 50, 51, 99, 7], cached=4)
    assert (found["offset"], found["within"]) == (6, "answer")
    assert "another form" in str(found["explanation"])


def test_reasons_for_less_than_the_prompts_share() -> None:
    recent = RecentRequests(8)
    prompt = list(range(1, 14))
    assert "no recent prompt" in str(_broken(recent, "cold", prompt, 0)["explanation"])
    assert "left the cache" in str(_broken(recent, "evicted", prompt, 4)["explanation"])
    assert "whole prompt was seen" in str(_broken(recent, "again", prompt, 12)["explanation"])
    assert "first page" in str(_broken(recent, "early", [1, 2, 77, 78, 79], 0)["explanation"])


def test_other_salts_are_not_compared_with() -> None:
    recent = RecentRequests(8)
    for name, salt in (("a", b"x"), ("b", b"y"), ("c", b"x")):
        generation = _generation([1, 2, 3], salt)
        recent.open("key", name, generation)
        recent.close("key", generation)
    last = recent.of("key")[0]
    assert [each.request_id for each in recent.before("key", last)] == ["a"]


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_the_common_length_is_the_common_length(one: list[int], other: list[int]) -> None:
    expected = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert common_length(array("i", one), array("i", other)) == expected


def test_a_prompt_alone() -> None:
    prompt = RecentPrompt(array("i", [1]), 1)
    assert prefix_break(prompt, [], _PAGE, str)["reusable_tokens"] == 0


def test_of_a_request_with_many_prompts_the_first_are_kept() -> None:
    recent = RecentRequests(4)
    generation = Generation(False, lambda _: None)
    for number in range(100):
        request = Request(f"r{number}", [number + 1], SamplingParams(max_tokens=8))
        generation.add(request, RequestCollector(request, None, numbering_tokenizer(1000)))
    recent.open("key", "many", generation)
    running = recent.running(generation)
    assert running is not None
    recent.close("key", generation)
    assert len(running.prompts) == len(running.timeline["prompts"]) == 16
