"""`--traffic-log DIR`: one line per prompt with arrival, lengths, prefix hashes, cache hits and latencies. Never text.

Observes the engine client like the metrics do. A thread of its own hashes and writes; the event loop only puts records
into a bounded queue, and what does not fit or cannot be written is counted, never an error of a request. Tokens appear
only as hashes under a key that is kept beside the files. docs/traffic_log.md describes the format.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import queue
import threading
import time
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill import __version__
from tokenmill.engine.kv.tier.secret import own_secret
from tokenmill.errors import UserError
from tokenmill.log import get_logger
from tokenmill.serve.traffic_log_format import BLOCK_TOKENS, HASH_BYTES, HEADER, PATTERN, VERSION

if TYPE_CHECKING:
    from tokenmill.engine.stats import EngineStats
    from tokenmill.serve.generation import Generation, Member

_log = get_logger(__name__)
KEY_FILE = "key"
_MAX_QUEUED = 4096  # records
_MAX_QUEUED_TOKENS = 4 << 20  # of their prompts, which the queue keeps in memory
_FILES = 8  # that the total size is divided into: an eighth of the log is deleted at a time
_WARN_SECONDS = 60.0
_CLOSE_SECONDS = 2.0


@dataclass(slots=True)
class _Progress:
    """Of one prompt with a single answer: when its first and last tokens came, and the longest gap so far."""

    first: float
    last: float
    max_gap: float = 0.0


@dataclass(frozen=True, slots=True)
class _Record:
    fields: dict[str, Any]
    prompt_ids: list[int]
    salt: bytes
    tenant: str


class TrafficLog:
    def __init__(self, folder: str, model: str, max_bytes: int) -> None:
        """Raises UserError if the folder cannot be used. Opens files: call it beside the event loop."""
        self._folder = Path(folder).expanduser()
        self._model = model
        self._started = time.monotonic()
        self._started_unix = time.time()
        self._progress: dict[Member, _Progress] = {}
        self._queue: queue.Queue[_Record | None] = queue.Queue(_MAX_QUEUED)
        self._queued_tokens = 0  # added to by the event loop
        self._taken_tokens = 0  # added to by the thread
        self._num_dropped = 0  # records that the queue had no room for
        try:
            key = own_secret(self._folder / KEY_FILE)
            self._files = LogFiles(self._folder, max_bytes, self._header())
        except OSError as error:
            problem = f"cannot write the traffic log to {self._folder}: {error.strerror or error}"
            raise UserError(problem, "give a folder that this user can write and nobody else can read") from None
        self._hasher = PrefixHasher(key)
        self._thread = threading.Thread(target=self._write_all, name="traffic-log", daemon=True)
        self._thread.start()

    def outcomes(self) -> dict[str, int]:
        """Records by what became of them: in a file, no room in the queue, not taken by the disk."""
        return {"written": self._files.num_written, "dropped": self._num_dropped, "failed": self._files.num_failed}

    def close(self) -> None:
        """Write what is queued, as far as the disk takes it in time."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_CLOSE_SECONDS)
        self._thread.join(_CLOSE_SECONDS)

    # --- from the engine client and from admission ---

    def on_step(self, stats: EngineStats) -> None:
        pass

    def on_restart(self, reason: str) -> None:
        pass

    def on_tokens(self, member: Member, num_tokens: int) -> None:
        if not num_tokens or member.request.params.n > 1:
            return
        now = time.monotonic()
        progress = self._progress.get(member)
        if progress is None:
            self._progress[member] = _Progress(now, now)
        else:
            progress.max_gap = max(progress.max_gap, now - progress.last)
            progress.last = now

    def on_end(self, member: Member) -> None:
        progress = self._progress.pop(member, None)
        if member.request.embeds:
            return
        generation = member.generation
        ended = generation.code or ("error" if generation.failed else "aborted")
        self._put(member, progress, "" if member.finished else ended)

    def on_refused(self, generation: Generation, code: str) -> None:
        """Admission refused it: load that was offered all the same."""
        for member in generation.members:
            self._put(member, None, code)

    # --- the event loop's side ---

    def _put(self, member: Member, progress: _Progress | None, error: str) -> None:
        request = member.request
        if self._queued_tokens - self._taken_tokens > _MAX_QUEUED_TOKENS:
            self._num_dropped += 1
            return
        record = _Record(self._fields(member, progress, error), request.prompt_ids, request.cache_salt, request.tenant)
        try:
            self._queue.put_nowait(record)
            self._queued_tokens += len(request.prompt_ids)
        except queue.Full:
            self._num_dropped += 1

    def _fields(self, member: Member, progress: _Progress | None, error: str) -> dict[str, Any]:
        request, output, first = member.request, member.output, member.first_token
        num_output = sum(len(each.token_ids) for each in output.outputs)
        since_start = member.arrived - self._started
        ended = member.last_token if member.finished and first is not None else time.monotonic()
        fields: dict[str, Any] = {
            "arrival_unix": round(self._started_unix + since_start, 6),
            "arrival_s": round(since_start, 6),
            "model": self._model,
            "prompt_tokens": len(request.prompt_ids),
            "output_tokens": num_output,
            "cached_tokens": output.num_cached_tokens,
            "n": request.params.n,
            "max_tokens": request.params.max_tokens,
            "e2e_ms": _milliseconds(ended - member.arrived),
            "finish_reason": output.outputs[0].finish_reason or "",
        }
        if first is not None:
            fields["ttft_ms"] = _milliseconds(first - member.arrived)
        if progress is not None and num_output > 1:
            fields["itl_ms"] = _milliseconds((progress.last - progress.first) / (num_output - 1))
            fields["itl_max_ms"] = _milliseconds(progress.max_gap)
        if error:
            fields["error"] = error
        return fields

    def _header(self) -> dict[str, Any]:
        return {
            HEADER: VERSION,
            "block_tokens": BLOCK_TOKENS,
            "started_unix": round(self._started_unix, 6),
            "tokenmill": __version__,
        }

    # --- the thread's side ---

    def _write_all(self) -> None:
        going = True
        while going:
            records = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while len(records) < _MAX_QUEUED:
                    records.append(self._queue.get_nowait())
            going = None not in records
            self._files.write([self._line(each) for each in records if each is not None])

    def _line(self, record: _Record) -> bytes:
        self._taken_tokens += len(record.prompt_ids)
        packed = self._hasher.prefix(record.prompt_ids, record.salt)
        fields = record.fields | {"prefix": base64.b64encode(packed).decode()}
        if record.tenant:
            fields["tenant"] = self._hasher.name(record.tenant)
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


