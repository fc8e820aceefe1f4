"""The drafter of `--speculate off`: guesses nothing. Grammars are drafted from all the same (grammar_drafts.py)."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.runtime.executors.base import Draft
from tokenmill.runtime.speculation.base import Drafter, Target
from tokenmill.types import ScheduledTokens


class NoDrafter(Drafter):
    name = "off"

    @classmethod
    def build(cls, _argument: str, _target: Target) -> NoDrafter:
        return cls()

    def draft(self, rows: Sequence[ScheduledTokens], _limits: Sequence[int]) -> list[Draft]:
        return [Draft() for _ in rows]
