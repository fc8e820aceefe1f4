"""The messages between the HTTP process and the engine process, as typed records in msgpack.

Every message is checked against its type when it is read, on both sides. Tokens only: text never crosses. Knows nothing
of sockets or processes; used by engine/process.py and by the server's engine client. Imports no torch.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.checkpoint.embedding_files import EmbeddingSettings
from tokenmill.engine.stats import DeviceStats, EngineStats
from tokenmill.types import KvLease, Request, SamplingParams, TokenEvent


class EngineSpec(msgspec.Struct, frozen=True):
    """What an engine process is started with (JSON on its standard input)."""

    path: str
    options: dict[str, Any]  # EngineConfig, by field
    inbox: str  # address it reads from; it binds all three
    outbox: str  # address it writes to
    heartbeats: str  # the same, for the thread beside the loop
    heartbeat_seconds: float = 0.25
    log_level: str = "info"
    step_log: str = ""  # folder that step times are logged in
    meters: bool = False  # divide the time of steps among tenants
    adapters: dict[str, str] = {}  # name -> path: loaded while the last engine ran; one that is gone is left out


# --- to the engine ---


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A request, in the fields a caller may set."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: list[int]
    seed: int
    priority: int
    arrival: int
    tenant: str
    weight: float
    embeds: bool = False
    deadline: float | None = None  # of the monotonic clock, which both processes share
    max_pinned_share: float = 1.0
    cache_salt: bytes = b""
    adapter: str = ""  # its name: the engine knows which version that is
    score_ids: tuple[int, ...] = ()
    second: int = 0
    output_ids: list[int] = []  # of an answer that began elsewhere: it goes on after them
    publishes: KvLease | None = None
    source: KvLease | None = None

    @classmethod
    def of(cls, request: Request) -> Submit:
        return cls(
            request.request_id,
            request.prompt_ids,
            request.params,
            list(request.stop_ids),
            request.seed,
            request.priority,
            request.arrival,
            request.tenant,
            request.weight,
            request.embeds,
            request.deadline,
            request.max_pinned_share,
            request.cache_salt,
            request.adapter.name if request.adapter is not None else "",
            request.score_ids,
            request.second,
            request.output_ids,
            request.publishes,
            request.source,
        )

    def request(self) -> Request:
        return Request(
            self.request_id,
            self.prompt_ids,
            self.params,
            frozenset(self.stop_ids),
            seed=self.seed,
            priority=self.priority,
            arrival=self.arrival,
            tenant=self.tenant,
            weight=self.weight,
            embeds=self.embeds,
            deadline=self.deadline,
            max_pinned_share=self.max_pinned_share,
            cache_salt=self.cache_salt,
            score_ids=self.score_ids,
            second=self.second,
            token_ids=[*self.prompt_ids, *self.output_ids],
            publishes=self.publishes,
            source=self.source,
        )


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    request_id: str
    index: int | None = None  # one of the siblings; None: all of them


class SourceFailed(msgspec.Struct, frozen=True, tag="source_failed"):
    """The prompt of a request is not computed by a peer after all."""

    request_id: str


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Answered by an AdapterAnswer of the same number, once the files are read and checked."""

    number: int
    name: str
    path: str
    replaces: bool = False  # one of that name


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """Answered by an AdapterAnswer, once its memory is free."""

    number: int
    name: str
    drains: bool = False  # wait for the requests that use it


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    number: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    pass


class Rest(msgspec.Struct, frozen=True, tag="rest"):
    """Go to sleep, which gives the memory of weights and KV pages back, or wake up; answered by Rested."""

    asleep: bool


class WatchPages(msgspec.Struct, frozen=True, tag="watch_pages"):
    """Tell from now on which pages the prefix cache has: those it has now come first. Names begin at `root`."""

    root: bytes


ToEngine = Submit | Cancel | SourceFailed | LoadAdapter | UnloadAdapter | Ping | Shutdown | Rest | WatchPages

# --- from the engine ---


class Phase(msgspec.Struct, frozen=True, tag="phase"):
    name: str


class AdapterInfo(msgspec.Struct, frozen=True):
    """An adapter that requests can name."""

    name: str
    path: str
    digest: bytes
    rank: int
    nbytes: int
    base: str = ""


class AdapterAnswer(msgspec.Struct, frozen=True, tag="adapter_answer"):
    number: int
    adapter: AdapterInfo | None = None  # that was loaded
    error: str = ""
    code: str = ""  # of the error: a constant of engine/adapters/registry.py, or empty


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    vocab_size: int
    eos_ids: list[int]
    options: dict[str, Any]  # the resolved EngineConfig
    architecture: str
    name: str  # what the checkpoint calls itself
    quantization: str  # stored type of most parameters
    weight_bytes: int
    load_seconds: float
    adapters: list[AdapterInfo] = []
    embedding: EmbeddingSettings | None = None  # of a model for vectors or scores, which then does not generate
    no_sleep: str = ""  # why it cannot sleep; empty if it can
    page_meaning: str = ""  # engine/tiers.py; empty: it has no pages that others could name


class Events(msgspec.Struct, frozen=True, tag="events"):
    """All that one step brought; no events where only the statistics have changed. These do not come with every step:
    while tokens flow, only every few milliseconds."""

    events: list[TokenEvent]
    stats: EngineStats | None = None
    device_seconds: dict[str, float] = {}  # by tenant, since the last statistics; only if the engine meters


class Pages(msgspec.Struct, frozen=True, tag="pages"):
    """Pages that came into the prefix cache, with their parents, and that left it, since the last such message."""

    stored: list[tuple[bytes, bytes]]
    removed: list[bytes]


class SourceWanted(msgspec.Struct, frozen=True, tag="source_wanted"):
    """A request whose source is on demand waits for a peer to compute its prompt: have that done."""

    request_id: str


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """From a side thread, so that it also comes while the engine's thread is busy or hangs."""

    activity: str = ""  # what that thread is doing
    age: float = 0.0  # seconds since it began that
    limit: float = 0.0  # seconds that it may take; 0: the stall timeout
    num_steps: int = 0
    resident_bytes: int = 0  # memory of the process
    devices: list[DeviceStats] = []  # its GPUs; on a CPU there are none


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    number: int


class Rested(msgspec.Struct, frozen=True, tag="rested"):
    asleep: bool  # from now on
    bytes: int = 0  # given back
    problem: str = ""  # what kept it from doing so


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A message that could not be used. `request_id` is empty if it could not even be read."""

    request_id: str
    message: str
    code: str = ""  # "deadline": it was dropped before its first token; "adapter_not_found": it was unloaded


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The last message of an engine: what ended it, and whether the user can fix it."""

    message: str
    user_error: bool = False


FromEngine = (
    Phase | Ready | AdapterAnswer | Events | Pages | SourceWanted | Heartbeat | Pong | Rested | Refused | Failed
)

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """Raises msgspec.DecodeError, or UserError from the ranges of SamplingParams."""
    return _to_engine.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    return _from_engine.decode(data)
