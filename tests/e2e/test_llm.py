"""The Python faces on a real model: outputs, stops, log-probabilities, siblings, bad input, streaming, cancellation."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenmill import LLM, AsyncEngine, BeamSearchParams, SamplingParams, UserError

_PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm(model_path: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(model_path("stories15m"), context=256, concurrency=16) as engine:
        yield engine


def _idle(engine: LLM) -> None:
    scheduler = engine.parts.core.scheduler
    scheduler.kv.check()
    assert not scheduler.has_work
    assert scheduler.kv.measure().num_pages_held == 0


def test_text_and_ids_agree(llm: LLM) -> None:
    output = llm.generate(_PROMPT, SamplingParams(temperature=0.0, max_tokens=12))[0]
    completion = output.outputs[0]
    assert completion.finish_reason == "length"
    assert len(completion.token_ids) == 12
    assert output.prompt_token_ids[0] == 1
    assert llm.parts.tokenizer.decode(output.prompt_token_ids + completion.token_ids) == _PROMPT + completion.text
    assert completion.text.startswith(", there was a little girl")
    assert output.metrics.ttft is not None
    _idle(llm)


def test_beams_are_scored_as_the_model_scores_them(llm: LLM) -> None:
    greedy = llm.generate(_PROMPT, SamplingParams(temperature=0.0, max_tokens=6))[0]
    (single,) = llm.beam_search(_PROMPT, BeamSearchParams(beam_width=1, max_tokens=6))[0]
    assert (single.token_ids, single.text) == (greedy.outputs[0].token_ids, greedy.outputs[0].text)
    beams = llm.beam_search([_PROMPT, "The cat"], BeamSearchParams(beam_width=4, max_tokens=6))[0]
    assert [len(beam.token_ids) for beam in beams] == [6] * 4
    assert len({tuple(beam.token_ids) for beam in beams}) == 4
    scores = [beam.cumulative_logprob for beam in beams]
    assert scores == sorted(scores, reverse=True)
    prompt = greedy.prompt_token_ids
    for beam in beams:
        whole = [*prompt, *beam.token_ids]
        scored = llm.generate(whole, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))[0]
        assert scored.prompt_logprobs is not None
        found = zip(beam.token_ids, scored.prompt_logprobs[len(prompt) :], strict=True)
        total = sum(position[token_id].logprob for token_id, position in found if position is not None)
        assert beam.cumulative_logprob == pytest.approx(total, abs=1e-3)
    with pytest.raises(UserError, match="context"):
        llm.beam_search(_PROMPT, BeamSearchParams(beam_width=2, max_tokens=300))
    _idle(llm)


def test_words_and_tokens_that_are_not_wanted(llm: LLM) -> None:
    free = llm.generate(_PROMPT, SamplingParams(temperature=0.0, max_tokens=20))[0].outputs[0].text
    assert "girl" in free
    without = SamplingParams(temperature=0.0, max_tokens=20, bad_words=("girl",))
    assert "girl" not in llm.generate(_PROMPT, without)[0].outputs[0].text
    allowed = SamplingParams(max_tokens=8, allowed_token_ids=(300, 301), ignore_eos=True, seed=1)
    assert set(llm.generate(_PROMPT, allowed)[0].outputs[0].token_ids) <= {300, 301}
    _idle(llm)


def test_a_closed_engine_frees_its_weights_at_once(model_path: Callable[[str], Path]) -> None:
    engine = LLM(model_path("stories15m"), context=64, concurrency=1)
    engine.generate(_PROMPT, SamplingParams(temperature=0.0, max_tokens=2))
    weights = weakref.ref(engine.parts.runtime.model.decoder)
    gc.collect()
    gc.disable()  # whoever loads one model after another cannot wait for the collector
    try:
        engine.close()
        assert weights() is None
    finally:
        gc.enable()


def test_tokens_that_come_at_once_are_those_that_come_one_by_one(llm: LLM) -> None:
    core, intake = llm.parts.core, llm.parts.intake
    assert llm.tokens_at_once > 1
    alone = llm.generate(_PROMPT, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))[0].outputs[0]
    stop = alone.token_ids[17]
    kinds: list[dict[str, Any]] = [
        {"max_tokens": 40},
        {"max_tokens": 40, "stop_token_ids": [stop]},  # ends in the middle of a run
        {"max_tokens": 5},
        {"max_tokens": 40, "n": 2},
        {"max_tokens": 40, "temperature": 1.0, "seed": 7},  # as long as it runs, all come one by one
    ]
    for chosen in (kinds[:3], kinds[:4], kinds):
        params = [SamplingParams(ignore_eos=True, **{"temperature": 0.0, **kind}) for kind in chosen]
        steps = core.stats.num_steps
        outputs = llm.generate([_PROMPT] * len(params), params)
        at_once = core.stats.num_steps - steps
        texts = [completion.token_ids for output in outputs for completion in output.outputs]
        for number, each in enumerate(params):
            core.add(intake.request(_PROMPT, each, request_id=f"single-{len(chosen)}-{number}"))
        singly: dict[tuple[str, int], list[int]] = {}
        while core.has_work:
            for event in core.step():
                assert len(event.token_ids) == 1
                singly.setdefault((event.request_id, event.index), []).extend(event.token_ids)
        assert texts == [singly[key] for key in sorted(singly)]
        assert len(texts[1]) <= 18
        assert texts[1][-1] == stop
        assert (at_once < 20) == (chosen is not kinds)
    _idle(llm)


def test_one_params_each_in_order(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=count) for count in (3, 9, 1)]
    outputs = llm.generate([_PROMPT, "The dog", [1, 9038]], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 9, 1]
    assert outputs[2].prompt is None
    with pytest.raises(UserError, match="2 sampling params for 1 prompts"):
        llm.generate([_PROMPT], params[:2])


def test_stop_string_cuts_the_text_and_ends_the_request(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=50, stop=("little girl",))
    completion = llm.generate(_PROMPT, params)[0].outputs[0]
    assert completion.text == ", there was a "
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "little girl")
    assert len(completion.token_ids) < 12
    _idle(llm)


def test_stop_string_of_one_sibling_leaves_the_others(llm: LLM) -> None:
    params = SamplingParams(temperature=1.2, max_tokens=30, n=6, seed=5, stop=("a",))
    output = llm.generate(_PROMPT, params)[0]
    assert output.finished
    assert all("a" not in completion.text for completion in output.outputs)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) > 1
    _idle(llm)


def test_stop_token_id_and_ignore_eos(llm: LLM) -> None:
    first = llm.generate(_PROMPT, SamplingParams(temperature=0.0, max_tokens=8))[0].outputs[0]
    stop = first.token_ids[4]
    stopping = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=(stop,))
    completion = llm.generate(_PROMPT, stopping)[0].outputs[0]
    position = first.token_ids.index(stop)
    assert completion.token_ids == first.token_ids[: position + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    long = llm.generate(_PROMPT, SamplingParams(temperature=0.0, max_tokens=240, ignore_eos=True))[0].outputs[0]
    assert len(long.token_ids) == 240
    eos = llm.parts.description.eos_ids[0]
    held = SamplingParams(temperature=0.0, max_tokens=3, min_tokens=3, logit_bias={eos: 100.0})
    assert eos not in llm.generate(_PROMPT, held)[0].outputs[0].token_ids
    free = SamplingParams(temperature=0.0, max_tokens=3, logit_bias={eos: 100.0})
    ended = llm.generate(_PROMPT, free)[0].outputs[0]
    assert (ended.token_ids, ended.text, ended.finish_reason) == ([eos], "", "stop")


def test_logprobs_of_output_and_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=3, prompt_logprobs=2)
    output = llm.generate("Once upon a time there was", params)[0]
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert output.prompt_logprobs is not None
    assert len(completion.logprobs) == 5
    assert all(len(position) == 3 for position in completion.logprobs)
    for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
        assert position[token_id].rank == 1
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token_id, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert position is not None
        assert token_id in position
    # Scoring the whole text as a prompt must give the log-probabilities it was generated with.
    whole = llm.generate(
        [output.prompt_token_ids + completion.token_ids], SamplingParams(max_tokens=1, prompt_logprobs=0)
    )
    scored = whole[0].prompt_logprobs
    assert scored is not None
    for token_id, position, entry in zip(completion.token_ids, completion.logprobs, scored[-5:], strict=True):
        assert entry is not None
        assert entry[token_id].logprob == pytest.approx(position[token_id].logprob, abs=2e-3)
    _idle(llm)


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ("", {}, "empty"),
        ([], {}, "no tokens"),
        ([1, 99999], {}, "outside the vocabulary"),
        ([1] * 256, {}, "context"),
        ("hi", {"stop_token_ids": (99999,)}, "outside the vocabulary"),
        ("hi", {"logit_bias": {40000: 1.0}}, "outside the vocabulary"),
    ],
)
def test_bad_requests_are_refused_with_a_remedy(llm: LLM, prompt: Any, params: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        llm.generate([prompt], SamplingParams(**params))
    assert caught.value.remedy
    _idle(llm)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": 2.0},
        {"n": 0},
        {"max_tokens": 0},
        {"min_tokens": 20, "max_tokens": 5},
        {"seed": -1},
        {"logprobs": 1000},
        {"repetition_penalty": 0.0},
        {"frequency_penalty": 3.0},
        {"stop": ("",)},
        {"temperature": float("nan")},
        {"temperature": "hot"},
    ],
)
def test_bad_sampling_params_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        SamplingParams(**params)


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'context'"):
        LLM("stories15m", contxt=12)


def test_base_model_has_no_chat(llm: LLM) -> None:
    with pytest.raises(UserError, match="chat template"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_a_closed_llm_says_so(model_path: Callable[[str], Path]) -> None:
    engine = LLM(model_path("stories15m"))
    engine.close()
    with pytest.raises(UserError, match="closed"):
        engine.generate("hi")


def test_streaming_equals_offline_and_cancel_frees_pages(llm: LLM, model_path: Callable[[str], Path]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, n=2)
    expected = llm.generate(_PROMPT, params)[0].outputs

    async def scenario() -> None:
        async with AsyncEngine(model_path("stories15m"), context=256) as engine:

            async def collect(prompt: str) -> list[str]:
                texts = ["", ""]
                async for update in engine.generate(prompt, params):
                    texts[update.index] += update.text
                return texts

            both = await asyncio.gather(collect(_PROMPT), collect("The dog"), collect(_PROMPT))
            assert both[0] == both[2] == [completion.text for completion in expected]

            stream = engine.generate(_PROMPT, SamplingParams(max_tokens=200, ignore_eos=True), "to-cancel")
            async for update in stream:
                if len(update.output.outputs[0].token_ids) > 3:
                    break
            await stream.aclose()  # type: ignore[attr-defined]

            reasons = []
            async for update in engine.generate(_PROMPT, SamplingParams(max_tokens=200, ignore_eos=True), "aborted"):
                if not reasons:
                    await engine.cancel("aborted")
                reasons.append(update.output.outputs[0].finish_reason)
            assert reasons[-1] == "abort"
            assert await collect("After the cancels")
            scheduler = engine.parts.core.scheduler
        scheduler.kv.check()
        assert scheduler.kv.measure().num_pages_held == 0

    asyncio.run(scenario())
