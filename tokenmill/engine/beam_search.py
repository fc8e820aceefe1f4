"""Beam search: the most probable continuations of each prompt, found by following the best few side by side.

A step asks for one token of every beam of every prompt, with the log-probabilities of the best candidates; what beams
share is computed once through the prefix cache. Knows no text and no engine: `beam_steps` says what to generate and is
told what came. `LLM.beam_search` and the completions route drive it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass

from tokenmill.engine.outputs import RequestOutput
from tokenmill.errors import UserError
from tokenmill.types import MAX_LOGPROBS, SamplingParams

Generate = Callable[[list[list[int]], SamplingParams], list[RequestOutput]]
_MAX_WIDTH = MAX_LOGPROBS // 2  # of the candidates of a beam, as many again may end it


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0  # a score is the sum of log-probabilities divided by length to this power

    def __post_init__(self) -> None:
        if not 1 <= self.beam_width <= _MAX_WIDTH:
            raise UserError(f"beam_width is {self.beam_width}", f"give 1 to {_MAX_WIDTH}")
        if self.max_tokens < 1:
            raise UserError(f"max_tokens is {self.max_tokens}", "give at least 1")


@dataclass(slots=True)
class BeamSequence:
    token_ids: list[int]  # of the output; an end-of-text token that ended it is the last one
    cumulative_logprob: float
    finish_reason: str = "length"  # or "stop"
    text: str = ""


Asked = tuple[list[list[int]], SamplingParams]  # token ids of every beam, and how one more token is generated


def beam_search(
    prompts: Sequence[Sequence[int]],
    params: BeamSearchParams,
    generate: Generate,
    eos_ids: Collection[int],
    vocab_size: int,
) -> list[list[BeamSequence]]:
    """The best `beam_width` sequences of each prompt, best first."""
    steps = beam_steps(prompts, params, eos_ids, vocab_size)
    try:
        asked = next(steps)
        while True:
            asked = steps.send(generate(*asked))
    except StopIteration as ended:
        found: list[list[BeamSequence]] = ended.value
        return found


def beam_steps(
    prompts: Sequence[Sequence[int]], params: BeamSearchParams, eos_ids: Collection[int], vocab_size: int
) -> Generator[Asked, list[RequestOutput], list[list[BeamSequence]]]:
    """Yields what to generate, is sent its outputs; returns the best `beam_width` sequences of each prompt."""
    width = params.beam_width
    step = SamplingParams(max_tokens=1, temperature=0.0, logprobs=min(2 * width, vocab_size), ignore_eos=True)
    ends = frozenset() if params.ignore_eos else frozenset(eos_ids)
    live = [[BeamSequence([], 0.0)] for _ in prompts]
    ended: list[list[BeamSequence]] = [[] for _ in prompts]
    for _ in range(params.max_tokens):
        beams = [(number, beam) for number, own in enumerate(live) for beam in own]
        if not beams:
            break
        outputs = yield [[*prompts[number], *beam.token_ids] for number, beam in beams], step
        live = [[] for _ in prompts]
        for (number, beam), output in zip(beams, outputs, strict=True):
            for longer in _continuations(beam, output, ends):
                (ended if longer.finish_reason == "stop" else live)[number].append(longer)
        live = [sorted(own, key=lambda beam: -beam.cumulative_logprob)[:width] for own in live]
        ended = [_best(own, params) for own in ended]
    return [_best([*done, *own], params) for done, own in zip(ended, live, strict=True)]


def _continuations(beam: BeamSequence, output: RequestOutput, ends: Collection[int]) -> list[BeamSequence]:
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    return [
        BeamSequence(
            [*beam.token_ids, token_id],
            beam.cumulative_logprob + entry.logprob,
            "stop" if token_id in ends else "length",
        )
        for token_id, entry in logprobs[0].items()
    ]


def _best(beams: list[BeamSequence], params: BeamSearchParams) -> list[BeamSequence]:
    def score(beam: BeamSequence) -> float:
        return beam.cumulative_logprob / float(len(beam.token_ids)) ** params.length_penalty

    return sorted(beams, key=score, reverse=True)[: params.beam_width]
