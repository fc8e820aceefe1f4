"""The baseline: the fastest configuration of the unquantized model, so that savings are not against a slow one.

Plain float weights (written once from the source) compete, then plain float KV dtypes and batch sizes on the fastest of
them. Called by the loop.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.errors import UserError
from tokenmill.optimize.candidates import Candidate, batch_choices, parse_weights, unquantized_kv, unquantized_weights
from tokenmill.optimize.evidence import compare_speed
from tokenmill.optimize.machine_laboratory import MachineLaboratory
from tokenmill.optimize.results import FAILED, PASSED, SLOWER, CandidateResult


def choose_baseline(
    table: MachineLaboratory, say: Callable[[str, float], None]
) -> tuple[CandidateResult, list[CandidateResult]]:
    """(the fastest, all that were measured)."""
    tokens = table.engine.decided("batch_tokens")
    leader: CandidateResult | None = None
    tried: list[CandidateResult] = []

    def contest(candidates: list[Candidate]) -> None:
        nonlocal leader
        for candidate in candidates:
            say(f"baseline {candidate.name}", 0.02 + 0.02 * len(tried))
            result = CandidateResult(candidate.name, candidate.weights, candidate.kv, candidate.batch_tokens)
            tried.append(result)
            result.reason = table.store.recall("failed", f"baseline {candidate.name}") or ""
            if result.reason:
                result.verdict = FAILED
                continue
            try:
                leader = result if leader is None else _faster(table, leader, result)
            except Exception as error:  # any exception: a registered store may be third-party code
                result.verdict, result.reason = FAILED, " ".join(str(error).split())
                table.store.remember("failed", f"baseline {candidate.name}", result.reason)

    contest([Candidate(name, table.default_kv, tokens) for name in _plain_first()])
    if leader is None:
        raise UserError(f"no unquantized baseline runs here: {tried[0].reason}", "free memory or disk")
    contest([Candidate(leader.weights, kv, tokens) for kv in unquantized_kv() if kv != leader.kv])
    prompts = table.traffic.input_tokens * table.engine.decided("concurrency")
    contest([Candidate(leader.weights, leader.kv, size) for size in batch_choices(prompts) if size != tokens])
    for result in tried:
        if result.verdict != FAILED:
            result.verdict = PASSED if result is leader else SLOWER
    leader.artefact = table.build(leader, float("inf"))
    _free_losers(table, leader)
    return leader, tried


def _plain_first() -> list[str]:
    """F16 first: the others are compared with it."""
    return sorted(unquantized_weights(), key=lambda name: (name != "F16", name))


def _faster(table: MachineLaboratory, leader: CandidateResult, other: CandidateResult) -> CandidateResult:
    base, runs = table.pair("baseline", leader, other)
    other.speed = compare_speed(base, runs)
    if leader.speed is None:
        leader.speed = compare_speed(base, base)
    other.reason = f"{1 / other.speed.cost_ratio:.2f} x the speed of {leader.name}"
    return other if other.speed.cost_ratio < 1 else leader


def _free_losers(table: MachineLaboratory, leader: CandidateResult) -> None:
    """Delete the float copies that were not chosen: they are as large as the model."""
    for name in unquantized_weights():
        choice = parse_weights(name)
        if name != leader.weights:
            table.artefacts.discard(choice)
