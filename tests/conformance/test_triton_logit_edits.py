"""Features of all rows in one pass on the device, against the same features row by row."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("no GPU: test_triton.py runs this file under the interpreter", allow_module_level=True)

from tokenmill.grammar.vocabulary import Bits
from tokenmill.runtime.executors.cuda import mask_table
from tokenmill.runtime.executors.cuda.logit_edits import LogitEdits, TokenCounts
from tokenmill.runtime.executors.cuda.sampling import CudaSampler
from tokenmill.runtime.sampling.features import LOGIT_FEATURES
from tokenmill.runtime.sampling.features.base import Edits, LogitFeature, token_bits
from tokenmill.runtime.sampling.sampler import Sampler
from tokenmill.types import ReasoningBudget, Request, SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 333  # no multiple of 32
BUDGET = ReasoningBudget(max_tokens=2, end_id=9)
FEATURES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "frequency": {"frequency_penalty": 0.8},
    "presence": {"presence_penalty": -1.5},
    "penalties": {"repetition_penalty": 0.6, "frequency_penalty": 1.0, "presence_penalty": 2.0},
    "bias": {"logit_bias": {3: 5.0, 332: -100.0}},
    "min_tokens": {"min_tokens": 9},
    "allowed": {"allowed_token_ids": [7, 8, 332]},
    "bad_words": {"bad_word_ids": ((5,), (4, 6), (5, 4, 11))},
    "reasoning": {"reasoning": BUDGET, "min_tokens": 9, "allowed_token_ids": [1, 2]},
    "typical": {"typical_p": 0.4},
    "several": {"repetition_penalty": 1.2, "logit_bias": {7: 1.0, 8: 2.0}, "allowed_token_ids": [7, 8, 40]},
}


def make(number: int, temperature: float = 1.0, **params: Any) -> Request:
    request = Request(
        str(number),
        [1, 2, 5, 5],
        SamplingParams(temperature=temperature, **params),
        stop_ids=frozenset({9, 10}),
        seed=3,
    )
    request.token_ids += [4, 5, 4]
    return request


def edited(logits: torch.Tensor, requests: Sequence[Request], drafted: Sequence[Sequence[int]]) -> torch.Tensor:
    """Row by row, by the features' own `edit`."""
    logits = logits.clone()
    for row, request in enumerate(requests):
        for name in LOGIT_FEATURES:
            feature: LogitFeature = LOGIT_FEATURES.get(name)()
            if feature.active(request.params):
                feature.edit(logits[row], request, drafted[row])
    return logits


def planned(
    edits: LogitEdits, logits: torch.Tensor, requests: Sequence[Request], drafted: Sequence[Sequence[int]]
) -> torch.Tensor:
    plan, logits = Edits(VOCAB), logits.clone()
    for row, request in enumerate(requests):
        for name in LOGIT_FEATURES:
            feature: LogitFeature = LOGIT_FEATURES.get(name)()
            if feature.active(request.params):
                assert feature.plan(plan, row, request, drafted[row])
    edits.apply(logits, plan)
    return logits


def random_logits(rows: int) -> torch.Tensor:
    return (torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1)) * 3).to(DEVICE)


def test_all_features_at_once_are_as_row_by_row() -> None:
    requests = [make(0), *(make(n + 1, **params) for n, params in enumerate(FEATURES.values()))]
    drafted: list[Sequence[int]] = [()] * len(requests)
    edits = LogitEdits(DEVICE)
    for token in (6, 5, 300):  # counts go on from step to step
        logits = random_logits(len(requests))
        wanted, got = edited(logits, requests, drafted), planned(edits, logits, requests, drafted)
        reasoned = 1 + list(FEATURES).index("reasoning")
        assert got[reasoned].argmax() == wanted[reasoned].argmax() == BUDGET.end_id
        wanted[reasoned], got[reasoned] = 0.0, 0.0  # the one possible token: its logit is of no consequence
        assert torch.equal(got.isinf(), wanted.isinf())
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        for request in requests:
            request.token_ids.append(token)


def test_drafted_tokens_count_for_their_row_only() -> None:
    request = make(0, repetition_penalty=1.5, frequency_penalty=0.5)
    rows, drafted = [request] * 3, [(), (4,), (4, 11)]
    edits = LogitEdits(DEVICE)
    for _ in range(2):
        logits = random_logits(3)
        torch.testing.assert_close(planned(edits, logits, rows, drafted), edited(logits, rows, drafted))


def test_places_of_requests_that_ended_are_used_again_and_empty() -> None:
    counts = TokenCounts(VOCAB, DEVICE)
    first = [make(number, presence_penalty=1.0) for number in range(20)]  # more than there are places at first
    places = counts.places([(request, ()) for request in first])
    assert len(set(places)) == 20
    assert counts.outputs[places].sum(1).tolist() == [3] * 20
    del first
    gc.collect()
    fresh = Request("fresh", [8], SamplingParams(presence_penalty=1.0))
    (place,) = counts.places([(fresh, ())])
    assert counts.outputs[place].sum() == 0
    assert counts.prompts[place].nonzero().flatten().tolist() == [8]


