"""Streaming text: however the tokens are cut, the deltas are the whole text, up to the first stop string."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.checkpoint.tokenizer_files import load_tokenizer
from tokenmill.engine.detokenizer import IncrementalDetokenizer, TokenText
from tokenmill.types import SamplingParams

load = cache(load_tokenizer)


class Bytes:
    """Token = byte; 256 is a special token with a name."""

    special_ids = frozenset({256})

    def __init__(self, adds_leading_space: bool = False) -> None:
        self.adds_leading_space = adds_leading_space

    def token_bytes(self, token_id: int) -> bytes:
        return b"<end>" if token_id == 256 else bytes([token_id])


def stream(
    token_ids: Sequence[int],
    cuts: Sequence[int] = (),
    params: SamplingParams | None = None,
    tokenizer: TokenText | None = None,
    prompt: Sequence[int] = (65,),
) -> tuple[list[str], IncrementalDetokenizer]:
    """Push the tokens in chunks that end at `cuts`; the last one finishes."""
    detokenizer = IncrementalDetokenizer(tokenizer or Bytes(), params or SamplingParams(), prompt)
    edges = [0, *sorted(cut for cut in set(cuts) if 0 < cut < len(token_ids)), len(token_ids)]
    deltas = [detokenizer.push(list(token_ids[start:end]), end == len(token_ids)) for start, end in pairwise(edges)]
    assert "".join(deltas) == detokenizer.text
    return deltas, detokenizer


class TestCharacters:
    def test_half_a_character_waits(self) -> None:
        data = "aé😀".encode()
        deltas, _ = stream(data, range(len(data)))
        assert deltas == ["a", "", "é", "", "", "", "😀"]

    def test_dangling_bytes_show_at_the_end(self) -> None:
        deltas, _ = stream(b"a\xf0\x9f", (1, 2))
        assert deltas == ["a", "", "\ufffd"]

    @settings(deadline=None)
    @given(st.binary(max_size=40), st.lists(st.integers(0, 40)))
    def test_any_bytes_any_cuts(self, data: bytes, cuts: list[int]) -> None:
        _, detokenizer = stream(data, cuts)
        assert detokenizer.text == data.decode(errors="replace")

    def test_special_tokens(self) -> None:
        assert stream([97, 256])[1].text == "a"
        assert stream([97, 256], params=SamplingParams(skip_special_tokens=False))[1].text == "a<end>"

    @pytest.mark.parametrize(
        ("prompt", "text"), [((), "x y"), ((256,), "x y"), ((65,), " x y"), ((256, 65), " x y"), ((65, 256), " x y")]
    )
    def test_leading_space_belongs_to_the_start_of_a_text(self, prompt: tuple[int, ...], text: str) -> None:
        assert stream(b" x y", (1, 2), tokenizer=Bytes(adds_leading_space=True), prompt=prompt)[1].text == text
        assert stream(b" x y", (1, 2), tokenizer=Bytes(), prompt=prompt)[1].text == " x y"

    def test_nothing_after_the_end(self) -> None:
        _, detokenizer = stream(b"a")
        assert detokenizer.push([98], True) == ""
        assert detokenizer.text == "a"


class TestStopStrings:
    def test_across_tokens(self) -> None:
        deltas, detokenizer = stream(b"one STOP two", range(12), SamplingParams(stop=("STOP",)))
        assert detokenizer.text == "one "
        assert detokenizer.stop_reason == "STOP"
        assert not any("S" in delta for delta in deltas)

    def test_false_alarm_is_released(self) -> None:
        deltas, detokenizer = stream(b"STOx", range(4), SamplingParams(stop=("STOP",)))
        assert deltas == ["", "", "", "STOx"]
        assert detokenizer.stop_reason is None

    def test_beginning_of_a_stop_string_at_the_end(self) -> None:
        assert stream(b"aST", (2,), SamplingParams(stop=("STOP",)))[1].text == "aST"

    def test_stop_string_inside_the_output(self) -> None:
        params = SamplingParams(stop=("b",), include_stop_str_in_output=True)
        assert stream(b"abc", (), params)[1].text == "ab"

    def test_completed_first_wins_and_then_the_longer(self) -> None:
        assert stream(b"abcdef", (3,), SamplingParams(stop=("abcdef", "cd")))[1].stop_reason == "cd"
        assert stream(b"xabc", (), SamplingParams(stop=("c", "abc")))[1].stop_reason == "abc"

    def test_self_overlapping(self) -> None:
        _, detokenizer = stream(b"aaab", range(4), SamplingParams(stop=("aab",)))
        assert (detokenizer.text, detokenizer.stop_reason) == ("a", "aab")

    @settings(deadline=None)
    @given(
        st.text("abé", max_size=30),
        st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=4),
        st.lists(st.integers(0, 60)),
        st.booleans(),
    )
    def test_same_as_search_in_the_whole_text(
        self, text: str, stops: list[str], cuts: list[int], include: bool
    ) -> None:
        params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include)
        _, detokenizer = stream(text.encode(), cuts, params)
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        if found:
            end, length, stop = min(found)
            assert detokenizer.text == text[: end if include else end + length]
            assert detokenizer.stop_reason == stop
        else:
            assert detokenizer.text == text
            assert detokenizer.stop_reason is None


@pytest.mark.parametrize("alias", ["smollm2", "gemma3-270m", "qwen2.5-coder-1.5b", "stories15m"])
class TestRealVocabularies:
    def test_random_tokens(self, model_path: Callable[[str], Path], alias: str) -> None:
        tokenizer = load(model_path(alias))
        generator = random.Random(0)
        # Fragments of characters are rare among all tokens, so half of the sample are those.
        fragments = [
            token_id
            for token_id in range(tokenizer.vocab_size)
            if "\ufffd" in tokenizer.token_bytes(token_id).decode(errors="replace")
        ]
        for skip in (True, False):
            params = SamplingParams(skip_special_tokens=skip)
            for _ in range(200):
                ids = [
                    generator.choice(fragments)
                    if generator.random() < 0.5
                    else generator.randrange(tokenizer.vocab_size)
                    for _ in range(generator.randrange(1, 30))
                ]
                cuts = generator.sample(range(30), generator.randrange(30))
                assert stream(ids, cuts, params, tokenizer, prompt=())[1].text == tokenizer.decode(ids, skip)

    def test_output_is_what_it_adds_to_the_prompt(self, model_path: Callable[[str], Path], alias: str) -> None:
        tokenizer = load(model_path(alias))
        for prompt, output in (("Once upon", " a time"), ("x = [", "1, 2]"), ("", "Hello there")):
            prompt_ids = tokenizer.encode(prompt)
            all_ids = tokenizer.encode(prompt + output)
            if all_ids[: len(prompt_ids)] != prompt_ids:
                continue
            _, detokenizer = stream(all_ids[len(prompt_ids) :], range(20), None, tokenizer, prompt_ids)
            assert tokenizer.decode(prompt_ids) + detokenizer.text == prompt + output


@pytest.mark.parametrize("alias", ["smollm2", "gemma3-270m", "qwen2.5-coder-1.5b"])
def test_golden_text(data_path: Path, model_path: Callable[[str], Path], alias: str) -> None:
    tokenizer = load(model_path(alias))
    golden = json.loads((data_path / "golden" / f"{alias}.json").read_text(encoding="utf-8"))
    for row in golden["generations"]:
        ids = row["greedy_ids"]
        _, detokenizer = stream(ids, range(len(ids)), None, tokenizer, row["prompt_ids"])
        assert detokenizer.text == row["greedy_text"]


def test_no_torch() -> None:
    """Whoever serves text need not load the model's libraries."""
    import subprocess
    import sys

    code = "import sys, tokenmill.engine.detokenizer as d; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
