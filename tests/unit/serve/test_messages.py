"""The wire between the processes: what goes in comes out, and what is not a message is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.engine import messages
from tokenmill.engine.messages import Cancel, Events, Submit
from tokenmill.engine.stats import EngineStats, TierStats
from tokenmill.errors import UserError
from tokenmill.types import Request, SamplingParams, TokenEvent, TokenLogprobs


def test_a_request_survives_the_trip() -> None:
    params = SamplingParams(n=2, max_tokens=9, logit_bias={7: -1.5}, stop=("a", "é"), stop_token_ids=(3,), logprobs=2)
    request = Request("id", [1, 2], params, frozenset({3, 9}), 2**64 - 1, -4, 11, tenant="alice", weight=2.5)
    message = messages.decode_to_engine(messages.encode(Submit.of(request)))
    assert isinstance(message, Submit)
    back = message.request()
    fields = ("request_id", "prompt_ids", "params", "stop_ids", "seed", "priority", "arrival", "tenant", "weight")
    assert [getattr(back, name) for name in fields] == [getattr(request, name) for name in fields]
    assert back.token_ids == [1, 2]


def test_events_survive_the_trip() -> None:
    logprobs = TokenLogprobs(5, -0.5, 1, ((5, -0.5), (6, float("-inf"))))
    event = TokenEvent("id", 1, [5], [logprobs], [logprobs], 3, "stop", "END")
    stats = EngineStats(num_steps=4, step_seconds=0.25, pages_consistent=False, tiers=[TierStats("disk", hits=2)])
    sent = Events([event], stats)
    assert messages.decode_from_engine(messages.encode(sent)) == sent


@pytest.mark.parametrize(
    "value", [{"type": "submit"}, {"type": "drop_tables"}, [1], "x", {"type": "cancel", "request_id": 4}]
)
def test_what_is_no_message_is_refused(value: object) -> None:
    with pytest.raises(msgspec.DecodeError):
        messages.decode_to_engine(msgspec.msgpack.encode(value))


def test_parameters_out_of_range_do_not_get_through() -> None:
    request = Request("id", [1], SamplingParams())
    raw = msgspec.msgpack.decode(messages.encode(Submit.of(request)))
    raw["params"]["temperature"] = -1.0
    with pytest.raises((UserError, msgspec.DecodeError)):
        messages.decode_to_engine(msgspec.msgpack.encode(raw))


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_never_do_more_than_fail_to_decode(data: bytes) -> None:
    try:
        message = messages.decode_to_engine(data)
    except (msgspec.DecodeError, UserError):
        return
    assert isinstance(message, (Submit, Cancel, messages.Ping, messages.Shutdown))
