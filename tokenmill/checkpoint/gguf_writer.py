"""Writes GGUF files (version 3): metadata, tensor table, then tensor data streamed in order. Atomic.

All sizes are known before the first byte, so a full disk is refused before any work. Data goes to a temporary file
beside the target, which is renamed when everything promised has been written; otherwise it is removed. Knows nothing of
models: gguf_export.py says what to write, quantize/ggml/export.py provides the bytes.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO

from tokenmill.errors import UserError
from tokenmill.kernels.ggml_types import TYPES

if TYPE_CHECKING:
    from torch import Tensor

Value = bool | int | float | str | Sequence[bool] | Sequence[int] | Sequence[float] | Sequence[str]

_HEADER = struct.Struct("<4sIQQ")
_VERSION = 3
_ALIGNMENT = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64, _INT64 = 4, 5, 6, 7, 8, 9, 10, 11
_FREE_SPACE = "free some space, or give a path on another disk"


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One tensor of the file to be. `shape` is row-major; for block types the last dimension is whole blocks."""

    name: str
    shape: tuple[int, ...]
    type_name: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * TYPES[self.type_name].row_bytes(self.shape[-1])


def pack_value(value: Value) -> bytes:
    """A metadata value with its type, as GGUF files usually have it: counts are uint32, numbers float32."""
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        if value < 0:
            return struct.pack("<Ii", _INT32, value) if value >= -(2**31) else struct.pack("<Iq", _INT64, value)
        return struct.pack("<II", _UINT32, value) if value < 2**32 else struct.pack("<IQ", _UINT64, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    return struct.pack("<I", _ARRAY) + _pack_array(value)


def _pack_array(values: Sequence[bool] | Sequence[int] | Sequence[float] | Sequence[str]) -> bytes:
    assert values, "an array of nothing has no type"
    first = values[0]
    head = struct.Struct("<IQ")
    if isinstance(first, str):
        return head.pack(_STRING, len(values)) + b"".join(_string(str(value)) for value in values)
    kind, letter = _FLOAT32, "f"
    if isinstance(first, bool):
        kind, letter = _BOOL, "?"
    elif isinstance(first, int):
        kind, letter = _INT32, "i"
    return head.pack(kind, len(values)) + struct.pack(f"<{len(values)}{letter}", *values)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def pack_head(pairs: Mapping[str, bytes], slots: Sequence[TensorSlot]) -> bytes:
    """Everything before the tensor data, padded. `pairs`: key -> packed value."""
    parts = [_HEADER.pack(b"GGUF", _VERSION, len(slots), len(pairs))]
    for key, value in pairs.items():
        parts += [_string(key), value]
    offset = 0
    for slot in slots:
        dimensions = tuple(reversed(slot.shape))  # fastest first
        parts.append(_string(slot.name))
        parts.append(struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions))
        parts.append(struct.pack("<IQ", TYPES[slot.type_name].number, offset))
        offset += _aligned(slot.nbytes)
    head = b"".join(parts)
    return head + bytes(_aligned(len(head)) - len(head))


def file_bytes(pairs: Mapping[str, bytes], slots: Sequence[TensorSlot]) -> int:
    """Size of the whole file."""
    return len(pack_head(pairs, slots)) + sum(_aligned(slot.nbytes) for slot in slots)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


class GGUFWriter:
    """`with GGUFWriter(path, pairs, slots) as writer: writer.append(rows)` for the rows of each slot, in order."""

    def __init__(self, path: Path, pairs: Mapping[str, bytes], slots: Sequence[TensorSlot]) -> None:
        self.path = path
        self.nbytes = file_bytes(pairs, slots)
        self._slots = list(slots)
        self._head = pack_head(pairs, slots)
        self._partial = path.with_name(f".{path.name}.partial")
        self._file: BinaryIO | None = None
        self._slot = 0  # being written
        self._left = slots[0].nbytes if slots else 0
        _check_target(path, self.nbytes)

    def __enter__(self) -> GGUFWriter:
        try:
            self._file = self._partial.open("wb")
        except OSError as error:
            raise _cannot_write(self.path, error) from None
        self._write(self._head)
        return self

    def append(self, rows: Tensor) -> None:
        """The next bytes of the present tensor: uint8, whole rows."""
        data = rows.contiguous().numpy().data.cast("B")
        assert len(data) <= self._left, self._slots[self._slot].name
        self._write(data)
        self._left -= len(data)
        if self._left == 0:
            size = self._slots[self._slot].nbytes
            self._write(bytes(_aligned(size) - size))
            self._slot += 1
            self._left = self._slots[self._slot].nbytes if self._slot < len(self._slots) else 0

    def __exit__(self, kind: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None) -> None:
        assert self._file is not None
        try:
            if kind is None:
                assert self._slot == len(self._slots), f"{len(self._slots) - self._slot} tensors were not written"
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()
            if kind is None:
                self._partial.replace(self.path)
        except OSError as error:
            raise _cannot_write(self.path, error) from None
        finally:
            self._partial.unlink(missing_ok=True)

    def _write(self, data: bytes | memoryview) -> None:
        assert self._file is not None
        try:
            self._file.write(data)
        except OSError as error:
            raise _cannot_write(self.path, error) from None


def _check_target(path: Path, nbytes: int) -> None:
    if path.is_dir():
        raise UserError(f"{path} is a directory", "give the path of the .gguf file to write")
    if not path.parent.is_dir():
        raise UserError(f"{path.parent} does not exist", "make the directory first")
    free = shutil.disk_usage(path.parent).free
    if free < nbytes:
        raise UserError(f"{path} needs {nbytes} bytes, {free} are free there", _FREE_SPACE)


def _cannot_write(path: Path, error: OSError) -> UserError:
    remedy = _FREE_SPACE if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the disk and its permissions"
    return UserError(f"cannot write {path}: {error.strerror or error}", remedy)
