"""What the serving path adds to the search: goodput of the references and the finalists under the user's arrivals.

The references (the baseline, the stored file as it is served today) are replayed and searched for the rate that they
sustain whether or not they meet the objectives; finalists that sustain clearly less than the best are dropped. Where
no objective is given, nothing here runs. Called by the loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.optimize.candidates import STORED, Candidate, candidate_of
from tokenmill.optimize.evidence import compare_speed
from tokenmill.optimize.results import FAILED, PASSED, CandidateResult, Latency, Run
from tokenmill.optimize.space import Space
from tokenmill.optimize.trial import Trials

_SAME_GOODPUT = 0.95  # of the best


@dataclass(frozen=True, slots=True)
class ServingRound:
    trials: Trials

    def measure_reference(self, result: CandidateResult, label: str) -> None:
        """What it serves within the objectives; it need not meet them."""
        for work, kind in ((self.trials.replay, "replay"), (self.trials.sustain, "rate")):
            if not self.trials.attempt(result, work, result, name=f"{kind} of {label}"):
                return

    def sustain(self, finalists: list[CandidateResult]) -> list[CandidateResult]:
        """The finalists with the most goodput at the rates that they sustain; the first is always measured."""
        measured: list[CandidateResult] = []
        for result in finalists:
            late = bool(measured) and self.trials.budget.used >= 1 and not self.trials.is_sustained(result)
            if late:
                result.reason, self.trials.out_of_time = "no time was left to find the rate that it sustains", True
            elif self.trials.attempt(result, self.trials.sustain, result):
                measured.append(result)
        return self.with_most_goodput(measured)

    def with_most_goodput(self, finalists: list[CandidateResult]) -> list[CandidateResult]:
        """Only where goodputs are alike does throughput decide."""
        goodputs = [latency.goodput_tok_s if (latency := _measured(each)) else None for each in finalists]
        most = max((each for each in goodputs if each is not None), default=0.0)
        kept = []
        for result, own in zip(finalists, goodputs, strict=True):
            if own is None or own >= _SAME_GOODPUT * most:
                kept.append(result)
            else:
                result.reason = f"{own:.0f} tokens/s within the objectives, another has {most:.0f}"
        return kept


def comparable_latencies(reference: CandidateResult, result: CandidateResult) -> tuple[Latency | None, Latency | None]:
    """Of one kind: at the rates that both sustain, else under the same arrivals."""
    if reference.sustained and result.sustained and reference.sustained.goodput_tok_s > 0:
        return reference.sustained, result.sustained
    return reference.latency, result.latency


def measure_stored(
    trials: Trials, space: Space, baseline: CandidateResult, tried: CandidateResult | None
) -> CandidateResult | None:
    """The stored file on our engine: what is served today where nothing else is said. `tried`: the candidate that is
    just that. The baseline itself where it is the same; None: it does not run."""
    if tried is not None and trials.timed(tried):
        return tried
    today = Candidate(STORED, space.default_kv, space.batch_tokens[0])
    if today == candidate_of(baseline):
        return baseline
    result = today.result(STORED)
    if not trials.attempt(result, _time_stored, trials, baseline, result, name="today"):
        return result if result.verdict == FAILED else None
    result.verdict = PASSED
    return result


def _time_stored(trials: Trials, baseline: CandidateResult, result: CandidateResult) -> bool:
    trials.build(result, float("inf"), "stored")
    base: list[Run] = []
    own: list[Run] = []
    for kind in ("today", "today again"):
        pairs = trials.lab.pair(kind, baseline, result)
        base, own = base + pairs[0], own + pairs[1]
    result.speed = compare_speed(base, own)
    return True


def _measured(result: CandidateResult) -> Latency | None:
    return result.sustained or result.latency
