"""API keys: who is known, what the file may say, how quotas refill."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.errors import UserError
from tokenmill.serve.key_file import load_keys
from tokenmill.serve.keys import Bucket, Client, KeyRing


def test_only_known_keys_open_a_closed_server() -> None:
    ring = load_keys(["alpha", "beta"], "")
    found = ring.find("beta")
    assert found is not None
    assert found.name == "key-2"
    assert ring.find("alph") is None
    assert ring.find("") is None
    assert ring.find(None) is None
    assert KeyRing().find(None) is not None


def test_the_file_gives_weights_quotas_and_lanes(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys:\n- {key: k1, name: alice, weight: 2, lane: batch, tokens_per_minute: 600}\n- {key: k2}\n")
    ring = load_keys(["k0"], str(file))
    alice = ring.find("k1")
    assert alice is not None
    assert (alice.name, alice.weight, alice.lane, len(ring)) == ("alice", 2, "batch", 3)
    assert alice.tokens is not None
    assert alice.requests is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys: []", "no list of keys"),
        ("keys: [{name: x}]", "has no `key`"),
        ("keys: [{key: a, wait: 1}]", "did you mean 'weight'"),
        ("keys: [{key: a, weight: 0}]", "weight of key"),
        ("keys: [{key: a, weight: much}]", "wrong type"),
        ("keys: [{key: a, lane: fast}]", "unknown lane"),
        ("keys: [{key: a}, {key: a}]", "two API keys are the same"),
        ("keys: [{key: a, max_parallel: -1}]", "negative"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "keys.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        load_keys([], str(tmp_path / "keys.yaml"))


def test_a_bucket_refills_steadily_and_may_be_overdrawn() -> None:
    bucket = Bucket(60.0)  # one per second
    bucket.take(60.0, 100.0)
    assert bucket.wait(1.0, 100.0) == pytest.approx(1.0)
    assert bucket.wait(1.0, 101.0) == 0.0
    bucket.take(31.0, 101.0)
    assert bucket.wait(1.0, 101.0) == pytest.approx(31.0)
    assert bucket.wait(1000.0, 101.0) == pytest.approx(90.0)  # more than a bucket: a full one is enough
    assert bucket.wait(60.0, 500.0) == 0.0
    bucket.take(0.0, 400.0)  # a clock that goes back adds nothing
    assert bucket.level == 60.0


def test_no_limits_mean_no_buckets() -> None:
    client = Client()
    assert client.requests is None
    assert client.tokens is None
