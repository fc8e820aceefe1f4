"""The load generator's HTTP client, against a socket that says exactly what the test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from tokenmill.bench.serve_client import EventReader, Sample, StreamClient
from tokenmill.errors import UserError


def _event(**value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _text(text: str, finish: str | None = None) -> bytes:
    return _event(choices=[{"index": 0, "text": text, "finish_reason": finish}])


_DONE = b"data: [DONE]\n\n"
_USAGE = _event(
    choices=[], usage={"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
)


def _read(*pieces: bytes) -> Sample:
    sample = Sample(0.0, 0.0, 3)
    reader = EventReader(sample, keep_text=True)
    for number, piece in enumerate(pieces, 1):
        reader.feed(piece, float(number))
    reader.close(99.0)
    return sample


def test_pieces_are_stamped_and_usage_counts_tokens() -> None:
    sample = _read(_text("a"), _text("bc"), _text("", "stop"), _USAGE + _DONE)
    assert sample.ok
    assert list(sample.stamps) == [1, 2]
    assert (sample.output_tokens, sample.prompt_len, sample.cached_tokens) == (5, 9, 4)
    assert "".join(sample.pieces) == "abc"


def test_pieces_count_where_usage_is_missing() -> None:
    sample = _read(_text("a"), _text("b"), _text("c", "length"))
    assert sample.ok
    assert (sample.output_tokens, sample.prompt_len) == (3, 3)


def test_chat_deltas_count_from_their_first_content() -> None:
    role = _event(choices=[{"delta": {"role": "assistant", "content": ""}}])
    thought = _event(choices=[{"delta": {"reasoning_content": "hm"}}])
    call = _event(choices=[{"delta": {"tool_calls": [{"index": 0}]}, "finish_reason": "tool_calls"}])
    assert list(_read(role, thought, call, _DONE).stamps) == [2, 3]


def test_bytes_may_be_cut_anywhere() -> None:
    stream = _text("é") + _text("b", "stop") + b": comment\n\n" + _USAGE.replace(b"\n", b"\r\n") + _DONE
    sample = _read(*(stream[at : at + 1] for at in range(len(stream))))
    assert sample.ok
    assert (len(sample.stamps), sample.output_tokens, "".join(sample.pieces)) == (2, 5, "éb")


def test_an_answer_without_text_has_a_first_moment() -> None:
    sample = _read(_text("", "stop"), _DONE)
    assert sample.ok
    assert sample.first == 1


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        ([_text("a")], "ended before"),
        ([_text("a"), _event(error={"message": "stuck"}), _DONE], "stuck"),
        ([b"data: {\n\n", _DONE], "format"),
        ([], "ended before"),
    ],
)
def test_broken_streams_are_failures(pieces: list[bytes], problem: str) -> None:
    assert problem in _read(*pieces).error


def _ask(answers: Sequence[bytes], count: int = 1, timeout: float = 10) -> tuple[list[Sample], list[bytes], int]:
    """`count` requests, one after the other; the server gives one answer a request and closes after an empty one."""
    seen: list[bytes] = []
    connections = 0
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        try:
            while left:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                seen.append(head + await reader.readexactly(size))
                answer = left.pop(0)
                writer.write(answer)
                if not answer.endswith(b"0\r\n\r\n"):
                    break
        except asyncio.IncompleteReadError:
            pass
        writer.close()

    async def run() -> list[Sample]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = StreamClient(f"http://127.0.0.1:{port}/base/", "/v1/x", {"x-api-key": "k"}, timeout, False)
        samples = [await client.send(b"{}", 1) for _ in range(count)]
        client.close()
        server.close()
        return samples

    return asyncio.run(run()), seen, connections


def _chunked(*pieces: bytes) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


def test_connections_are_used_again() -> None:
    answer = _chunked(_text("a"), _text("b", "stop"), _DONE)
    samples, seen, connections = _ask([answer, answer], 2)
    assert [sample.output_tokens for sample in samples] == [2, 2]
    assert connections == 1
    assert seen[0].startswith(b"POST /base/v1/x HTTP/1.1\r\n")
    assert b"x-api-key: k\r\n" in seen[0]


def test_refusals_and_lost_connections_are_failures_and_the_next_request_is_not() -> None:
    refusal = b'HTTP/1.1 429 Too Many\r\ncontent-length: 6\r\n\r\n{"e":1'
    cut = _chunked(_text("a"))[:-20]
    samples, _, _ = _ask([refusal, cut, b"nonsense", _chunked(_text("a", "stop"))], 4)
    assert [sample.ok for sample in samples] == [False, False, False, True]
    assert samples[0].error == 'HTTP 429: {"e":1'
    assert "lost" in samples[1].error
    assert all(sample.ended >= sample.sent for sample in samples)


def test_a_kept_connection_that_the_server_closes_costs_no_request() -> None:
    """Without a byte of answer on a used connection nobody has read the request; on a new one it is a failure."""
    answer = _chunked(_text("a", "stop"))
    samples, seen, connections = _ask([answer, b"", answer], 2)
    assert [sample.error for sample in samples] == ["", ""]
    assert (len(seen), connections) == (3, 2)
    samples, seen, _ = _ask([b"", answer], 1)
    assert "lost" in samples[0].error
    assert len(seen) == 1


def test_no_server_and_no_url() -> None:
    client = StreamClient("http://127.0.0.1:9", "/v1/x", {}, 5, False)
    assert "cannot connect" in asyncio.run(client.send(b"{}", 1)).error
    with pytest.raises(UserError, match="base URL"):
        StreamClient("ftp://host", "/", {}, 1, False)
