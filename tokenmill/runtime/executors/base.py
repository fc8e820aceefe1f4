"""The contract of an executor: rows and drafts in, one record out.

An executor runs the steps of one model on one device, in whatever way is fastest there: op by op, as a recorded
program, as a captured graph. Which way it takes is decided inside, per step; callers see `step` alone. Rows and
requests are read-only. Imports no torch: an executor may hold its values in arrays of any kind, which only its own
`sampler` computes with. Called by runtime/runner.py and by drafters that are models themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from tokenmill.types import Request, ScheduledTokens, TokenLogprobs

if TYPE_CHECKING:
    from tokenmill.config import ResolvedConfig
    from tokenmill.grammar.progress import GrammarProgress
    from tokenmill.model.adapters import AdapterBank
    from tokenmill.model.kvstore.base import KVStore
    from tokenmill.model.loader import LoadedModel


class Rows(Protocol):
    """The least that an executor's arrays can do: rows are picked by number or list of numbers."""

    def __getitem__(self, key: Any, /) -> Any: ...

    def tolist(self) -> list[Any]: ...


Array = TypeVar("Array", bound=Rows)  # what an executor computes with: torch tensors in all that exist so far
ArrayIn = TypeVar("ArrayIn", bound=Rows, contravariant=True)  # the same, as an argument only


@dataclass(slots=True)
class Draft:
    """Guessed tokens that may follow the known ones of a sequence, first to last."""

    token_ids: list[int] = field(default_factory=list)
    # The drafter's own opinion, 0 to 1, that each is right if those before it are. Need not be true, only comparable:
    # what tokens of that confidence are worth is measured.
    confidences: list[float] = field(default_factory=list)
    # [k, vocab] float64 where the tokens were drawn at random: the distribution of each. None: they were not drawn.
    distributions: Any = None
    # Of a tree: the index in the draft of the token that each follows, always an earlier one; -1: the last known token.
    # None: each follows the one before it.
    parents: list[int] | None = None

    def parent(self, node: int) -> int:
        return node - 1 if self.parents is None else self.parents[node]

    def child(self, node: int, token_id: int) -> int | None:
        """The index at which `token_id` follows `node`; None if it does not."""
        if self.parents is None:
            following = node + 1
            return following if following < len(self.token_ids) and self.token_ids[following] == token_id else None
        pairs = zip(self.parents, self.token_ids, strict=True)
        return next((index for index, pair in enumerate(pairs) if pair == (node, token_id)), None)

    def depths(self) -> list[int]:
        depths: list[int] = []
        for node in range(len(self.token_ids)):
            parent = self.parent(node)
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    def cut(self, length: int) -> None:
        del self.token_ids[length:], self.confidences[length:]
        if self.distributions is not None:
            self.distributions = self.distributions[:length]
        if self.parents is not None:
            del self.parents[length:]

    def straighten(self) -> None:
        """Keep only the first branch of a tree: for steps in which trees cannot be checked."""
        if self.parents is None:
            return
        branch, node = [], -1
        while node in self.parents:
            node = self.parents.index(node)
            branch.append(node)
        self.token_ids = [self.token_ids[node] for node in branch]
        self.confidences = [self.confidences[node] for node in branch]
        self.parents = None


_NO_TOKENS: list[int] = []


