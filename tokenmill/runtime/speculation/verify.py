"""Exact verification: which drafted tokens the target would have chosen itself, and the token after them.

The only place that accepts drafts, for every drafter and every sampling setting. Two ways, by how the draft was made:

* Guessed (no distribution): at each position the ordinary sampler chooses the target's token, with penalties, grammar,
  filters and the request's own random number as ever; the draft holds while it agrees. In distribution this is
  rejection sampling against a certain draft (accept with probability p(token), else draw from the rest), and it is
  more: the tokens are the very ones that would have come without drafts, whatever was drafted and however much.
* Drawn from a distribution q: accept with probability min(1, p/q), else draw from what p has over q, normalized. The
  tokens differ from those without drafts, their distribution does not.

Knows nothing of drafters and pages. Called by the runner with the logits of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokenmill.runtime.sampling.random import uniform
from tokenmill.runtime.sampling.sampler import Sampler, pick, token_logprobs
from tokenmill.runtime.speculation.base import Draft
from tokenmill.runtime.speculation.lending import lent
from tokenmill.types import Request, TokenLogprobs

_ACCEPTING, _REDRAWING = 1, 2  # streams of random numbers beside the sampler's own (0)


@dataclass(slots=True)
class Verdict:
    """What a row brings: drafts that held, then one token. None: no token is possible (and no draft held)."""

    accepted: list[int] = field(default_factory=list)
    token_id: int | None = None
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # of the accepted ones and the token
    path: list[int] = field(default_factory=list)  # places in the draft of the accepted ones

    @property
    def row(self) -> int:
        """Of the request's rows of logits, the one that decides the next token."""
        return 1 + self.path[-1] if self.path else 0


@torch.inference_mode()
def verify(sampler: Sampler, logits: Tensor, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[Verdict]:
    """`logits` [sum of 1 + len(draft), vocab]: for each request the row of its last known token, then its drafts'.

    Consumed. A stop token is never among the accepted ones: it is the token, and ends the row.
    """
    plain = sampler.is_plain(requests) and all(request.params.greedy for request in requests)
    if plain:  # nothing but the largest logit matters: all rows at once
        owners = [each for each, draft in zip(requests, drafts, strict=True) for _ in range(1 + len(draft.token_ids))]
        return compare(sampler.sample(logits, owners)[0], requests, drafts)
    verdicts = [Verdict() for _ in requests]
    starts = _starts(drafts)
    going = list(range(len(requests)))
    with lent(requests) as lend:
        while going:
            places = [(number, starts[number] + verdicts[number].row) for number in going]
            depths = [len(verdicts[number].accepted) for number in going]
            choices = _choose(sampler, logits, places, requests, drafts, depths)
            still = []
            for number, (token_id, logprobs) in zip(going, choices, strict=True):
                if _take(verdicts[number], token_id, logprobs, requests[number], drafts[number]):
                    lend(number, verdicts[number].accepted[-1])
                    still.append(number)
            going = still
    return verdicts


def residual(target: Tensor, proposal: Tensor) -> Tensor:
    """What is drawn from when a token drawn from `proposal` is refused; [..., vocab], not normalized."""
    rest = (target - proposal).clamp_min(0.0)
    # Equal up to rounding: then nothing is refused but by rounding, and the target itself is right.
    return torch.where(rest.sum(-1, keepdim=True) > 0.0, rest, target)


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
        if verdict.accepted:  # the next step will find the same, with nothing before it
            verdict.token_id = verdict.accepted.pop()
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
    sampler: Sampler,
    logits: Tensor,
    places: list[tuple[int, int]],  # (request, row of logits)
    requests: Sequence[Request],
    drafts: Sequence[Draft],
    depths: list[int],
) -> list[tuple[int | None, TokenLogprobs | None]]:
    """The token at one position of each request: drawn against the draft's distribution, or as ever."""
    found: dict[int, tuple[int | None, TokenLogprobs | None]] = {}
    ordinary = []
    for (number, row), depth in zip(places, depths, strict=True):
        proposals = drafts[number].distributions
        if proposals is None or depth >= len(proposals):
            ordinary.append((number, row))
        else:
            token_id = drafts[number].token_ids[depth]
            found[number] = _reject_or_accept(sampler, logits[row], requests[number], token_id, proposals[depth])
    if ordinary:
        rows = logits[[row for _, row in ordinary]]
        token_ids, logprobs = sampler.sample(rows, [requests[number] for number, _ in ordinary])
        for (number, _), choice in zip(ordinary, zip(token_ids, logprobs, strict=True), strict=True):
            found[number] = choice
    return [found[number] for number, _ in places]


def _reject_or_accept(
    sampler: Sampler, logits: Tensor, request: Request, drafted: int, proposal: Tensor
) -> tuple[int | None, TokenLogprobs | None]:
    raw = logits.log_softmax(-1) if request.params.logprobs is not None else None
    target = sampler.distribution(logits, request)
    if target is None:
        return None, None
    position = (request.seed, request.index, request.num_tokens)
    token_id = drafted
    if uniform(*position, stream=_ACCEPTING) * float(proposal[drafted]) >= float(target[drafted]):
        token_id = pick(residual(target, proposal.to(target.device)), uniform(*position, stream=_REDRAWING))
    record = None if raw is None else token_logprobs(raw, token_id, request.params.logprobs or 0)
    return token_id, record


def _starts(drafts: Sequence[Draft]) -> list[int]:
    starts, row = [], 0
    for draft in drafts:
        starts.append(row)
        row += 1 + len(draft.token_ids)
    return starts
