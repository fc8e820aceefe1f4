"""What the loop asks of the machine: build, time, check, prove and replay a candidate. The loop decides, this measures.

One implementation measures engines (machine_laboratory.py); tests give the loop one with known costs and losses.
Whatever a measurement raises is recorded as the candidate's failure. Knows nothing of rounds, limits of time or
choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tokenmill.optimize.results import Artefact, CandidateResult, Latency, Proof, Quality, Run, Sustained


class Laboratory(Protocol):
    def build(self, result: CandidateResult, seconds: float) -> Artefact:
        """The files to serve, made if need be. Raises NotEnoughTimeError where that is forecast to take longer."""
        ...

    def pair(self, kind: str, baseline: CandidateResult, result: CandidateResult) -> tuple[list[Run], list[Run]]:
        """(baseline runs, candidate runs): short ones, alternating; a second where one cannot tell them apart."""
        ...

    def cycle(self, contenders: Sequence[CandidateResult], number: int) -> list[Run]:
        """One long run of each contender, within seconds of each other."""
        ...

    def has_cycle(self, contenders: Sequence[CandidateResult], number: int) -> bool:
        """Whether that cycle is in the store already."""
        ...

    def check(self, baseline: CandidateResult, result: CandidateResult) -> Quality:
        """Quality on a short text: a first look that can only refuse."""
        ...

    def prove(self, baseline: CandidateResult, result: CandidateResult) -> Proof:
        """Quality on the whole text, tasks, generated text and long contexts."""
        ...

    def replay(self, result: CandidateResult) -> Latency:
        """The arrivals of the traffic through the serving path; at the rate of `sustain` where they have none."""
        ...

    def sustain(self, result: CandidateResult) -> Sustained:
        """The highest rate of those arrivals that keeps the objectives."""
        ...

    def close(self) -> None: ...
