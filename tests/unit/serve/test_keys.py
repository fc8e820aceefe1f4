"""API keys: who is known, what the file may say, how quotas refill, what a reload changes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tokenmill.errors import UserError
from tokenmill.serve.tenants.key_file import KeyWatch, load_keys, read_keys
from tokenmill.serve.tenants.keys import Bucket, Client, KeyRing


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


def test_a_key_without_a_name_keeps_its_own_when_others_go(tmp_path: Path) -> None:
    """What is kept by name (stored responses, recent requests, cached prompts) never passes to another key."""
    file = tmp_path / "keys.yaml"
    file.write_text("keys: [{key: k1}, {key: k2}]")
    before = [client.name for _, client in read_keys((), str(file))]
    file.write_text("keys: [{key: k2}]")
    assert [client.name for _, client in read_keys((), str(file))] == before[1:]


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


def test_a_key_may_be_given_as_its_hash(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"s3cret").hexdigest()
    file = tmp_path / "keys.toml"
    file.write_text(f'[[keys]]\nkey_sha256 = "{digest}"\nname = "app"\nmax_sequences = 8\n')
    ring = load_keys([], str(file))
    found = ring.find("s3cret")
    assert found is not None
    assert (found.name, found.max_sequences) == ("app", 8)
    assert ring.find(digest) is None


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"key_sha256": "abc"}, "is no SHA-256"),
        ({"key": "a", "key_sha256": "0" * 64}, "both `key` and"),
        ({"key": "a", "admin": "yes"}, "wrong type: admin"),
        ({"key": "a", "max_sequences": 1.5}, "wrong type: max_sequences"),
        ({"key": "a", "max_sequences": True}, "wrong type: max_sequences"),
        ({"key": "a", "max_queue_share": 2}, "max_queue_share of key"),
        ({"key": "a", "max_pinned_share": -0.1}, "max_pinned_share of key"),
        ({"key": "a", "max_priority": -101}, "max_priority of key"),
        ({"key": "a", "cache": ""}, "cache of key"),
        ({"key": "a", "name": "x\n"}, "the name of"),
        ({"key": "a", "num_active": 3}, "unknown field of a key"),
    ],
)
def test_a_bad_entry_is_refused_without_showing_a_key(tmp_path: Path, entry: dict[str, object], message: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"key": "very-secret", "name": "first"}, entry]}))
    with pytest.raises(UserError, match=message) as caught:
        load_keys([], str(file))
    assert "very-secret" not in str(caught.value)


def test_names_are_unique(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"key": "a", "name": "x"}, {"key": "b", "name": "x"}]}))
    with pytest.raises(UserError, match="the same name"):
        load_keys([], str(file))


def test_defaults_depend_on_whether_there_are_other_keys() -> None:
    alone = load_keys(["a"], "").find("a")
    assert alone is not None
    assert (alone.most_urgent, alone.queue_share, alone.pinned_share) == (-100, 1.0, 1.0)
    assert alone.sees_metrics
    assert alone.grammar_seconds is None
    one = load_keys(["a", "b"], "").find("a")
    assert one is not None
    assert (one.most_urgent, one.queue_share, one.pinned_share) == (0, 0.5, 0.25)
    assert not one.sees_metrics
    assert one.grammar_seconds is not None
    assert Client(max_priority=-5).most_urgent == -5


def test_many_keys_are_found_by_their_digest() -> None:
    ring = load_keys([f"key {number}" for number in range(10_000)], "")
    found = ring.find("key 9999")
    assert found is not None
    assert found.name == "key-10000"
    assert ring.find("key 10000") is None


def _write(file: Path, *entries: dict[str, object]) -> None:
    file.write_text(json.dumps({"keys": list(entries)}))


def test_a_changed_file_replaces_the_keys_and_keeps_their_use(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    _write(file, {"key": "a", "name": "alice", "tokens_per_minute": 100}, {"key": "b", "name": "bob"})
    ring = load_keys([], str(file))
    watch = KeyWatch(ring, [], str(file))
    alice, bob = ring.find("a"), ring.find("b")
    assert alice is not None
    assert alice.tokens is not None
    alice.num_active = 3
    alice.tokens.take(60.0, 1.0)
    assert not watch.changed()
    _write(file, {"key": "a2", "name": "alice", "tokens_per_minute": 50, "max_parallel": 2}, {"key": "c"})
    assert watch.changed()
    entries = watch.read()
    assert entries is not None
    assert watch.apply(entries) == [bob]
    assert ring.find("a") is None
    assert ring.find("b") is None
    assert bob is not None
    assert bob.withdrawn
    assert not alice.withdrawn
    assert ring.find("a2") is alice  # whatever runs for it is still counted
    assert (alice.num_active, alice.max_parallel) == (3, 2)
    assert alice.tokens.level == pytest.approx(-10.0)  # 60 of now 50 are used
    assert not watch.changed()


def test_a_broken_file_leaves_the_keys_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys.json"
    _write(file, {"key": "a", "name": "alice"})
    ring = load_keys([], str(file))
    watch = KeyWatch(ring, [], str(file))
    for text in ('{"keys": [{"key": "top-secret", ', '{"keys": []}', "[]"):
        file.write_text(text)
        assert watch.changed()
        assert watch.read() is None
        assert not watch.changed()  # one line in the log for each mistake
    file.unlink()
    assert watch.changed()
    assert watch.read() is None
    assert ring.find("a") is not None
    assert "top-secret" not in caplog.text


def test_files_belong_to_a_name_or_to_the_key_itself(tmp_path: Path) -> None:
    def owners(text: str, *flags: str) -> dict[str, str]:
        (tmp_path / "keys.yaml").write_text(text)
        ring = load_keys(list(flags), str(tmp_path / "keys.yaml"))
        found = {key: ring.find(key) for key in ("k1", "k2", "k3", "f1", "f2")}
        for client in found.values():
            assert client is None or ring.owned_by(client.owner) is client
        return {key: client.owner for key, client in found.items() if client is not None}

    before = owners("keys:\n- {key: k1, name: alice}\n- {key: k2}\n", "f1", "f2")
    after = owners("keys:\n- {key: k2}\n- {key: k3, name: alice}\n", "f2", "f1")  # positions and alice's key changed
    assert len(set(before.values())) == 4
    assert after["k3"] == before["k1"]
    assert {key: after[key] for key in ("k2", "f1", "f2")} == {key: before[key] for key in ("k2", "f1", "f2")}
    for key in ("k1", "k2", "f1"):
        assert key not in before[key]
    assert hashlib.sha256(b"k2").hexdigest() not in before["k2"]
    assert KeyRing().owned_by(before["k1"]) is None
    assert KeyRing().owned_by("") is not None
    assert load_keys(["f1"], "").owned_by("") is None


def test_an_owner_follows_its_key_when_unnamed_keys_change_places(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys:\n- {key: k1}\n- {key: k2}\n")
    ring = load_keys([], str(file))
    first = ring.find("k1")
    assert first is not None
    owner = first.owner
    watch = KeyWatch(ring, (), str(file))
    file.write_text("keys:\n- {key: k2}\n- {key: k1}\n")
    entries = watch.read()
    assert entries is not None
    watch.apply(entries)
    moved = ring.find("k1")
    assert moved is not None
    assert moved.owner == owner
    assert ring.owned_by(owner) is moved


def test_a_key_may_be_for_some_models_only(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys: [{key: a, name: a, models: [small, large]}, {key: b, name: b, admin: true}, {key: c}]")
    ring = load_keys((), str(file))
    found = {name: ring.find(name) for name in "abc"}
    assert [client.models for client in found.values() if client is not None] == [("small", "large"), (), ()]
    assert [client.operates for client in found.values() if client is not None] == [False, True, False]
    for wrong in ("models: small", "models: [1]", "models: {small: 1}"):
        file.write_text(f"keys: [{{key: a, {wrong}}}]")
        with pytest.raises(UserError, match="models"):
            load_keys((), str(file))
