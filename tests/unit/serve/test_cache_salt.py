"""Cache salts: who shares cached prompts with whom, and that the secret behind them outlives a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.errors import UserError
from tokenmill.serve.tenants.cache_salt import SECRET_VARIABLE, CacheSalts, load_cache_secret
from tokenmill.serve.tenants.key_file import read_cache_secret
from tokenmill.serve.tenants.keys import Client


def test_keys_are_apart_unless_they_share_a_group() -> None:
    salts = CacheSalts(b"secret")
    alice, bob = Client("alice"), Client("bob")
    assert salts.salt(alice) == salts.salt(Client("alice"))
    assert salts.salt(alice) != salts.salt(bob)
    assert salts.salt(Client("c", cache="shared")) == salts.salt(Client("d", cache="shared"))
    assert salts.salt(Client("c", cache="team")) != salts.salt(Client("d", cache="shared"))
    assert salts.salt(Client("x", cache="alice")) != salts.salt(alice)  # a group is no key
    assert salts.salt(alice) != CacheSalts(b"other").salt(alice)


def test_the_salt_of_a_request_adds_to_that_of_its_key() -> None:
    salts = CacheSalts(b"secret")
    alice, bob = Client("alice"), Client("bob")
    assert salts.salt(alice, "s") != salts.salt(alice)
    assert salts.salt(alice, "s") != salts.salt(bob, "s")
    assert salts.salt(alice, "s") == salts.salt(alice, "s")


def test_an_open_server_has_no_salt_unless_asked() -> None:
    salts = CacheSalts(b"secret")
    assert salts.salt(Client()) == b""
    assert salts.salt(Client(), "mine") not in (b"", salts.salt(Client(), "yours"))


def test_the_secret_is_kept_with_the_disk_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    folder = tmp_path / "kv"
    secret = load_cache_secret("", str(folder), "")
    assert load_cache_secret("", str(folder), "") == secret
    assert (folder / "cache_secret").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in folder.iterdir()] == ["cache_secret"]
    assert load_cache_secret("", "", "") != load_cache_secret("", "", "")  # nothing to keep it for
    assert load_cache_secret("stated stated stated", str(folder), "") == load_cache_secret(
        "stated stated stated", "", ""
    )
    monkeypatch.setenv(SECRET_VARIABLE, "stated stated stated")
    assert load_cache_secret("", str(folder), "") == load_cache_secret("stated stated stated", "", "")


def test_tiers_without_a_lasting_secret_are_told(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    load_cache_secret("", str(tmp_path / "file"), "")
    assert "of no use after a restart" in caplog.text


def test_the_keys_file_may_state_it(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("cache_secret: 0123456789abcdef\nkeys: [{key: a}]\n")
    assert read_cache_secret(str(file)) == "0123456789abcdef"
    file.write_text("cache_secret: short\nkeys: [{key: a}]\n")
    with pytest.raises(UserError, match="cache_secret"):
        read_cache_secret(str(file))
    assert read_cache_secret("") == ""
