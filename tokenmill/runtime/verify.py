"""Exact verification: which drafted tokens the target would have chosen itself, and the token after them.

The only place that decides which drafts hold, for every drafter, executor and sampling setting (the kernel that
computes the next step on a GPU mirrors `num_held` and is tested against it). Two ways, by how the draft was made:

* Guessed (no distribution): at each position the ordinary sampler chooses the target's token, with penalties, grammar,
  filters and the request's own random number as usual; the draft holds while it agrees. In distribution this is
  rejection sampling against a deterministic draft (accept with probability p(token), else draw from the rest).
  Moreover the tokens are exactly those that would have come without drafts, whatever was drafted.
* Drawn from a distribution q: accept with probability min(1, p/q), else draw from what p has over q, normalized. The
  tokens differ from those without drafts, their distribution does not.

Knows nothing of drafters and pages, and imports no torch: the sampler does the arithmetic. Called by the runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenmill.runtime.executors.base import Array, Draft, TokenSampler
from tokenmill.types import Request, TokenLogprobs


@dataclass(slots=True)
class Verdict:
    """What a row brings: drafts that held, then one token. None: no token is possible (and no draft held)."""

    accepted: list[int] = field(default_factory=list)
    token_id: int | None = None
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # of the accepted ones and the token
    path: list[int] = field(default_factory=list)  # indices in the draft of the accepted ones

    @property
    def row(self) -> int:
        """Of the request's rows of logits, the one that decides the next token."""
        return 1 + self.path[-1] if self.path else 0


def num_held(draft_ids: Sequence[int], chosen: Sequence[int]) -> int:
    """How many leading tokens of a draft hold: each must be what was chosen at its position. `chosen[0]` was chosen
    after the last known token, `chosen[i]` after draft token i - 1."""
    pairs = zip(draft_ids, chosen, strict=False)
    return next((n for n, (drafted, token_id) in enumerate(pairs) if drafted != token_id), len(draft_ids))


def verify(
    sampler: TokenSampler[Array], logits: Array, requests: Sequence[Request], drafts: Sequence[Draft]
) -> list[Verdict]:
    """`logits` [sum of 1 + len(draft), vocab]: for each request the row of its last known token, then its drafts'.

    Consumed. A stop token is never among the accepted ones: it is the token, and ends the row.
    """
    plain = sampler.is_plain(requests) and all(request.params.greedy for request in requests)
    if plain:  # nothing but the largest logit matters: all rows at once
        owners = [each for each, draft in zip(requests, drafts, strict=True) for _ in range(1 + len(draft.token_ids))]
        return compare(sampler.sample(logits, owners)[0], requests, drafts)
    verdicts = [Verdict() for _ in requests]
    starts = _starts(drafts)
    unfinished = list(range(len(requests)))
    while unfinished:
        logit_rows = [(number, starts[number] + verdicts[number].row) for number in unfinished]
        choices = _choose(sampler, logits, logit_rows, requests, drafts, verdicts)
        unfinished = [
            number
            for number, (token_id, logprobs) in zip(unfinished, choices, strict=True)
            if _take(verdicts[number], token_id, logprobs, requests[number], drafts[number])
        ]
    return verdicts


def compare(chosen: Sequence[int | None], requests: Sequence[Request], drafts: Sequence[Draft]) -> list[Verdict]:
    """Verdicts from the tokens chosen at all positions, where none of these depends on what was accepted before it."""
    verdicts = []
    for request, draft, start in zip(requests, drafts, _starts(drafts), strict=True):
        verdict = Verdict()
        while _take(verdict, chosen[start + verdict.row], None, request, draft):
            pass
        verdicts.append(verdict)
    return verdicts


def _take(
    verdict: Verdict, token_id: int | None, logprobs: TokenLogprobs | None, request: Request, draft: Draft
) -> bool:
    """Enter the token chosen at the next position; whether it was drafted there and the row goes on."""
    if token_id is None:
        if verdict.accepted:  # the next step ends the request: it starts at the same position
            verdict.token_id = verdict.accepted.pop()
            verdict.path.pop()
        return False
    verdict.logprobs.append(logprobs)
    node = draft.child(verdict.path[-1] if verdict.path else -1, token_id)
    if node is not None and token_id not in request.stop_ids:
        verdict.accepted.append(token_id)
        verdict.path.append(node)
        return True
    verdict.token_id = token_id
    return False


def _choose(
    sampler: TokenSampler[Array],
    logits: Array,
    logit_rows: list[tuple[int, int]],  # (request, row of logits)
    requests: Sequence[Request],
    drafts: Sequence[Draft],
    verdicts: Sequence[Verdict],
) -> list[tuple[int | None, TokenLogprobs | None]]:
    """The token at one position of each request: drawn against the draft's distribution, or sampled as usual."""
    chosen: dict[int, tuple[int | None, TokenLogprobs | None]] = {}
    ordinary = []
    for number, row in logit_rows:
        proposals, accepted = drafts[number].distributions, verdicts[number].accepted
        depth = len(accepted)
        if proposals is None or depth >= len(proposals):
            ordinary.append((number, row))
        else:
            chosen[number] = sampler.accept_or_redraw(
                logits[row], requests[number], accepted, drafts[number].token_ids[depth], proposals[depth]
            )
    if ordinary:
        rows = logits[[row for _, row in ordinary]]
        owners = [number for number, _ in ordinary]
        drafted = [verdicts[number].accepted for number in owners]
        choices = sampler.sample(rows, [requests[number] for number in owners], drafted)
        chosen |= dict(zip(owners, zip(*choices, strict=True), strict=True))
    return [chosen[number] for number, _ in logit_rows]


def _starts(drafts: Sequence[Draft]) -> list[int]:
    starts, row = [], 0
    for draft in drafts:
        starts.append(row)
        row += 1 + len(draft.token_ids)
    return starts