class PrefixHasher:
    """Hashes under a key: who lacks it can neither guess tokens nor compare logs."""

    def __init__(self, key: bytes) -> None:
        self._key = hashlib.sha256(key).digest()

    def prefix(self, token_ids: list[int], salt: bytes = b"") -> bytes:
        """HASH_BYTES for each full block, each of all tokens up to the end of its block: equal hashes are equal
        prefixes that may share a cache (`salt`: whose cache it is)."""
        data = array("q", token_ids).tobytes()
        stride = BLOCK_TOKENS * 8
        last = self._digest(b"prefix", salt)
        hashes = bytearray()
        for at in range(0, len(data) - stride + 1, stride):
            last = self._digest(b"block", last + data[at : at + stride])
            hashes += last
        return bytes(hashes)

    def name(self, text: str) -> str:
        return self._digest(b"tenant", text.encode("utf-8", "surrogatepass")).hex()

    def _digest(self, purpose: bytes, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=HASH_BYTES, key=self._key, person=purpose).digest()


class LogFiles:
    """Files of one eighth of `max_bytes` each, the oldest deleted. Only this user may read them. Writes go straight to
    the kernel: what was written survives the end of the process."""

    def __init__(self, folder: Path, max_bytes: int, header: dict[str, Any]) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._max_bytes = max_bytes
        self._file_bytes = max(1, max_bytes // _FILES)
        self._header = json.dumps(header, separators=(",", ":")).encode() + b"\n"
        self._descriptor = -1
        self._size = 0
        self._cut = False  # the last line is incomplete
        self._warned = -_WARN_SECONDS
        self.num_written = 0
        self.num_failed = 0
        self._rotate()

    def write(self, lines: list[bytes]) -> None:
        """Never raises: what the disk does not take is counted."""
        start = 0
        while start < len(lines):
            end, size = start, 0
            while end < len(lines) and (end == start or size + len(lines[end]) <= self._file_bytes):
                size += len(lines[end])
                end += 1
            try:
                if self._descriptor < 0 or self._size + size > self._file_bytes:
                    self._rotate()
                self._append(b"".join(lines[start:end]))
                self.num_written += end - start
            except OSError as error:
                self._fail(end - start, error)
            start = end

    def _append(self, data: bytes) -> None:
        data = b"\n" + data if self._cut else data
        while data:
            taken = os.write(self._descriptor, data)
            self._size += taken
            self._cut = taken < len(data)
            data = data[taken:]

    def _rotate(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)
        self._delete_oldest()
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        name = PATTERN.replace("*", f"{stamp}-{time.time_ns() % 10**9:09d}-{os.getpid()}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self._folder / name, flags, 0o600)
        self._size, self._cut = 0, False
        self._append(self._header)

    def _delete_oldest(self) -> None:
        """Leave room for one more file."""
        sizes = {}
        for path in sorted(self._folder.glob(PATTERN)):
            with contextlib.suppress(FileNotFoundError):
                sizes[path] = path.stat().st_size
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total + self._file_bytes <= self._max_bytes:
                return
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            total -= size

    def _fail(self, num_lines: int, error: OSError) -> None:
        self.num_failed += num_lines
        now = time.monotonic()
        if now - self._warned >= _WARN_SECONDS:
            self._warned = now
            _log.warning(
                "cannot write to the traffic log %s: %s; %d requests are missing from it so far",
                *(self._folder, error.strerror or error, self.num_failed),
            )


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)