@dataclass(frozen=True, slots=True)
class StepInput:
    """What one step computes: of each row its `count` known tokens, then its drafted ones.

    The tokens of a step are numbered in that order, row after row: `StepOutput.hidden` goes by these numbers. A row
    with a count of 0 computes its drafted tokens alone, from position `start` on (a draft model goes on).
    """

    rows: Sequence[ScheduledTokens]
    drafts: Mapping[int, Draft] = field(default_factory=dict)  # by row number
    hidden: bool = False  # `StepOutput.hidden` will be read
    max_run: int = 1  # greedy tokens of a row that may follow each other inside this call, where all rows decode
    queue_next: bool = True  # the step that would follow may be launched before this one is answered
    logit_ranges: Sequence[range] | None = None  # by row: offsets of tokens whose logits are read, instead of sampling

    def draft_ids(self, number: int) -> list[int]:
        """Not to be changed."""
        draft = self.drafts.get(number)
        return _NO_TOKENS if draft is None else draft.token_ids

    def length(self, number: int) -> int:
        """Tokens that are computed for a row."""
        return self.rows[number].count + len(self.draft_ids(number))

    def token_ids(self, number: int) -> list[int]:
        row = self.rows[number]
        return row.request.token_ids[row.start : row.start + row.count] + self.draft_ids(number)

    def num_logits(self, number: int) -> int:
        """Rows of logits that choose tokens of a sampling row: after its last known token, after each drafted one."""
        drafted = len(self.draft_ids(number))
        return drafted + (self.rows[number].count > 0)

    @property
    def decodes(self) -> bool:
        """Whether every row has at most one known token, all sample, and nothing else is wanted of them."""
        return self.logit_ranges is None and all(map(_decodes, self.rows))


def _decodes(row: ScheduledTokens) -> bool:
    request = row.request
    return (
        row.count <= 1
        and row.samples
        and not row.num_dropped
        and not request.embeds
        and (request.params.prompt_logprobs is None or row.start >= len(request.prompt_ids) - 1)
    )


def num_prompt_logits(row: ScheduledTokens) -> int:
    """How many leading tokens of the row need logits because the caller asked for prompt log-probabilities: each
    predicts the prompt token after it, so the last prompt token needs none."""
    if row.request.params.prompt_logprobs is None:
        return 0
    return max(0, min(row.count, len(row.request.prompt_ids) - 1 - row.start))


@dataclass(slots=True)
class StepOutput(Generic[Array]):
    """What a step answers. Arrays are valid until the executor's next step.

    Logits come in this order: prompt positions whose log-probabilities were requested, row after row (or all of
    `StepInput.logit_ranges`); then of each sampling row its last known token and its drafted ones.
    """

    logits: Callable[[int, int], Array]  # rows [begin, end), float32
    hidden: Callable[[Sequence[int]], Array]  # a copy of the states of these tokens of the step, before the final norm
    # The token chosen at each logit row by the executor itself (None in it: no token is possible); None where the
    # requests need more than it can do: then the caller chooses from the logits, with the executor's sampler.
    tokens: Sequence[int | None] | None = None
    logprobs: list[TokenLogprobs | None] | None = None  # with `tokens`: of the rows that asked for them
    runs: list[list[int]] | None = None  # by row, where max_run > 1 was used: greedy tokens, each from the one before
    guesses: list[list[int]] | None = None  # by token of the step: what a draft head inside the step expects to follow


class TokenSampler(Protocol[ArrayIn]):
    """Chooses tokens from an executor's logits; runtime/sampling/sampler.py is the torch one.

    `drafted[i]`: tokens assumed to follow those of request i already, with which penalties, grammars and random
    numbers must count; the request itself is never changed.
    """

    def is_plain(self, requests: Sequence[Request]) -> bool:
        """Whether the executor's own choice is the sampler's for all of them."""
        ...

    def sample(
        self, logits: ArrayIn, requests: Sequence[Request], drafted: Sequence[Sequence[int]] = ()
    ) -> tuple[list[int | None], list[TokenLogprobs | None]]:
        """`logits` [R, vocab] is consumed. None for a row in which no token is possible."""
        ...

    def accept_or_redraw(
        self, logits: ArrayIn, request: Request, drafted: Sequence[int], token_id: int, proposal: Any
    ) -> tuple[int | None, TokenLogprobs | None]:
        """Rejection sampling of one token drawn from the distribution `proposal`, or its replacement."""
        ...

    def distribution(self, logits: ArrayIn, request: Request, drafted: Sequence[int] = ()) -> Any:
        """[vocab] float64: what a random row is drawn from, or None where no token is possible. Edits the row."""
        ...

    def prompt_logprobs(
        self, logits: ArrayIn, token_ids: Sequence[int], tops: Sequence[int]
    ) -> list[TokenLogprobs]: ...

    def allowed(self, request: Request, token_ids: Sequence[int]) -> int:
        """How many of these tokens could follow the request's own, one after the other."""
        ...

    def prepare_grammars(self, requests: Sequence[Request]) -> None:
        """Told of the requests that `grammar_progress` will be asked for."""
        ...

    def grammar_progress(self, request: Request) -> GrammarProgress | None:
        """How far its output is in its grammar; None if it has none."""
        ...


