"""An entry as it lies on disk and in Redis: a header that says what it is, then the page.

    magic 8 | model identity 16 | key length 1, key, zeros to 32 | page length 8 | checksum 16 | page

The checksum is the beginning of the SHA-256 of all that, itself left out. Used by the tiers that outlive the process.
"""

from __future__ import annotations

import hashlib
import struct

_MAGIC = b"TMKVPG\x00\x01"  # the last byte is the version
_FIELDS = struct.Struct("<8s16s32sQ")
_CHECKSUM_BYTES = 16
HEADER_BYTES = _FIELDS.size + _CHECKSUM_BYTES


class CorruptEntryError(Exception):
    """The bytes are not what was written."""


class ForeignEntryError(Exception):
    """A sound entry, but of another model or for another key."""


def encode_header(identity: bytes, key: bytes, page: memoryview) -> bytes:
    fields = _fields(identity, key, page.nbytes)
    return fields + _checksum(fields, page)


def decode(data: memoryview | bytearray, identity: bytes, key: bytes) -> memoryview:
    """The page of an entry, a view of `data`. Raises CorruptEntryError or ForeignEntryError."""
    if len(data) < HEADER_BYTES:
        raise CorruptEntryError
    fields = bytes(data[: _FIELDS.size])
    page = memoryview(data)[HEADER_BYTES:]
    length = _FIELDS.unpack(fields)[3]
    if length != page.nbytes or bytes(data[_FIELDS.size : HEADER_BYTES]) != _checksum(fields, page):
        raise CorruptEntryError
    if fields != _fields(identity, key, page.nbytes):
        raise ForeignEntryError
    return page


def _fields(identity: bytes, key: bytes, length: int) -> bytes:
    assert len(identity) == 16
    assert len(key) < 32
    return _FIELDS.pack(_MAGIC, identity, bytes([len(key)]) + key, length)


def _checksum(fields: bytes, page: memoryview) -> bytes:
    digest = hashlib.sha256(fields)
    digest.update(page)
    return digest.digest()[:_CHECKSUM_BYTES]
