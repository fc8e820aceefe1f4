"""Drafts for a step, and what is learned from its result: drafters, the choice of draft lengths, and timing.

Proposes drafts for the rows that may have some, after cutting what cannot be accepted (past a stop token, against a
grammar) and what does not pay; rows and requests are only read. Sequences that a grammar guides have drafts from it
too, and the one of more promise is taken. Knows neither logits nor pages. Called by the runner before and after a step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tokenmill.errors import UserError, unknown_name
from tokenmill.runtime.executors.base import Draft, Executor, StepOutput, TokenSampler
from tokenmill.runtime.speculation import DRAFTERS
from tokenmill.runtime.speculation.base import Drafter, Target
from tokenmill.runtime.speculation.gate import Decision, DraftGate
from tokenmill.runtime.speculation.grammar_drafts import GrammarDrafter
from tokenmill.runtime.speculation.length import DraftLengths
from tokenmill.runtime.speculation.none import NoDrafter
from tokenmill.types import Request, ScheduledTokens, StepResult

if TYPE_CHECKING:
    from torch import Tensor

_SHORT_PAUSE = 0.002  # seconds between two steps that count as part of the second: the engine was not idle
_DECAY = 0.9  # of the moving average of the time per drafted token
# After this many tokens without an accepted draft, this many are decoded before the next attempt at one.
_MAX_FRUITLESS_TOKENS = 16
_UNDRAFTED_RUN = 4
_MAX_DRAFT_TOKENS = 64
_ANY_RUN = 1 << 30
_SURE = 0.6  # chance of a grammar's draft up to which it is always verified: it pays where a token more costs 0.4 steps
_MAX_GRAMMAR_LOSS = -0.15  # of the time: long texts inside an output have no drafts, but what follows them has
# Tokens of each sequence that a step with grammars' drafts must promise where the next step is otherwise queued behind
# each: a step with drafts is not, and the device waits for the host.
_WORTH_WAITING = 0.25
_MAX_MASK_SHARE = 0.2  # of a step, that its masks take where grammars are drafted from and steps are queued
_AUTOMATIC = "suffix"  # the drafter of `auto`: of those that need no model the one that was measured to gain most
_UNSETTLED_STEPS = 2  # not timed, after a change between drafts and none: no step was queued ahead of them
# Not timed, of each size where steps are captured: the first one compiles, the second captures.
_UNCAPTURED_STEPS = 2


def build_speculator(target: Target) -> Speculator | None:
    """The speculator for `--speculate NAME[:ARGUMENT]`; None for off, unless grammars are drafted from."""
    config = target.config
    if config.draft_tokens > _MAX_DRAFT_TOKENS:
        raise UserError(f"draft_tokens is {config.draft_tokens}", f"give 1 to {_MAX_DRAFT_TOKENS}")
    drafter = _build_drafter(target)
    if isinstance(drafter, NoDrafter) and not config.jump_forward:
        return None
    sampler = target.executor.sampler
    grammars = GrammarDrafter(sampler) if config.jump_forward else None
    gate = DraftGate(_AUTOMATIC) if config.speculate == "auto" else None
    return Speculator(drafter, sampler, grammars=grammars, gate=gate, padded=captured_sizes(target.executor))


def captured_sizes(executor: Executor[Any]) -> Callable[[int], int] | None:
    """`padded` of a Speculator."""
    return executor.padded if executor.lookahead > 0 else None


def _build_drafter(target: Target) -> Drafter:
    name, _, argument = target.config.speculate.partition(":")
    if name in ("off", ""):
        return NoDrafter()
    if target.config.speculate == "auto":
        name = _AUTOMATIC
    if name not in DRAFTERS:
        raise unknown_name("drafter", name, ["off", "auto", *DRAFTERS])
    drafter_class: type[Drafter] = DRAFTERS.get(name)
    if drafter_class.computes and target.store.layout.states and not drafter_class.takes_recurrent:
        raise UserError(
            f"--speculate {name} does not support models with recurrent layers", "use --speculate suffix or ngram"
        )
    drafter = drafter_class.build(argument, target)
    guesser = drafter.step_guesser(target)
    if target.executor.attach_drafter(drafter.needs_hidden, guesser) and guesser is not None:
        drafter.guessed_depth = guesser.depth
    return drafter


class Speculator:
    def __init__(
        self,
        drafter: Drafter,
        sampler: TokenSampler[Any],
        clock: Callable[[], float] = time.perf_counter,
        grammars: GrammarDrafter | None = None,
        gate: DraftGate | None = None,
        padded: Callable[[int], int] | None = None,
    ) -> None:
        """`gate`: decides by measured gain whether the drafter is asked at all. `padded`: where steps are captured, and
        those without drafts queued behind each other, what one of so many tokens is padded to."""
        self.drafter = drafter
        self.grammars = grammars
        self.gate = gate
        self.lengths = DraftLengths(padded)
        self._grammar_gate = DraftGate("grammar", _MAX_GRAMMAR_LOSS)
        self._asks_drafter = self.drafts_all  # in this step
        self._from_grammar: set[int] = set()  # rows of this step whose draft is a grammar's
        self._grammar_seconds: float | None = None  # that they took to draft; None: they were not asked
        self._sampler = sampler
        self._padded = padded
        self._clock = clock
        self._ended = 0.0  # clock at the end of the last step
        self._began = 0.0  # clock at the start of this step, after drafting
        self._drafting = 0.0  # seconds that this step's drafts took
        self._round_seconds = 0.0  # to draft one token of every row, for drafters that compute
        self._fruitless = 0  # tokens per sequence since a draft was accepted
        self._steps_alike = 0  # consecutive steps with drafts, or without
        self._drafted = False  # whether the last step had drafts
        self._num_seen: Counter[int] = Counter()  # steps by what they are padded to

    @property
    def drafts_all(self) -> bool:
        """Whether any sequence may have drafts; else only those that a grammar guides."""
        return not isinstance(self.drafter, NoDrafter)

    def report_to(self, listener: Callable[[Sequence[Decision]], None]) -> None:
        """Tell `listener` of every decision whether drafting pays."""
        gates = [self._grammar_gate, *([] if self.gate is None else [self.gate])]
        for gate in gates:
            gate.on_decision = lambda: listener([decision for each in gates for decision in each.decisions])

    def propose(self, rows: Sequence[ScheduledTokens]) -> dict[int, Draft]:
        """Drafts by row of the plan; rows without one are left out."""
        started = self._clock()
        self._from_grammar, self._grammar_seconds = set(), None
        self._asks_drafter = self._may_ask_drafter(len(rows))
        open_rows = [
            number
            for number, row in enumerate(rows)
            if row.num_draft_slots and not _is_watched(row) and (self._asks_drafter or self._is_guided(row))
        ]
        drafts = self._draft(rows, open_rows) if open_rows else {}
        self._began = self._clock()
        self._drafting = self._began - started
        if started - self._ended < _SHORT_PAUSE:
            self._began -= max(0.0, started - self._ended)
        return drafts

    @property
    def max_undrafted_run(self) -> int:
        """Tokens of a sequence that may be decoded in one call without drafts: if none was accepted for a while, a run
        of steps saves more time than the missed drafts would."""
        if not self._asks_drafter:
            return _ANY_RUN
        return _UNDRAFTED_RUN if self._fruitless >= _MAX_FRUITLESS_TOKENS else 1

    @property
    def wants_hidden(self) -> bool:
        """Whether hidden states of a step without drafts are needed: not while drafting is paused."""
        return self.drafter.needs_hidden and not (self.drafter.guessed_depth and self.lengths.is_paused)

    def observe(self, rows: Sequence[ScheduledTokens], result: StepResult, hidden: Tensor) -> None:
        """`hidden` [rows, hidden]: the state whose logits chose each row's last token."""
        for number, row in enumerate(rows):
            if row.samples:
                self.drafter.observe(row, len(result.accepted.get(number, ())), hidden[number])

    def observe_states(self, rows: Sequence[ScheduledTokens], result: StepResult, output: StepOutput[Any]) -> None:
        """For drafters that read the state of every token that holds."""
        following: list[list[int]] = []
        tokens: list[int] = []
        begin = 0
        for number, row in enumerate(rows):
            ids = row.request.token_ids
            if row.samples:
                new = (*result.accepted.get(number, ()), result.token_ids[number])
                known = ids[row.start + 1 : row.start + row.count] + [each for each in new if each is not None]
            else:
                known = ids[row.start + 1 : row.start + row.count + 1]
            following.append(known)
            tokens += range(begin, begin + len(known))
            begin += row.count + result.num_drafted.get(number, 0)
        self.drafter.observe_states(rows, following, output.hidden(tokens))

    def observe_guesses(self, rows: Sequence[ScheduledTokens], result: StepResult, guesses: list[list[int]]) -> None:
        """`guesses`: by row, the draft that the step itself computed to follow it."""
        for number, row in enumerate(rows):
            self.drafter.observe_guesses(row, len(result.accepted.get(number, ())), guesses[number])

    def learn(self, rows: Sequence[ScheduledTokens], drafts: dict[int, Draft], result: StepResult) -> None:
        """Record which drafts were accepted and what the step cost. Sets `result.saved_seconds`."""
        self._ended = self._clock()
        if not self.drafts_all and not any(map(self._is_guided, rows)):
            return
        steps = 1 if drafts else 1 + max(map(len, result.accepted.values()), default=0)  # a run of decodes
        seconds = (self._ended - self._began) / steps
        self._fruitless = 0 if drafts and result.accepted else self._fruitless + steps
        decodes = all(row.count == 1 for row in rows)
        self._steps_alike = (self._steps_alike + 1 if bool(drafts) == self._drafted else 0) if decodes else -1
        self._drafted = bool(drafts)
        if decodes:
            num_tokens = len(rows) + sum(len(draft.token_ids) for draft in drafts.values())
            result.saved_seconds = self._gain(len(rows), drafts, result, seconds)
            if self._is_timed(num_tokens):
                # One without drafts has a key of its own: the next one is queued behind it, which makes it cheaper.
                self.lengths.costs.record(self.lengths.padded(num_tokens) if drafts else num_tokens, seconds)
        if self.grammars is not None:
            for number, row in enumerate(rows):
                if row.request.params.structured is not None:
                    came = (*result.accepted.get(number, ()), result.token_ids[number])
                    self.grammars.observe(row.request, [each for each in came if each is not None])
        accepted = [result.accepted.get(number, []) for number in drafts]
        self.lengths.learn([rows[number].request for number in drafts], list(drafts.values()), accepted)

    def _is_timed(self, num_tokens: int) -> bool:
        """Whether the step took as long as the next one like it will."""
        if self.drafter.guessed_depth:
            return self._steps_alike >= _UNSETTLED_STEPS
        if self._padded is None:
            return True
        size = self._padded(num_tokens)
        self._num_seen[size] += 1
        return self._num_seen[size] > _UNCAPTURED_STEPS

    def forget(self) -> None:
        """What was measured: the load is another one."""
        self.lengths = DraftLengths(self._padded)

    def _may_ask_drafter(self, num_rows: int) -> bool:
        return self.drafts_all and (self.gate is None or self.gate.lets_through(num_rows))

    def _is_guided(self, row: ScheduledTokens) -> bool:
        return self.grammars is not None and row.request.params.structured is not None

    def _gain(self, num_rows: int, drafts: dict[int, Draft], result: StepResult, seconds: float) -> float:
        """Seconds that drafting won in this step; the gates are told what part is theirs."""
        known = self.lengths.costs.is_known(num_rows)
        plain = self.lengths.costs.seconds(num_rows)
        held = {number: len(result.accepted.get(number, ())) for number in drafts}
        total = plain * (num_rows + sum(held.values())) / num_rows - seconds if drafts and known else 0.0
        if known or not drafts:
            by_grammar = [number for number in held if number in self._from_grammar]
            part = len(by_grammar) / max(1, len(held))
            if any(held.values()):
                part = sum(held[number] for number in by_grammar) / sum(held.values())
            spent = self._grammar_seconds or 0.0
            if self._grammar_seconds is not None:
                self._grammar_gate.record(num_rows, part * total - spent, seconds)
            if self.gate is not None and self._asks_drafter:
                self.gate.record(num_rows, (1.0 - part) * total - (self._drafting - spent), seconds)
        return total - self._drafting

    def _draft(self, rows: Sequence[ScheduledTokens], numbers: list[int]) -> dict[int, Draft]:
        drafted_rows = [rows[number] for number in numbers]
        requests = [row.request for row in drafted_rows]
        num_tokens = sum(row.count for row in rows)
        limits = [row.num_draft_slots for row in drafted_rows]
        if self.drafter.guessed_depth:
            return self._draft_to_guessed_depth(rows, numbers)
        drafts = self._ask_drafter(drafted_rows, limits, num_tokens)
        for row, draft in zip(drafted_rows, drafts, strict=True):
            if row.request.params.structured is not None or not all(map(_decodes, rows)):
                draft.straighten()
            draft.cut(self._acceptable_length(row.request, draft))
        self._ask_grammars(rows, numbers, drafts)
        lengths = self.lengths.choose(requests, drafts, num_tokens)
        proposed = {}
        for number, draft, length in zip(numbers, drafts, lengths, strict=True):
            if number in self._from_grammar:
                length = max(length, _sure_length(draft))
            if length:
                draft.cut(length)
                proposed[number] = draft
        promised = sum(map(_promise, proposed.values()))
        if self._padded is not None and not self._asks_drafter and promised < _WORTH_WAITING * len(rows):
            return {}
        return proposed

    def _ask_drafter(self, rows: Sequence[ScheduledTokens], limits: list[int], num_tokens: int) -> list[Draft]:
        if not self._asks_drafter:
            return [Draft() for _ in rows]
        if not self.drafter.computes:
            return self.drafter.draft(rows, limits)
        limits = self.lengths.limits([row.request for row in rows], limits, num_tokens, self._round_seconds)
        if not any(limits):
            return [Draft() for _ in rows]
        started = self._clock()
        drafts = self.drafter.draft(rows, limits)
        self._time_rounds(self._clock() - started, drafts)
        return drafts

    def _ask_grammars(self, rows: Sequence[ScheduledTokens], numbers: list[int], drafts: list[Draft]) -> None:
        """Replace drafts of sequences that a grammar guides where its own promises more tokens."""
        guided = [place for place, number in enumerate(numbers) if self._is_guided(rows[number])]
        if self.grammars is None or not guided or self._masks_are_slow(rows):
            return
        if not self._grammar_gate.lets_through(len(rows)):
            return
        started = self._clock()
        self._sampler.prepare_grammars([rows[numbers[place]].request for place in guided])
        for place in guided:
            row = rows[numbers[place]]
            draft = self.grammars.draft(row.request, row.num_draft_slots)
            if _promise(draft) > _promise(drafts[place]):
                drafts[place] = draft
                self._from_grammar.add(numbers[place])
        self._grammar_seconds = self._clock() - started

    def _masks_are_slow(self, rows: Sequence[ScheduledTokens]) -> bool:
        """Whether the device would wait for masks before a step with drafts: without, they are computed beside it."""
        if self._padded is None or not self.lengths.costs.is_known(len(rows)):
            return False
        seconds = sum(row.request.grammar.mask_seconds for row in rows if row.request.grammar is not None)
        return seconds > _MAX_MASK_SHARE * self.lengths.costs.seconds(len(rows))

    def _draft_to_guessed_depth(self, rows: Sequence[ScheduledTokens], numbers: list[int]) -> dict[int, Draft]:
        """For drafters whose drafts come from the step before, which queues the step that verifies them: all or none,
        because shorter drafts save nothing and discard the queued step. Steps with prompts are not queued and have no
        drafts."""
        depth = self.drafter.guessed_depth
        if any(row.count > 1 for row in rows):
            return {}
        numbers = [number for number in numbers if rows[number].num_draft_slots >= depth]
        drafted_rows = [rows[number] for number in numbers]
        if not self.lengths.pays([row.request for row in drafted_rows], depth, sum(row.count for row in rows)):
            return {}
        drafts = self.drafter.draft(drafted_rows, [depth] * len(drafted_rows))
        for row, draft in zip(drafted_rows, drafts, strict=True):
            if row.request.params.structured is not None:
                draft.cut(self._acceptable_length(row.request, draft))
        return {number: draft for number, draft in zip(numbers, drafts, strict=True) if draft.token_ids}

    def _acceptable_length(self, request: Request, draft: Draft) -> int:
        """How many leading tokens of a draft could be accepted at all."""
        ids = draft.token_ids
        if draft.parents is not None:
            return len(ids)
        for depth, token_id in enumerate(ids):
            if token_id in request.stop_ids:
                ids = ids[: depth + 1]
                break
        return self._sampler.allowed(request, ids) if ids and request.params.structured is not None else len(ids)

    def _time_rounds(self, seconds: float, drafts: Sequence[Draft]) -> None:
        rounds = max((len(draft.token_ids) for draft in drafts), default=0)
        if rounds:
            latest = seconds / rounds
            average = self._round_seconds
            self._round_seconds = latest if not average else _DECAY * average + (1.0 - _DECAY) * latest


def _promise(draft: Draft) -> float:
    """Tokens of a draft that are expected to hold, by its own opinion."""
    total, chance = 0.0, 1.0
    for confidence in draft.confidences:
        chance *= confidence
        total += chance
    return total


def _sure_length(draft: Draft) -> int:
    """Leading tokens that will probably come. They have to be computed anyway, and together they take no longer than
    one after the other: no gain needs to be measured first."""
    chance = 1.0
    for length, confidence in enumerate(draft.confidences):
        chance *= confidence
        if chance < _SURE:
            return length
    return len(draft.confidences)


def _is_watched(row: ScheduledTokens) -> bool:
    """Whether attention weights of the row's tokens are summed: rejected drafts must not count in."""
    cache = row.request.params.cache
    return cache is not None and cache.needs_attention


def _decodes(row: ScheduledTokens) -> bool:
    """Whether the row only needs the token after its one known token."""
    request = row.request
    if _is_watched(row):
        return False
    return row.count == 1 and row.samples and row.start >= len(request.prompt_ids) - 1 and not request.embeds
