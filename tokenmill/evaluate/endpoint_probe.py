"""What an endpoint is asked, and its answers as positions: visible token ids with log-probabilities.

Three methods, the best that the endpoint offers: `prompt` (a text comes back with the log-probabilities of its own
tokens), `generated` (those of a short greedy answer, over the completions or the chat route), `answers` (sampled text
only). Detects another tokenizer by token strings and token counts. Knows nothing of candidates. Called by
endpoint_report.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokenmill.checkpoint.chat_template import ChatTemplate
from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.errors import UserError
from tokenmill.evaluate.endpoint import Completion, EndpointClient, RefusedError, TokenNames, TokenScores
from tokenmill.evaluate.rounding_match import Visible

PROMPT, GENERATED, ANSWERS = METHODS = "prompt", "generated", "answers"

_FIRST_SCORED = 8  # the first tokens of a text are nearly as uncertain as the vocabulary is large
_MIN_VISIBLE = 2
_MAX_UNKNOWN = 0.2  # share of token strings that may be foreign to the reference's vocabulary
_MIN_ALIGNED = 0.9  # share of a prompt's tokens that must come back as sent
_MIN_NAMED = 0.5  # share of its tokens whose strings must tell which they are, to judge by them
_TOP_CHOICES = (20, 5, 1)  # alternatives per token to ask for: limits differ
_MAX_CHAT_TOP = 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ProbePlan:
    passages: int = 24
    length: int = 96  # tokens of a passage
    answer_tokens: int = 16  # of the methods that generate
    samples: int = 8  # answers per passage, where there are no log-probabilities
    temperature: float = 1.0  # of those; 0: they are greedy
    positions: int = 640  # that are scored at most

    def __post_init__(self) -> None:
        if self.passages < 2 or self.length < 2 * _FIRST_SCORED:
            raise UserError(
                f"{self.passages} passages of {self.length} tokens are too few to judge by",
                f"give at least 2 passages of {2 * _FIRST_SCORED} tokens",
            )


@dataclass(slots=True)
class Probe:
    """`passages`: the tokens the model sees. Row r: token `rows[r][1]` of passage `rows[r][0]` is predicted."""

    method: str
    passages: list[list[int]] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)
    ids: list[np.ndarray] = field(default_factory=list)  # visible token ids of each row
    values: list[np.ndarray] = field(default_factory=list)  # their log-probabilities
    targets: list[int] = field(default_factory=list)  # the token that follows in the passage; -1: not known
    rerun_noise: float = 0.0  # largest difference between two answers to the same question, nats

    @property
    def observed(self) -> Visible:
        starts = np.cumsum([0, *(len(each) for each in self.ids)])
        return Visible(starts, np.concatenate(self.values))

    def keep(self, max_rows: int) -> None:
        """Only this many rows, evenly spaced."""
        if len(self.rows) <= max_rows:
            return
        kept = sorted(set(np.linspace(0, len(self.rows) - 1, max_rows).astype(int).tolist()))
        self.rows, self.ids = [self.rows[each] for each in kept], [self.ids[each] for each in kept]
        self.values, self.targets = [self.values[each] for each in kept], [self.targets[each] for each in kept]

    def add(self, passage: int, index: int, entries: dict[int, float], target: int | None) -> None:
        self.rows.append((passage, index))
        self.targets.append(-1 if target is None else target)
        self.ids.append(np.fromiter(entries.keys(), dtype=np.int64))
        self.values.append(np.fromiter(entries.values(), dtype=np.float64))


class Prober:
    def __init__(
        self, client: EndpointClient, tokenizer: Tokenizer, template: ChatTemplate | None, plan: ProbePlan
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._template = template
        self._plan = plan
        self._names = TokenNames(tokenizer)
        self._top = 0
        self._known = self._unknown = 0
        self._has_completions: bool | None = None  # not asked yet

    def run(self, texts: Sequence[str], method: str = "", on_progress: Progress = lambda _done, _all: None) -> Probe:
        """With the best method there is, or the one named."""
        best = self._find_method(texts[0]) if method != ANSWERS else ANSWERS
        if method and METHODS.index(method) < METHODS.index(best):
            raise UserError(f"{self._client.url} does not offer the method '{method}'", f"use --method {best}")
        chosen = method or best
        probe = Probe(chosen)
        take = {PROMPT: self._take_prompt, GENERATED: self._take_generated, ANSWERS: self._take_answers}[chosen]
        for number, text in enumerate(texts):
            take(probe, text)
            on_progress(number + 1, len(texts))
        if chosen != ANSWERS:
            self._check_names()
            probe.rerun_noise = self._rerun(probe, texts[0], take)
        if not probe.rows:
            raise UserError(f"{self._client.url} gave no log-probabilities that can be used", "give more --passages")
        return probe

    def _find_method(self, text: str) -> str:
        for top in _TOP_CHOICES:
            try:
                answer = self._client.complete(text, max_tokens=1, temperature=0, logprobs=top, echo=True)[0]
            except RefusedError:
                continue
            if answer.scores and len(answer.scores) > 2:
                self._top = top
                return PROMPT
        for top in _TOP_CHOICES:
            self._top = top
            try:
                if self._ask(text, max_tokens=2, temperature=0, logprobs=top).scores:
                    return GENERATED
            except RefusedError:
                continue
        return ANSWERS

    def _ask(self, text: str, **fields: Any) -> Completion:
        """Over the completions route, or the chat route where that is all there is."""
        if self._template is None or not self._chat_only():
            return self._client.complete(text, **fields)[0]
        top = fields.pop("logprobs", None)
        if top is not None:
            fields |= {"logprobs": True, "top_logprobs": min(top, _MAX_CHAT_TOP)}
        return self._client.chat(text, **fields)[0]

    def _chat_only(self) -> bool:
        if self._has_completions is None:
            try:
                self._client.complete("a", max_tokens=1, temperature=0)
                self._has_completions = True
            except RefusedError as error:
                self._has_completions = error.status not in (404, 405, 501)
        return not self._has_completions

    def _prompt_ids(self, text: str) -> list[int]:
        if self._template is not None and self._chat_only():
            rendered = self._template.render([{"role": "user", "content": text}])
            return self._tokenizer.encode(rendered, add_special_tokens=False, parse_special=True)
        return self._tokenizer.encode(text)

    def _take_prompt(self, probe: Probe, text: str) -> None:
        ids = self._tokenizer.encode(text)
        answer = self._client.complete(text, max_tokens=1, temperature=0, logprobs=self._top, echo=True)[0]
        scores = answer.scores or ()
        offset = self._aligned(ids, scores)
        probe.passages.append(ids)
        for index in range(max(_FIRST_SCORED, offset), len(ids)):
            score = scores[index - offset] if index - offset < len(scores) else None
            self._add(probe, index, score, ids[index])

    def _aligned(self, ids: list[int], scores: Sequence[TokenScores | None]) -> int:
        """How many of our first tokens the endpoint leaves out: 0, or 1 where it hides BOS."""
        offsets = (0, 1) if ids[0] == self._tokenizer.bos_id else (0,)
        found = {offset: self._agreement(ids[offset:], scores) for offset in offsets}
        best = max(offsets, key=lambda offset: found[offset][0])
        agreed, known = found[best]
        if known >= _MIN_NAMED * len(ids):
            if agreed >= _MIN_ALIGNED * known:
                return best
        else:  # tokens of single bytes, as in scripts that the vocabulary lacks: their strings say nothing
            for offset in offsets:
                if len(scores) - (len(ids) - offset) in (0, 1):  # with or without the generated token
                    return offset
        raise self._other_tokenizer("the same text becomes other tokens there")

    def _agreement(self, ids: Sequence[int], scores: Sequence[TokenScores | None]) -> tuple[int, int]:
        """(tokens that came back as sent, tokens whose strings are of one token only)."""
        agreed = known = 0
        for token_id, score in zip(ids, scores, strict=False):
            found = None if score is None else self._names.find(score.token, score.token_bytes, score.token_id)
            known += found is not None
            agreed += found == token_id
        return agreed, known

    def _take_generated(self, probe: Probe, text: str) -> None:
        answer = self._ask(text, max_tokens=self._plan.answer_tokens, temperature=0, logprobs=self._top)
        ids = self._counted(self._prompt_ids(text), answer.prompt_tokens)
        probe.passages.append(ids)
        for score in answer.scores or ():
            found = None if score is None else self._names.find(score.token, score.token_bytes, score.token_id)
            self._add(probe, len(ids), score, found)
            if found is None:
                return  # what follows is conditioned on a token that is not known
            ids.append(found)

    def _counted(self, ids: list[int], prompt_tokens: int | None) -> list[int]:
        """Our tokens of the prompt, as many as the endpoint counted."""
        if prompt_tokens is None or prompt_tokens == len(ids):
            return ids
        if prompt_tokens == len(ids) - 1 and ids[0] == self._tokenizer.bos_id:
            return ids[1:]
        if prompt_tokens == len(ids) + 1 and self._tokenizer.bos_id is not None:
            return [self._tokenizer.bos_id, *ids]
        raise self._other_tokenizer(f"a prompt has {prompt_tokens} tokens there, {len(ids)} with the reference")

    def _add(self, probe: Probe, index: int, score: TokenScores | None, token_id: int | None) -> None:
        if score is None:
            return
        entries: dict[int, float] = {}
        for name, data, written, logprob in score.visible:
            found = self._names.find(name, data, written)
            known = self._names.knows(name) or found is not None
            self._known, self._unknown = self._known + known, self._unknown + (not known)
            if found is not None:
                entries.setdefault(found, logprob)
        if token_id is not None:
            entries[token_id] = score.logprob
        if len(entries) >= _MIN_VISIBLE or (len(entries) == 1 and self._top == 1):
            probe.add(len(probe.passages) - 1, index, entries, token_id)

    def _take_answers(self, probe: Probe, text: str) -> None:
        """Sampled answers: each is a passage whose last tokens were drawn by the endpoint."""
        temperature = self._plan.temperature
        for number in range(self._plan.samples):
            seed = 1000 * len(probe.passages) + number
            answer = self._ask(text, max_tokens=self._plan.answer_tokens, temperature=temperature, seed=seed)
            prompt = self._counted(self._prompt_ids(text), answer.prompt_tokens)
            tokens = self._continuation(text, answer.text)
            probe.passages.append([*prompt, *tokens])
            for index in range(len(prompt), len(prompt) + len(tokens)):
                token_id = probe.passages[-1][index]
                probe.add(len(probe.passages) - 1, index, {token_id: 0.0}, token_id)

    def _continuation(self, text: str, answer: str) -> list[int]:
        """Ids of sampled text; the last may be cut short by the limit, and is left out."""
        if self._template is not None and self._chat_only():
            return self._tokenizer.encode(answer, add_special_tokens=False)[:-1]
        whole, prompt = self._tokenizer.encode(text + answer), self._tokenizer.encode(text)
        return whole[len(prompt) : -1] if whole[: len(prompt)] == prompt else []

    def _check_names(self) -> None:
        total = self._known + self._unknown
        if total and self._unknown / total > _MAX_UNKNOWN:
            raise self._other_tokenizer(f"{self._unknown} of {total} token strings are not in its vocabulary")

    def _other_tokenizer(self, how: str) -> UserError:
        return UserError(
            f"{self._client.url} has another tokenizer than the reference: {how}",
            "give the model that the endpoint serves as --reference",
        )

    def _rerun(self, probe: Probe, text: str, take: Callable[[Probe, str], None]) -> float:
        """How far the endpoint is from itself when asked the same again."""
        again = Probe(probe.method)
        take(again, text)
        largest = 0.0
        earlier = {row: number for number, row in enumerate(probe.rows) if row[0] == 0}
        for number, row in enumerate(again.rows):
            if row in earlier:
                before = dict(zip(probe.ids[earlier[row]].tolist(), probe.values[earlier[row]], strict=True))
                pairs = zip(again.ids[number].tolist(), again.values[number], strict=True)
                largest = max([largest, *(abs(value - before[key]) for key, value in pairs if key in before)])
        return float(largest)


def cut_passages(text: str, tokenizer: Tokenizer, plan: ProbePlan) -> list[str]:
    """Texts of about `plan.length` tokens, evenly spaced; each is sent as text, so that every server takes it."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    starts = np.linspace(0, max(0, len(tokens) - plan.length), 3 * plan.passages).astype(int)
    passages: list[str] = []
    for start in dict.fromkeys(starts.tolist()):
        passage = tokenizer.decode(tokens[start : start + plan.length]).strip()
        if "\ufffd" not in passage and len(tokenizer.encode(passage)) > 2 * _FIRST_SCORED:
            passages.append(passage)
    if len(passages) < 2:
        raise UserError("the text is too short to probe with", f"give at least {4 * plan.length} tokens with --text")
    return passages[:: max(1, len(passages) // plan.passages)][: plan.passages]