class StepGuesser(Protocol):
    """A draft head that guesses inside the steps of an executor (`Executor.attach_drafter`)."""

    depth: int  # tokens that it guesses

    def note(self, batch: Any) -> None:
        """Told of every step before it is computed: the tokens that it reads. Safe to capture."""
        ...

    def guess(self, hidden: Any, last: Any, batch: Any) -> Any:
        """hidden [R, hidden] and the token drawn at each row -> int64 [R, depth]: what may follow. The batch's keys and
        values are stored."""
        ...


class Executor(ABC, Generic[Array]):
    name: str
    sampler: TokenSampler[Array]
    max_logit_rows: int  # rows of logits that may be read at a time: bounds memory, whatever the vocabulary
    lookahead: int = 0  # tokens for which KV slots should be held ahead, so that following steps can be queued
    runs_greedily: bool = False  # can use StepInput.max_run
    takes_trees: bool = False  # drafts may have parents
    adapters: AdapterBank | None = None  # what the adapter slots of rows refer to, after `hold_adapters`

    def padded(self, num_tokens: int) -> int:
        """What a step that verifies drafts is padded to, so many tokens in all."""
        return num_tokens

    @abstractmethod
    def step(self, work: StepInput) -> StepOutput[Array]:
        """Compute the tokens of all rows and store their keys and values."""

    def settle_drafts(self, kept: Sequence[int]) -> None:
        """Told after a step with drafts how many tokens of each drafted row hold, known ones included, in the order of
        rows: for what cannot be cut at a token afterwards, as recurrent states."""

    @abstractmethod
    def final_norm(self, hidden: Array) -> Array:
        """[R, hidden] -> what the head reads: the state that embeddings are made of."""

    @abstractmethod
    def token_logits(self, states: Array, token_ids: Sequence[int], adapter_slot: int = 0) -> Array:
        """[R, hidden] as `final_norm` gives them -> [R, tokens]: the logits of these tokens alone."""

    def prepare(self) -> bool:
        """Compile or capture one kind of step ahead of its use; False once none is left. For idle
        moments: it must not touch what requests hold."""
        return False

    def hold_adapters(self, num_slots: int, max_rank: int) -> None:
        """Told before the first step that rows may have adapters, in slots from 1 on."""
        raise NotImplementedError(f"executor {self.name} has no adapters")

    def keep_layers(self, layers: tuple[int, ...]) -> str:  # noqa: ARG002
        """Told before the first step: `StepOutput.hidden` shall bring, behind the last state, the input of these layers
        (ascending). Why it cannot; empty if it does."""
        return f"executor {self.name} keeps no states of inner layers"

    def attach_drafter(self, needs_hidden: bool, guesser: StepGuesser | None) -> bool:  # noqa: ARG002
        """Told before the first step what the drafter wants; True if steps with drafts will bring `guesses`."""
        return False


class RegisteredExecutor(Executor[Array]):
    """An executor of the table in `__init__.py`: chosen for a model and a store, unless it declines them."""

    @abstractmethod
    def __init__(self, model: LoadedModel, store: KVStore, config: ResolvedConfig) -> None: ...

    @classmethod
    @abstractmethod
    def declines(cls, model: LoadedModel, store: KVStore) -> str | None:
        """Why this executor cannot run this model over this store; None if it can."""
