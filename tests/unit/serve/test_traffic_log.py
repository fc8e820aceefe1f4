"""What the server records of its traffic: every prompt, no text, whatever the disk does."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.serve.test_service_life import Engine, make_service
from tokenmill.bench.traffic_log import LoggedRequest, read_traffic_log
from tokenmill.errors import UserError
from tokenmill.serve import traffic_log
from tokenmill.serve.callers import Caller
from tokenmill.serve.errors import ApiError
from tokenmill.serve.generation import Generation
from tokenmill.serve.service import Service
from tokenmill.serve.tenants.keys import Client
from tokenmill.serve.traffic_log import LogFiles, PrefixHasher, TrafficLog
from tokenmill.serve.traffic_log_format import BLOCK_TOKENS, HASH_BYTES
from tokenmill.types import SamplingParams

_LARGE = 1 << 30


class _LoggedEngine(Engine):
    """Tells observers of the end of a request, as the engine client does."""

    def withdraw(self, generation: Generation) -> None:
        super().withdraw(generation)
        for member in generation.members:
            for observer in self.observers:
                observer.on_end(member)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def log(folder: Path) -> Iterator[TrafficLog]:
    log = TrafficLog(str(folder), "m", _LARGE)
    yield log
    log.close()


def _service(log: TrafficLog) -> tuple[Service, _LoggedEngine]:
    service, _ = make_service()
    engine = _LoggedEngine()
    service.engine = engine  # type: ignore[assignment]
    engine.observe(service)
    service.record_traffic(log)
    return service, engine


async def _open(service: Service, prompt: list[int], client: Client | None = None, n: int = 1) -> Generation:
    params = SamplingParams(max_tokens=4, n=n)
    return await service.open([prompt], lambda _: params, Caller(client or Client()), streaming=False)


def _answered(service: Service, engine: _LoggedEngine, prompt: list[int], client: Client | None = None) -> None:
    async def request() -> None:
        generation = await _open(service, prompt, client)
        engine.answer(generation, None)
        engine.answer(generation, "length")
        await generation.result()
        generation.close()

    asyncio.run(request())


def _written(log: TrafficLog, folder: Path) -> list[LoggedRequest]:
    log.close()
    return read_traffic_log(folder)


def test_a_finished_request_is_one_line_with_its_numbers(log: TrafficLog, folder: Path) -> None:
    service, engine = _service(log)
    _answered(service, engine, list(range(1, 41)))
    (request,) = _written(log, folder)
    assert (request.prompt_tokens, request.output_tokens, request.max_tokens, request.n) == (40, 2, 4, 1)
    assert (request.finish_reason, request.error, request.model) == ("length", "", "m")
    assert len(request.prefix_hashes) == 40 // BLOCK_TOKENS
    assert request.ttft_ms is not None
    assert request.itl_ms is not None
    assert request.itl_max_ms is not None
    assert request.e2e_ms is not None
    assert 0 <= request.ttft_ms <= request.e2e_ms
    assert request.itl_ms <= request.itl_max_ms + 0.001
    assert log.outcomes() == {"written": 1, "dropped": 0, "failed": 0}


def test_equal_prefixes_have_equal_hashes_and_nothing_else_has(log: TrafficLog, folder: Path) -> None:
    service, engine = _service(log)
    shared = list(range(1, 33))
    for tail in ([50] * 20, [60] * 20):
        _answered(service, engine, shared + tail)
    _answered(service, engine, [99, *shared])
    first, second, third = (request.prefix_hashes for request in _written(log, folder))
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])
    assert not set(third) & set(first)


def test_tenants_share_no_hashes_because_they_share_no_cache(log: TrafficLog, folder: Path) -> None:
    service, engine = _service(log)
    prompt = list(range(1, 33))
    for name in ("alice", "alice", "bob"):
        _answered(service, engine, prompt, Client(name))
    first, second, third = _written(log, folder)
    assert first.prefix_hashes == second.prefix_hashes
    assert first.tenant == second.tenant != third.tenant
    assert not set(first.prefix_hashes) & set(third.prefix_hashes)
    assert "alice" not in "".join(path.read_text() for path in folder.iterdir())


def test_another_folder_has_another_key(tmp_path: Path) -> None:
    ids = list(range(32))
    hashes = [PrefixHasher(key).prefix(ids) for key in (b"one", b"two", b"one")]
    assert hashes[0] == hashes[2] != hashes[1]
    logs = [TrafficLog(str(tmp_path / name), "m", _LARGE) for name in ("a", "b")]
    for each in logs:
        each.close()
    keys = [(tmp_path / name / traffic_log.KEY_FILE).read_bytes() for name in ("a", "b")]
    assert keys[0] != keys[1]
    again = TrafficLog(str(tmp_path / "a"), "m", _LARGE)
    again.close()
    assert (tmp_path / "a" / traffic_log.KEY_FILE).read_bytes() == keys[0]


def test_only_full_blocks_are_hashed() -> None:
    hasher = PrefixHasher(b"key")
    for length in (0, 1, BLOCK_TOKENS - 1, BLOCK_TOKENS, 3 * BLOCK_TOKENS + 1):
        assert len(hasher.prefix(list(range(length)))) == HASH_BYTES * (length // BLOCK_TOKENS)
    long = hasher.prefix(list(range(5 * BLOCK_TOKENS)))
    assert long.startswith(hasher.prefix(list(range(3 * BLOCK_TOKENS))))


def test_files_and_folder_are_for_this_user_only(folder: Path) -> None:
    TrafficLog(str(folder), "m", _LARGE).close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert len(list(folder.iterdir())) == 2


def test_clients_that_leave_errors_and_refusals_are_told_apart(log: TrafficLog, folder: Path) -> None:
    service, engine = _service(log)

    async def requests() -> None:
        left = await _open(service, [1] * 20)
        engine.answer(left, None)
        left.close()
        failed = await _open(service, [2] * 20)
        failed.fail(ApiError(503, "gone", code="engine_unavailable"))
        failed.close()
        service.admission.draining = True
        with pytest.raises(ApiError):
            await _open(service, [3] * 20)

    asyncio.run(requests())
    found = _written(log, folder)
    assert [request.error for request in found[:2]] == ["aborted", "engine_unavailable"]
    assert [request.output_tokens for request in found[:2]] == [1, 0]
    assert found[0].itl_ms is None


def test_what_admission_refuses_is_offered_load_too(log: TrafficLog, folder: Path) -> None:
    service, _engine = _service(log)
    service.admission.pace.prompt_rate = 1.0  # tokens a second

    async def request() -> None:
        params, caller = SamplingParams(max_tokens=4), Caller(Client(), deadline=0.5)
        with pytest.raises(ApiError):
            await service.open([[2] * 24], lambda _: params, caller, streaming=False)

    asyncio.run(request())
    (found,) = _written(log, folder)
    assert (found.prompt_tokens, found.output_tokens, found.error, found.ttft_ms) == (24, 0, "deadline", None)


def test_several_answers_count_together_and_have_no_gaps(log: TrafficLog, folder: Path) -> None:
    service, _engine = _service(log)

    async def request() -> None:
        (await _open(service, [1] * 20, n=3)).close()

    asyncio.run(request())
    (found,) = _written(log, folder)
    assert (found.n, found.itl_ms) == (3, None)


def test_nothing_of_ended_requests_stays(log: TrafficLog) -> None:
    service, engine = _service(log)
    _answered(service, engine, [1] * 20)
    assert not log._progress


# --- files ---


def _lines(count: int, size: int = 100) -> list[bytes]:
    return [json.dumps({"n": number, "x": "y" * size}).encode() + b"\n" for number in range(count)]


def _numbers(folder: Path) -> list[int]:
    found = []
    for path in sorted(folder.glob("traffic-*.jsonl")):
        for line in path.read_bytes().split(b"\n")[1:-1]:
            try:
                found.append(json.loads(line)["n"])
            except (ValueError, KeyError):
                continue
    return found


def test_the_oldest_files_are_deleted_beyond_the_total_size(tmp_path: Path) -> None:
    files = LogFiles(tmp_path, 16_000, {"v": 1})
    for line in _lines(1000):
        files.write([line])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 16_000
    assert files.num_written == 1000
    numbers = _numbers(tmp_path)
    assert numbers == list(range(1000 - len(numbers), 1000))
    assert len(numbers) > 80
    for path in tmp_path.iterdir():
        assert json.loads(path.read_bytes().split(b"\n")[0]) == {"v": 1}


def test_a_large_batch_is_split_over_files(tmp_path: Path) -> None:
    files = LogFiles(tmp_path, 80_000, {"v": 1})
    files.write(_lines(300))
    assert _numbers(tmp_path) == list(range(300))
    assert len(list(tmp_path.iterdir())) > 3


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x" * 50_000)
    files = LogFiles(tmp_path, 16_000, {"v": 1})
    files.write(_lines(300))
    assert (tmp_path / "notes.txt").exists()


def test_a_full_disk_is_counted_and_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = LogFiles(tmp_path, _LARGE, {"v": 1})
    room = [0]
    write = os.write

    def limited(descriptor: int, data: bytes) -> int:
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = write(descriptor, data[: room[0]])
        room[0] -= taken
        return taken

    lines = _lines(6)
    monkeypatch.setattr(traffic_log.os, "write", limited)
    room[0] = len(lines[0]) + 30  # the second line is cut
    with caplog.at_level("WARNING"):
        files.write(lines[:1])
        files.write(lines[1:2])
        files.write(lines[2:3])
    assert (files.num_written, files.num_failed) == (1, 2)
    assert sum("No space left" in record.getMessage() for record in caplog.records) <= 1
    room[0] = _LARGE
    files.write(lines[3:])
    assert _numbers(tmp_path) == [0, 3, 4, 5]


def test_a_folder_that_is_gone_harms_no_request(folder: Path, log: TrafficLog) -> None:
    service, engine = _service(log)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    _answered(service, engine, [1] * 20)
    log.close()


def test_a_folder_that_cannot_be_used_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the traffic log"):
        TrafficLog(str(tmp_path / "file"), "m", _LARGE)
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / traffic_log.KEY_FILE).write_text("k" * 64)
    (tmp_path / "open" / traffic_log.KEY_FILE).chmod(0o644)
    with pytest.raises(UserError, match="nobody else can read"):
        TrafficLog(str(tmp_path / "open"), "m", _LARGE)


def test_records_beyond_the_queue_are_dropped_and_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_log, "_MAX_QUEUED_TOKENS", 30)
    monkeypatch.setattr(TrafficLog, "_write_all", lambda _self: None)  # a disk that hangs
    log = TrafficLog(str(folder), "m", _LARGE)
    service, engine = _service(log)
    for _ in range(4):
        _answered(service, engine, [1] * 20)
    assert log.outcomes()["dropped"] == 2
    assert service.metrics.get("requests") == 4