def test_greedy_tokens_and_log_probabilities_are_the_torch_samplers() -> None:
    kinds = [{**params, "logprobs": n % 4} for n, params in enumerate(FEATURES.values()) if "typical_p" not in params]
    requests = [make(n, temperature=0.0, **params) for n, params in enumerate(kinds)]
    logits = random_logits(len(requests))
    tokens, records = CudaSampler(DEVICE).sample(logits.clone(), requests)
    wanted, wanted_records = Sampler(DEVICE, "ref").sample(logits.clone(), requests)
    assert tokens == wanted
    for record, other in zip(records, wanted_records, strict=True):
        assert record is not None
        assert other is not None
        assert (record.token_id, record.rank) == (other.token_id, other.rank)
        assert [token for token, _ in record.top] == [token for token, _ in other.top]
        assert record.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_a_seeded_row_draws_the_same_alone_and_among_others() -> None:
    requests = [make(n, top_p=0.9, **params) for n, params in enumerate(FEATURES.values())]
    requests += [make(99, temperature=0.7)]
    logits = random_logits(len(requests))
    sampler = CudaSampler(DEVICE)
    together = sampler.sample(logits.clone(), requests)[0]
    alone = [sampler.sample(logits[row : row + 1].clone(), [each])[0][0] for row, each in enumerate(requests)]
    assert together == alone


def test_rows_without_a_possible_token() -> None:
    """None where features ban everything; a grammar's own tokens come before other bans."""
    nothing = make(0, allowed_token_ids=[5], bad_word_ids=((5,),))
    sampler = CudaSampler(DEVICE)
    tokens, _ = sampler.sample(random_logits(2), [nothing, make(1, temperature=0.0)])
    assert tokens[0] is None
    assert tokens[1] is not None
    edits = Edits(VOCAB, allowed={0: token_bits([40], VOCAB)}, preferred={0: token_bits([40], VOCAB)})
    assert sampler._preferred(edits, 0, nothing, 0) == 40


def test_a_feature_without_a_plan_is_applied_to_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = CudaSampler(DEVICE)

    class OnlyToken(LogitFeature):
        def active(self, params: SamplingParams) -> bool:
            return params.min_tokens > 0

        def edit(self, logits: torch.Tensor, request: Request, drafted: Sequence[int]) -> None:  # noqa: ARG002
            logits[:20] = float("-inf")
            logits[21:] = float("-inf")

    monkeypatch.setattr(sampler, "_logit_features", [*sampler._logit_features, OnlyToken()])
    logits = random_logits(2)
    tokens, _ = sampler.sample(logits.clone(), [make(0, temperature=0.0), make(1, temperature=0.0, min_tokens=9)])
    assert tokens == [int(logits[0].argmax()), 20]


def test_bits_of_tokens() -> None:
    bits = token_bits([0, 31, 32, 332], VOCAB)
    assert bits.dtype == np.int32
    assert np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist() == [0, 31, 32, 332]


def shared_bits(token_ids: Sequence[int]) -> Bits:
    bits = token_bits(token_ids, VOCAB)
    bits.flags.writeable = False
    return bits


def possible(edits: LogitEdits, allowed: dict[int, Bits], rows: int) -> list[list[int]]:
    logits = random_logits(rows)
    edits.apply(logits, Edits(VOCAB, allowed=allowed))
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]


def test_masks_that_come_again_are_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    edits = LogitEdits(DEVICE)
    send = edits._send
    monkeypatch.setattr(edits, "_send", lambda values: (sent.append(values.size), send(values))[1])
    one, other = shared_bits([1, 40]), shared_bits([332])
    for allowed in ({0: one, 2: other, 3: one}, {1: one, 0: other}, {0: one, 1: token_bits([7], VOCAB), 2: other}):
        sent.clear()
        found = possible(edits, allowed, 4)
        wanted = {id(one): [1, 40], id(other): [332]}
        for row in range(4):
            bits = allowed.get(row)
            assert found[row] == (list(range(VOCAB)) if bits is None else wanted.get(id(bits), [7]))
    assert max(sent) == one.size  # of the one that may still change


def test_masks_make_room_and_what_finds_none_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_table, "_MAX_PLACES", 3)
    edits = LogitEdits(DEVICE)
    masks = [shared_bits([number, 100 + number]) for number in range(8)]
    for chosen in ([0, 1, 2], [3, 1], [0, 1, 2, 3, 4, 5], [7, 7, 6], [0, 7, 5], [5, 6, 7, 0]):
        found = possible(edits, {row: masks[number] for row, number in enumerate(chosen)}, len(chosen))
        assert found == [[number, 100 + number] for number in chosen]
    short = shared_bits([3])[:1]
    short.flags.writeable = False
    assert possible(edits, {0: masks[1], 1: short}, 2) == [[1, 101], [3]]
