"""Forms as clients send them, cut at every place; what is no form is refused."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.serve.errors import ApiError
from tokenmill.serve.files.multipart import FormReader, boundary_of

_CONTENT = b'{"a": 1}\r\n--not-the-mark\r\n\r\n{"b": 2}\n\r'


def _form(content: bytes = _CONTENT) -> tuple[bytes, bytes]:
    """Boundary and body, as httpx (and with it the openai package) writes them."""
    request = httpx.Request("POST", "http://x", data={"purpose": "batch"}, files={"file": ('a "b".jsonl', content)})
    return boundary_of(request.headers["content-type"]), request.read()


def _read(boundary: bytes, *pieces: bytes) -> tuple[FormReader, bytes]:
    reader = FormReader(boundary)
    return reader, b"".join(part for piece in pieces for part in reader.feed(piece))


@pytest.mark.parametrize("content", [_CONTENT, b"", b"\r\n", b"\r\n--"])
def test_a_form_means_the_same_wherever_it_is_cut(content: bytes) -> None:
    boundary, body = _form(content)
    for cut in range(len(body)):
        reader, found = _read(boundary, body[:cut], body[cut:])
        assert (found, reader.fields, reader.complete) == (content, {"purpose": "batch"}, True), cut
    reader, found = _read(boundary, *(body[place : place + 1] for place in range(len(body))))
    assert (found, reader.complete) == (content, True)
    assert reader.filename is not None
    assert reader.filename.endswith(".jsonl")


def test_a_form_that_ends_early_is_not_complete() -> None:
    boundary, body = _form()
    last = body.rindex(b"--" + boundary)
    for end in (0, 10, len(body) // 2, last, last + len(boundary) + 2):
        assert not _read(boundary, body[:end])[0].complete


def test_content_is_passed_on_while_it_comes() -> None:
    boundary, body = _form(b"x" * 100_000)
    reader = FormReader(boundary)
    early = b"".join(reader.feed(body[:50_000]))
    assert len(early) > 49_000


def _part(headers: bytes, content: bytes = b"", mark: bytes = b"--b\r\n") -> bytes:
    return mark + headers + b"\r\n\r\n" + content + b"\r\n"


_FILE = b'Content-Disposition: form-data; name="file"; filename="f"'


@pytest.mark.parametrize(
    "body",
    [
        b"no boundary here, but many characters",
        b"--bX\r\n",
        _part(b"Content-Disposition: form-data"),
        _part(b'Content-Disposition: attachment; name="file"'),
        _part(b"\xff"),
        _part(b"X: " + b"y" * 5000),
        b"--b\r\nX: " + b"y" * 5000,
        _part(b'Content-Disposition: form-data; name="purpose"', b"z" * 2000),
        _part(_FILE) + _part(_FILE),
        _part(b'Content-Disposition: form-data; name="a"') * 17,
    ],
)
def test_what_is_no_form_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        _read(b"b", body)
    assert caught.value.status == 400


_FORM = "multipart/form-data"


@pytest.mark.parametrize(
    "kind",
    ["", "application/json", _FORM, f"{_FORM}; boundary=", f"{_FORM}; boundary=\t", f"{_FORM}; boundary={'x' * 71}"],
)
def test_a_form_needs_a_boundary(kind: str) -> None:
    with pytest.raises(ApiError) as caught:
        boundary_of(kind)
    assert caught.value.status == 400
    assert boundary_of('Multipart/Form-Data; charset=utf-8; boundary="a b?"') == b"a b?"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([b"--b", b"\r\n", b"--", b'content-disposition: form-data; name="file"', b"x", b"\0"])))
def test_no_bytes_break_the_reader(pieces: list[bytes]) -> None:
    whole: list[bytes] | None
    try:
        whole = [_read(b"b", b"".join(pieces))[1]]
    except ApiError:
        whole = None
    try:
        parts: list[bytes] | None = [_read(b"b", *pieces)[1]]
    except ApiError:
        parts = None
    assert parts == whole
