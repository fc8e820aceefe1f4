"""The contract of a drafter: guesses the next tokens of sequences that are being decoded.

Any draft is valid: verification (verify.py) keeps the output what it is without drafts, so a drafter need not consider
sampling settings, grammars or correctness; it should be right often and cheap. How many of its tokens are used is
decided in length.py. Called by the speculator, once per step, from one thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmill.errors import UserError
from tokenmill.runtime.executors.base import Draft, Executor, StepGuesser
from tokenmill.types import ScheduledTokens

if TYPE_CHECKING:
    from torch import Tensor

    from tokenmill.config import ResolvedConfig
    from tokenmill.model.kvstore.base import KVStore
    from tokenmill.model.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class Target:
    """The model that is drafted for, for drafters that are models themselves."""

    model: LoadedModel
    store: KVStore
    executor: Executor[Tensor]
    config: ResolvedConfig


class Drafter(ABC):
    name: str
    # Needs no argument, no model and no training: can be tried on any model.
    ready_made = False
    # Drafts with parameters that `tokenmill train-draft` makes for a model; the argument is their folder.
    needs_training = False
    # Drafting costs a forward pass per token: lengths are chosen beforehand, and nothing is drafted unless it pays.
    computes = False
    # Reads the target's hidden states: `observe` is called after every step.
    needs_hidden = False
    # Reads those of every token, prompts too: `observe_states` is called instead of `observe`.
    needs_all_states = False
    # Drafts for models with recurrent layers too, though it computes: what it keeps can be cut at a token.
    takes_recurrent = False
    # Tokens per draft where the steps that verify drafts also compute the next ones (`step_guesser`); 0: they do not.
    guessed_depth = 0

    @classmethod
    @abstractmethod
    def build(cls, argument: str, target: Target) -> Drafter:
        """`argument` is what follows the colon of `--speculate`, or empty."""

    @classmethod
    def search_arguments(cls, device: str, num_layers: int) -> tuple[str, ...]:  # noqa: ARG003
        """Arguments that an automatic search tries on a model of `num_layers` layers; none: it cannot guess one."""
        return ("",) if cls.ready_made else ()

    @abstractmethod
    def draft(self, rows: Sequence[ScheduledTokens], limits: Sequence[int]) -> list[Draft]:
        """A draft of at most `limits[i]` tokens to follow the last known token of each row; possibly none."""

    def observe(self, row: ScheduledTokens, num_accepted: int, hidden: Tensor) -> None:  # noqa: B027
        """`hidden` [hidden]: the state, before the final norm, whose logits chose the row's last token; `num_accepted`
        accepted drafts precede that token. The drafter may keep the tensor."""

    def observe_states(  # noqa: B027
        self, rows: Sequence[ScheduledTokens], following: Sequence[Sequence[int]], hidden: Tensor
    ) -> None:
        """What a step computed. `following[i]`: the tokens behind those of row i that hold, from position
        `rows[i].start + 1` on, drafts and the new token included; `hidden` [all of them, hidden]: the state before the
        final norm at the position before each, row after row. Behind it lie those of `Executor.keep_layers`."""

    def step_guesser(self, target: Target) -> StepGuesser | None:  # noqa: ARG002
        """A draft head to run inside captured steps, for executors that support it; `observe_guesses` is then called
        instead of `observe` after steps with drafts."""
        return None

    def observe_guesses(self, row: ScheduledTokens, num_accepted: int, token_ids: list[int]) -> None:  # noqa: B027
        """The draft that the step itself computed to follow the row's last token."""

    @property
    def nbytes(self) -> int:
        """Upper bound of the memory that the drafter adds."""
        return 0


def refuse_argument(name: str, argument: str) -> None:
    if argument:
        raise UserError(f"--speculate {name} takes no argument, got '{argument}'", f"write --speculate {name}")
