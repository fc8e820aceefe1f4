"""The contract of a drafter: guesses the next tokens of sequences that are being decoded.

A draft may be anything: verification (verify.py) makes the output what it is without drafts, so a drafter needs no care
for sampling settings, grammars or correctness, only for being right often and cheap. How many of its tokens are used is
not its business either (length.py). Called by the speculator, once per step, from one thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tokenmill.errors import UserError
from tokenmill.types import ScheduledTokens

if TYPE_CHECKING:
    from torch import Tensor

    from tokenmill.config import ResolvedConfig
    from tokenmill.model.kvstore.base import KVStore
    from tokenmill.model.loader import LoadedModel
    from tokenmill.runtime.executors.cuda.checks import StepHead
    from tokenmill.runtime.runner import Executor
    from tokenmill.runtime.sampling.sampler import Sampler
    from tokenmill.runtime.speculation.tree import TreeSteps


@dataclass(slots=True)
class Draft:
    """Guessed tokens, first to last."""

    token_ids: list[int] = field(default_factory=list)
    # The drafter's own opinion, 0 to 1, that each is right if those before it are. Need not be true, only comparable:
    # what tokens of that confidence are worth is measured.
    confidences: list[float] = field(default_factory=list)
    # [k, vocab] float64 where the tokens were drawn at random: the distribution of each. None: they were not drawn.
    distributions: Tensor | None = None
    # Of a tree: the place in the draft of the token that each follows, always an earlier one; -1: the last known token.
    # None: each follows the one before it.
    parents: list[int] | None = None

    def parent(self, node: int) -> int:
        return node - 1 if self.parents is None else self.parents[node]

    def child(self, node: int, token_id: int) -> int | None:
        """Where `token_id` follows `node` in the draft; None: it does not."""
        if self.parents is None:
            following = node + 1
            return following if following < len(self.token_ids) and self.token_ids[following] == token_id else None
        pairs = zip(self.parents, self.token_ids, strict=True)
        return next((place for place, pair in enumerate(pairs) if pair == (node, token_id)), None)

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
        """Keep only the first branch of a tree: where trees cannot be checked."""
        if self.parents is None:
            return
        branch, node = [], -1
        while node in self.parents:
            node = self.parents.index(node)
            branch.append(node)
        self.token_ids = [self.token_ids[each] for each in branch]
        self.confidences = [self.confidences[each] for each in branch]
        self.parents = None


@dataclass(frozen=True, slots=True)
class Target:
    """The model that is drafted for, for drafters that are models themselves."""

    model: LoadedModel
    store: KVStore
    executor: Executor
    sampler: Sampler
    config: ResolvedConfig


class Drafter(ABC):
    name: str
    # Needs no argument, no model and no training: can be tried on any model.
    ready_made = False
    # Drafting costs a forward pass per token: lengths are chosen before it, and it is not asked when it will not pay.
    computes = False
    # Wants the target's hidden states: `observe` is called after every step.
    needs_hidden = False
    # Runs the steps that check its drafts, where these are trees.
    trees: TreeSteps | None = None
    # Tokens of a draft where the steps that check drafts make the next ones (`in_step`); 0: they do not.
    whole = 0

    @classmethod
    @abstractmethod
    def build(cls, argument: str, target: Target) -> Drafter:
        """`argument` is what follows the colon of `--speculate`, or empty."""

    @abstractmethod
    def draft(self, rows: Sequence[ScheduledTokens], limits: Sequence[int]) -> list[Draft]:
        """A draft of at most `limits[i]` tokens to follow the last known token of each row; possibly none."""

    def observe(self, row: ScheduledTokens, num_accepted: int, hidden: Tensor) -> None:  # noqa: B027
        """The state [hidden] after the token whose logits chose the row's last one; `num_accepted` drafts came before.

        Before the final norm; the drafter's to keep.
        """

    def in_step(self, target: Target) -> StepHead | None:  # noqa: ARG002
        """What guesses inside a captured step, for executors that take it; then `take` is called instead of `observe`
        after steps with drafts."""
        return None

    def take(self, row: ScheduledTokens, num_accepted: int, token_ids: list[int]) -> None:  # noqa: B027
        """What the step itself guessed to follow the row's last token."""

    @property
    def nbytes(self) -> int:
        """Memory beyond what the target has, at most."""
        return 0


def refuse_argument(name: str, argument: str) -> None:
    if argument:
        raise UserError(f"--speculate {name} takes no argument, got '{argument}'", f"write --speculate {name}")
