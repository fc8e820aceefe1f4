"""multipart/form-data as it arrives: small fields, and the content of one file in pieces.

Bounded: a part's head, the fields and their number. Memory is a piece and the boundary's length, however large the file
is. What is not exactly the format is refused with 400. Knows nothing of what the fields mean; api/files.py feeds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tokenmill.serve.errors import ApiError

_MAX_BOUNDARY = 70  # RFC 2046
_MAX_HEAD = 4096
_MAX_FIELD = 1024
_MAX_PARTS = 16
_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_PARAMETER = re.compile(r';\s*([a-z*]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))', re.IGNORECASE)


def boundary_of(content_type: str) -> bytes:
    kind, _, rest = content_type.partition(";")
    if kind.strip().lower() != "multipart/form-data":
        raise ApiError(400, "an upload is a form: send `content-type: multipart/form-data`")
    found = _parameters(f";{rest}").get("boundary", "").encode("latin-1", "replace")
    if not 0 < len(found) <= _MAX_BOUNDARY or not _BOUNDARY.fullmatch(found):
        raise _malformed("the boundary is missing or not valid")
    return found


class FormReader:
    """`feed` yields the content of the part named `file`; `fields` has the others, `filename` the file's own name."""

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None  # None: no file has come
        self._mark = b"\r\n--" + boundary
        self._data = b"\r\n"  # so that the first boundary looks like the others
        self._place = "preamble"  # or head, file, field, end
        self._name = ""
        self._field = b""
        self._num_parts = 0

    @property
    def complete(self) -> bool:
        return self._place == "end"

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._data += data
        while self._place != "end":
            if self._place == "head":
                end = self._data.find(b"\r\n\r\n")
                if (len(self._data) if end < 0 else end) > _MAX_HEAD:
                    raise _malformed(f"the headers of a part have more than {_MAX_HEAD} bytes")
                if end < 0:
                    return
                self._begin(self._data[:end])
                self._data = self._data[end + 4 :]
            found = self._data.find(self._mark)
            # Without a mark, all but what may be the beginning of one is content.
            certain = found if found >= 0 else max(0, len(self._data) - len(self._mark) + 1)
            piece, self._data = self._data[:certain], self._data[certain:]
            if piece:
                yield from self._take(piece)
            if found < 0 or len(self._data) < len(self._mark) + 2:
                return
            self._end_part(self._data[len(self._mark) :][:2])
            self._data = self._data[len(self._mark) + 2 :]
        self._data = b""  # what follows the last boundary means nothing

    def _take(self, piece: bytes) -> Iterator[bytes]:
        if self._place == "file":
            yield piece
        elif self._place == "field":
            self._field += piece
            if len(self._field) > _MAX_FIELD:
                raise _malformed(f"a field has more than {_MAX_FIELD} bytes")
        else:
            raise _malformed("it does not begin with its boundary")

    def _begin(self, head: bytes) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise _malformed(f"the form has more than {_MAX_PARTS} parts")
        try:
            lines = head.decode("utf-8").split("\r\n")
        except UnicodeDecodeError:
            raise _malformed("the headers of a part are not UTF-8") from None
        headers = {name.strip().lower(): value for name, _, value in (line.partition(":") for line in lines)}
        kind, _, rest = headers.get("content-disposition", "").partition(";")
        parameters = _parameters(f";{rest}")
        self._name, self._field = parameters.get("name", ""), b""
        if kind.strip().lower() != "form-data" or not self._name:
            raise _malformed("a part has no name")
        if self._name != "file":
            self._place = "field"
            return
        if self.filename is not None:
            raise ApiError(400, "the form has two files: send one", param="file")
        self._place, self.filename = "file", parameters.get("filename", "upload")

    def _end_part(self, after: bytes) -> None:
        """`after`: the two bytes that follow a boundary."""
        if self._place == "field":
            self.fields[self._name] = self._field.decode("utf-8", "replace")
        if after not in (b"\r\n", b"--"):
            raise _malformed("a boundary is not at the end of its line")
        self._place = "end" if after == b"--" else "head"


def _parameters(text: str) -> dict[str, str]:
    found = _PARAMETER.finditer(text)
    return {each[1].lower(): re.sub(r"\\(.)", r"\1", each[2]) if each[2] is not None else each[3] for each in found}


def _malformed(problem: str) -> ApiError:
    return ApiError(400, f"the form cannot be read: {problem}", code="invalid_form")
