"""Reads API keys from flags and from a file, and notices when the file has changed.

YAML, JSON or TOML with a list `keys`. An entry gives its key as it is, or as `key_sha256`, so that the file holds no
secret. A file with a mistake is refused as a whole. Knows nothing of requests; the server reloads through KeyWatch.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from tokenmill.errors import UserError, unknown_name
from tokenmill.log import get_logger
from tokenmill.serve.tenants.keys import Client, KeyRing, digest_of

_log = get_logger(__name__)
_MAX_NAME = 64
_SECRETS = ("key", "key_sha256")
_SETTINGS = {each.name: hint for each in fields(Client) if each.init and (hint := get_type_hints(Client)[each.name])}

Entries = list[tuple[bytes, Client]]


def load_keys(plain: Sequence[str], path: str) -> KeyRing:
    return KeyRing(read_keys(plain, path))


def read_keys(plain: Sequence[str], path: str) -> Entries:
    """Keys from flags and from the file at `path`, if there is one."""
    entries = [(digest_of(key), Client(f"key-{number}")) for number, key in enumerate(plain, 1)]
    if path:
        entries += _read_file(path)
    for digest, client in entries:
        client.owner = client.owner or f"key {hashlib.sha256(digest).hexdigest()}"  # its name is only a position
    if len({digest for digest, _ in entries}) < len(entries):
        raise UserError("two API keys are the same", "keep one of them")
    if len({client.name for _, client in entries}) < len(entries):
        raise UserError("two API keys have the same name", "give each its own")
    return entries


def read_cache_secret(path: str) -> str:
    """`cache_secret` of a keys file; empty if it has none."""
    secret = _parse(path).get("cache_secret", "") if path else ""
    if not isinstance(secret, str) or 0 < len(secret) < 16:
        raise UserError(f"cache_secret in {path} is too short or not a string", "give at least 16 random characters")
    return secret


class KeyWatch:
    """Replaces the keys of a ring when their file changes."""

    def __init__(self, ring: KeyRing, plain: Sequence[str], path: str) -> None:
        self._ring = ring
        self._plain = tuple(plain)
        self._path = path
        self._seen = self._stamp()

    def changed(self) -> bool:
        """Whether the file is another one than when it was last read."""
        return bool(self._path) and self._stamp() != self._seen

    def read(self) -> Entries | None:
        """What the file says now; None if it has a mistake, which is logged: the keys then stay as they are."""
        self._seen = self._stamp()  # before it is read, so that a later change is never missed
        try:
            return read_keys(self._plain, self._path)
        except UserError as error:
            _log.error("API keys were not reloaded, the old ones stay: %s", error)
            return None

    def apply(self, entries: Entries) -> list[Client]:
        """Use these keys from now on; returns the clients that are gone."""
        gone = self._ring.replace(entries)
        _log.info("API keys reloaded: %d keys, %d removed", len(entries), len(gone))
        return gone

    def _stamp(self) -> tuple[int, ...]:
        try:
            found = os.stat(self._path)
        except OSError:
            return ()
        return (found.st_mtime_ns, found.st_size, found.st_ino)


def _read_file(path: str) -> Entries:
    entries = _parse(path).get("keys")
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path} has no list of keys", "write `keys:` and under it `- key: ...` with a `name`")
    return [_entry(entry, f"key {number} in {path}") for number, entry in enumerate(entries, 1)]


def _entry(entry: Any, what: str) -> tuple[bytes, Client]:
    """Never repeats a value: it may be a key."""
    if not isinstance(entry, dict) or not any(isinstance(entry.get(each), str) and entry[each] for each in _SECRETS):
        raise UserError(f"{what} has no `key`", "give it a string, or `key_sha256`")
    if all(each in entry for each in _SECRETS):
        raise UserError(f"{what} has both `key` and `key_sha256`", "keep one of them")
    values = {name: value for name, value in entry.items() if name not in _SECRETS}
    for name, value in list(values.items()):
        if name not in _SETTINGS:
            raise unknown_name("field of a key", str(name), {*_SETTINGS, *_SECRETS})
        if isinstance(value, list) and name in ("models", "loras"):
            values[name] = value = tuple(value)
        if not _has_type(value, _SETTINGS[name]):
            raise UserError(f"{what} has a field of the wrong type: {name}", "correct it")
    digest = _digest(entry, what)
    # What belongs to a key is found by its name: one by position would pass to another when the file is reordered.
    name = values.setdefault("name", f"file-key-{hashlib.sha256(digest).hexdigest()[:12]}")
    if not (0 < len(name) <= _MAX_NAME and name.isascii() and name.isprintable()):
        raise UserError(f"the name of {what} is not usable", f"give 1 to {_MAX_NAME} printable ASCII characters")
    client = Client(**values)
    if "name" in entry:
        client.owner = f"name {name}"
    return digest, client


def _digest(entry: dict[str, Any], what: str) -> bytes:
    if "key" in entry:
        return digest_of(entry["key"])
    try:
        digest = bytes.fromhex(entry["key_sha256"])
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise UserError(f"key_sha256 of {what} is no SHA-256", "give the 64 hex digits of `echo -n KEY | sha256sum`")
    return digest


def _has_type(value: Any, hint: Any) -> bool:
    if hint is bool or isinstance(value, bool):
        return hint is bool and isinstance(value, bool)
    if hint in (float, float | None):
        return isinstance(value, (int, float)) and value == value  # no NaN
    if hint in (tuple[str, ...], tuple[str, ...] | None):
        return isinstance(value, tuple) and all(isinstance(each, str) for each in value)
    return isinstance(value, hint)


def _parse(path: str) -> dict[str, Any]:
    """By its suffix TOML or JSON, else YAML."""
    import yaml  # type: ignore[import-untyped]

    try:
        text = Path(path).read_text(encoding="utf-8")
        if path.endswith(".toml"):
            values = tomllib.loads(text)
        elif path.endswith(".json"):
            values = json.loads(text)
        else:
            values = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # the C one is ten times as fast
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", "check the path") from None
    except (ValueError, yaml.YAMLError, RecursionError):  # the parser's message could show a key
        raise UserError(f"{path} cannot be parsed", "correct it: YAML, or JSON or TOML by its suffix") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a mapping", "write `keys:` and under it `- key: ...` with a `name`")
    return values
