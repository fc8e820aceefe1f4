"""The key-value part of a GGUF file: a bounds-checked cursor, and a mapping whose arrays are decoded on first access.

Trusts nothing: each count and length is compared with the bytes that are left before anything is read or allocated.
Arrays (a vocabulary has a quarter of a million strings) are only walked over when the file is opened. Knows nothing
about models. Used by gguf.py; the mapping is read by gguf_description.py and by the tokenizer builder.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from mmap import mmap
from typing import Any

import numpy as np

from tokenmill.checkpoint.mapped_file import DAMAGED
from tokenmill.errors import CheckpointError
from tokenmill.kernels import native

_U64 = struct.Struct("<Q")
_STRING = 8
_ARRAY = 9
_BOOL = 7
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_MAX_KEY_BYTES = 65535


class Cursor:
    """Reads forward through mapped bytes; every read is checked against the end."""

    def __init__(self, buffer: mmap, label: str) -> None:
        self.buffer = buffer
        self.label = label
        self.position = 0
        self.end = len(buffer)

    @property
    def left(self) -> int:
        return self.end - self.position

    def scalar(self, layout: struct.Struct) -> Any:
        self.require(layout.size, "a value")
        (value,) = layout.unpack_from(self.buffer, self.position)
        self.position += layout.size
        return value

    def u32(self) -> int:
        return self.scalar(_SCALARS[4])

    def u64(self) -> int:
        return self.scalar(_U64)

    def raw_string(self, limit: int, what: str) -> bytes:
        length = self.u64()
        if length > limit:
            raise self.damaged(f"{what} of {length} bytes, at most {limit} are allowed")
        self.require(length, what)
        start = self.position
        self.position += length
        return self.buffer[start : self.position]

    def name(self, what: str) -> str:
        """A key or a tensor name: short, not empty and valid UTF-8."""
        raw = self.raw_string(_MAX_KEY_BYTES, what)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise self.damaged(f"{what} that is not text") from None
        if not text or not text.isprintable():
            raise self.damaged(f"{what} that is not text")
        return text

    def require(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.left:
            raise self.damaged(f"{what} at byte {self.position} runs past the end")

    def damaged(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.label}: {problem}", DAMAGED)


@dataclass(frozen=True, slots=True)
class StringArray:
    """Strings in a buffer. `starts`: position of each one's length (8 bytes), which its text follows."""

    buffer: np.ndarray
    starts: np.ndarray


@dataclass(slots=True)
class StoredArray:
    """An array in the file, not decoded yet. `starts` (strings only): position of each string's length."""

    element_type: int
    count: int
    position: int
    starts: np.ndarray | None = None


class Metadata(Mapping[str, Any]):
    """Key -> int, float, bool, str, or list of those. Lists are decoded when first asked for and kept."""

    def __init__(self, buffer: mmap, values: dict[str, Any]) -> None:
        self._buffer = buffer
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, StoredArray):
            value = self._values[key] = self._decode(value)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def string_count(self, key: str) -> int:
        """Length of an array of strings, without decoding it; 0 where there is none."""
        value = self._values.get(key)
        if isinstance(value, StoredArray):
            return value.count if value.starts is not None else 0
        return len(value) if isinstance(value, list) and value and isinstance(value[0], str) else 0

    def numbers(self, key: str) -> np.ndarray | None:
        """A numeric array as numpy, or None where there is none."""
        value = self._values.get(key)
        if isinstance(value, StoredArray):
            return None if value.starts is not None else self._view(value)
        return np.array(value) if isinstance(value, list) and value and not isinstance(value[0], str) else None

    def stored_strings(self, key: str) -> StringArray | None:
        """An array of strings as it lies in the file; None where there is none, or it was decoded already."""
        value = self._values.get(key)
        if not isinstance(value, StoredArray) or value.starts is None:
            return None
        return StringArray(np.frombuffer(self._buffer, np.uint8), value.starts)

    def strings_at(self, key: str, indices: list[int]) -> list[str]:
        """Some strings of an array, without decoding the rest."""
        value = self._values.get(key)
        if isinstance(value, list):
            return [str(value[index]) for index in indices]
        assert isinstance(value, StoredArray), key
        assert value.starts is not None, key
        return [self._string(int(value.starts[index])) for index in indices]

    def _decode(self, stored: StoredArray) -> list[Any]:
        if stored.starts is not None:
            return [self._string(start) for start in stored.starts.tolist()]
        values = self._view(stored)
        return (values != 0).tolist() if stored.element_type == _BOOL else values.tolist()

    def _string(self, start: int) -> str:
        (length,) = _U64.unpack_from(self._buffer, start)
        return self._buffer[start + 8 : start + 8 + length].decode(errors="replace")

    def _view(self, stored: StoredArray) -> np.ndarray:
        layout = _SCALARS[stored.element_type]
        return np.frombuffer(self._buffer, np.dtype(layout.format), stored.count, stored.position)


