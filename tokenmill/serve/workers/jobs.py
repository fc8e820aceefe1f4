"""Messages between the HTTP process and a text worker: jobs, results, and how they are framed on a pipe.

A frame is a length of four bytes and a msgpack message; nothing is ever unpickled. Knows neither asyncio nor how a job
is done; imported by both sides.
"""

from __future__ import annotations

from typing import Any, BinaryIO

import msgspec

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 1 << 28
_LARGE_BYTES = 1 << 16  # of a message: more is heavy work


class Setup(msgspec.Struct, array_like=True):
    """The first message to a worker."""

    path: str  # of the model, for its tokenizer and chat template
    memory_bytes: int
    log_level: str = "info"
    load_format: str = "auto"
    template_source: str = ""  # of a chat template instead of the model's own


class Ready(msgspec.Struct, array_like=True):
    """The answer to it, once tokenizer, template and vocabulary are loaded. `error`: why they cannot be."""

    error: str = ""


class Render(msgspec.Struct, tag=True):
    """A conversation through the model's chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    variables: dict[str, Any] = {}


class Encode(msgspec.Struct, tag=True):
    """Texts to token ids. `chat`: they are rendered templates; `special`: with the tokens that start a sequence."""

    texts: list[str]
    chat: bool = False
    special: bool = True


class CheckGrammar(msgspec.Struct, tag=True):
    """Whether a StructuredSpec can be compiled and followed within the limits."""

    kind: str
    text: str = ""
    choices: tuple[str, ...] = ()


Job = Render | Encode | CheckGrammar


class JobResult(msgspec.Struct, tag=True, kw_only=True):
    seconds: float  # of processor time


class Rendered(JobResult):
    text: str


class Encoded(JobResult):
    token_ids: list[list[int]]


class Accepted(JobResult):
    """The grammar can be used."""


class Rejected(JobResult):
    """The client's input cannot be used."""

    message: str


class Failed(JobResult):
    """Our own error; the worker's log has the traceback."""

    message: str


Result = Rendered | Encoded | Accepted | Rejected | Failed

# Processor seconds that a job may take. A text of the largest size is tokenized in a few seconds.
MAX_SECONDS: dict[type, float] = {Render: 2.0, Encode: 30.0, CheckGrammar: 3.0}
# What is said of a job that exceeded its time, or with which its worker died.
TOO_SLOW = {
    Render: "the chat template takes too long on these messages: send fewer or shorter ones",
    Encode: "the text takes too long to tokenize: shorten it",
    CheckGrammar: "the grammar takes too long to compile: make it smaller or simpler",
}
CRASHED = {
    Render: "the chat template needs too much memory on these messages: send fewer or shorter ones",
    Encode: "the text needs too much memory to tokenize: shorten it",
    CheckGrammar: "the grammar crashed the compiler: make it smaller or simpler",
}

_encoder = msgspec.msgpack.Encoder()
_jobs = msgspec.msgpack.Decoder(Job)
_results = msgspec.msgpack.Decoder(Result)
_setups = msgspec.msgpack.Decoder(Setup)
_readies = msgspec.msgpack.Decoder(Ready)


def is_heavy(job: Job, num_bytes: int) -> bool:
    """Whether a job may take more than some milliseconds: it then runs at low priority and leaves a worker free."""
    return isinstance(job, CheckGrammar) or num_bytes > _LARGE_BYTES


def framed(message: Setup | Ready | Job | Result) -> bytes:
    data = _encoder.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def frame_length(head: bytes) -> int:
    length = int.from_bytes(head, "little")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return length


def read_frame(pipe: BinaryIO) -> bytes | None:
    """The next message; None at the end of the pipe."""
    head = pipe.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    length = frame_length(head)
    data = pipe.read(length)
    return data if len(data) == length else None


def decode_job(data: bytes) -> Job:
    return _jobs.decode(data)


def decode_result(data: bytes) -> Result:
    return _results.decode(data)


def decode_setup(data: bytes) -> Setup:
    return _setups.decode(data)


def decode_ready(data: bytes) -> Ready:
    return _readies.decode(data)