def read_metadata(cursor: Cursor, num_pairs: int) -> Metadata:
    smallest_pair = 8 + 1 + 4 + 1
    if num_pairs > cursor.left // smallest_pair:
        raise cursor.damaged(f"the header promises {num_pairs} metadata entries, more than the file can hold")
    values: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.name("a metadata key")
        if key in values:
            raise cursor.damaged(f"metadata key '{key}' occurs twice")
        values[key] = _read_value(cursor, key)
    return Metadata(cursor.buffer, values)


def read_raw_pairs(cursor: Cursor, num_pairs: int) -> dict[str, bytes]:
    """Key -> its type and value as they lie in the file: for writing them into another one unchanged."""
    pairs: dict[str, bytes] = {}
    for _ in range(num_pairs):
        key = cursor.name("a metadata key")
        start = cursor.position
        _read_value(cursor, key)
        pairs[key] = cursor.buffer[start : cursor.position]
    return pairs


def _read_value(cursor: Cursor, key: str) -> Any:
    value_type = cursor.u32()
    if value_type == _STRING:
        return cursor.raw_string(cursor.left, f"metadata '{key}'").decode(errors="replace")
    if value_type == _ARRAY:
        return _skip_array(cursor, key)
    if value_type not in _SCALARS:
        raise cursor.damaged(f"metadata '{key}' has unknown type {value_type}")
    value = cursor.scalar(_SCALARS[value_type])
    return bool(value) if value_type == _BOOL else value


def _skip_array(cursor: Cursor, key: str) -> StoredArray:
    element_type = cursor.u32()
    count = cursor.u64()
    if element_type == _STRING:
        return StoredArray(element_type, count, cursor.position, _skip_strings(cursor, key, count))
    if element_type not in _SCALARS:
        raise cursor.damaged(f"metadata '{key}' is an array of unknown type {element_type}")
    position = cursor.position
    cursor.require(count * _SCALARS[element_type].size, f"array '{key}'")
    cursor.position += count * _SCALARS[element_type].size
    return StoredArray(element_type, count, position)


def _skip_strings(cursor: Cursor, key: str, count: int) -> np.ndarray:
    """Walk over `count` strings, in C++ if it is there: this is most of the time that opening a file takes."""
    cursor.require(8 * count, f"array '{key}'")
    starts = np.empty(count, np.uint64)
    if native.missing() is None:
        whole = np.frombuffer(cursor.buffer, np.uint8)
        position: int = native.module().walk_strings(whole, cursor.end, cursor.position, starts) if count else 0
    else:
        position = _walk_strings(cursor, starts)
    if count and not position:
        raise cursor.damaged(f"array '{key}' runs past the end")
    cursor.position = position or cursor.position
    return starts


def _walk_strings(cursor: Cursor, starts: np.ndarray) -> int:
    """Fills in where they start; returns where they end, 0 if that is past the end of the file."""
    unpack = _U64.unpack_from
    buffer, position, last = cursor.buffer, cursor.position, cursor.end - 8
    for index in range(len(starts)):
        if position > last:
            return 0
        starts[index] = position
        position += 8 + unpack(buffer, position)[0]
    return position if position <= cursor.end else 0
