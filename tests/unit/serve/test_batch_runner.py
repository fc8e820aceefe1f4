"""Batches from their file to their results, with calls that a test answers: statuses, ends, kills at every write."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.unit.serve.killed_disk import KilledDisk, KilledError
from tests.unit.serve.live_server import until
from tests.unit.serve.test_file_store import add
from tokenmill.serve.batches import answering
from tokenmill.serve.batches import runner as runner_module
from tokenmill.serve.batches.answering import Answer
from tokenmill.serve.batches.lines import ENDPOINTS
from tokenmill.serve.batches.record import ENDED, BatchRecord
from tokenmill.serve.batches.runner import BatchRunner
from tokenmill.serve.batches.store import BatchStore
from tokenmill.serve.errors import ApiError
from tokenmill.serve.files import store as store_module
from tokenmill.serve.files.store import FileStore
from tokenmill.serve.tenants.keys import Client

_BAD = 2  # the row that is answered with 400
_DAY = ("24h", 86400)


def rows(number: int) -> bytes:
    lines = [{"custom_id": f"row-{each}", "method": "POST", "url": ENDPOINTS[1], "body": {"n": each}}
             for each in range(number)]  # fmt: skip
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


class Calls:
    """Answers each row with its number; `hold` keeps those in flight from row `hold_from` on until it is set."""

    def __init__(self) -> None:
        self.asked: Counter[int] = Counter()
        self.clients: list[Client] = []
        self.in_flight = self.most_in_flight = 0
        self.hold: asyncio.Event | None = None
        self.hold_from = 0
        self.script: dict[int, list[Answer]] = {}  # answers before the usual one

    async def __call__(self, client: Client, path: str, body: bytes, request_id: str) -> Answer:
        assert path == ENDPOINTS[1]
        assert request_id
        number = json.loads(body)["n"]
        self.asked[number] += 1
        self.clients.append(client)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            hold = self.hold if number >= self.hold_from else None
            await (asyncio.sleep(0) if hold is None else hold.wait())
        finally:
            self.in_flight -= 1
        if self.script.get(number):
            return self.script[number].pop(0)
        if number == _BAD:
            return Answer(400, b'{"error":{"message":"no","code":"bad"}}', "bad")
        return Answer(200, b'{"answer":%d}' % number)


class House:
    """A server's files and batches, which can be left as a kill leaves them and opened again."""

    def __init__(self, folder: Path, max_bytes: int = 1 << 20, **options: Any) -> None:
        self.files = FileStore(str(folder), max_bytes)
        self.calls = Calls()
        self.clients: dict[str, Client | None] = {"a": Client("a"), "b": Client("b")}
        self.room = True
        self.now = 1000.0
        self.runner = BatchRunner(
            self.files,
            BatchStore(self.files),
            self.calls,
            lambda owner: self.clients[owner],
            lambda _client, _model: self.room,
            **{"concurrency": 3, "max_line": 10_000, "clock": lambda: self.now} | options,
        )

    async def create(self, owner: str = "a", content: bytes = rows(6)) -> BatchRecord:
        file = add(self.files, owner, content)
        return await self.runner.create(owner, ENDPOINTS[1], file.id, _DAY, {"for": "test"})

    async def ended(self, record: BatchRecord) -> BatchRecord:
        await until(lambda: self.find(record).ended)
        return self.find(record)

    def find(self, record: BatchRecord) -> BatchRecord:
        return self.runner.find(record.owner, record.id)

    def lines(self, owner: str, file_id: str | None) -> dict[str, Any]:
        """By custom_id; each may be there once."""
        if file_id is None:
            return {}
        found = [json.loads(line) for line in self.files.path(owner, file_id).read_bytes().splitlines()]
        assert len({each["custom_id"] for each in found}) == len(found)
        return {each["custom_id"]: each for each in found}

    async def close(self) -> None:
        tasks = list(self.runner._tasks)
        await self.runner.close()
        await asyncio.gather(*tasks, return_exceptions=True)  # what killed them is expected
        self.files.close()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def test_a_batch_is_answered_and_its_results_are_files(tmp_path: Path) -> None:
    async def scenario() -> None:
        house = House(tmp_path)
        created = await house.create()
        assert created.status == "validating"
        with pytest.raises(ApiError) as caught:
            house.files.delete("a", created.input_file_id)
        assert caught.value.status == 409
        record = await house.ended(created)
        shown = record.shown()
        assert (record.status, shown["request_counts"]) == ("completed", {"total": 6, "completed": 5, "failed": 1})
        assert shown["metadata"] == {"for": "test"}
        assert [shown[f"{each}_at"] for each in ("in_progress", "finalizing", "completed")] == [1000] * 3
        assert shown["failed_at"] is shown["cancelled_at"] is shown["errors"] is None
        output, errors = house.lines("a", record.output_file_id), house.lines("a", record.error_file_id)
        assert {name: each["response"]["body"]["answer"] for name, each in output.items()} == {
            f"row-{number}": number for number in range(6) if number != _BAD
        }
        assert errors[f"row-{_BAD}"]["response"]["status_code"] == 400
        assert set(house.calls.asked.values()) == {1}
        assert house.calls.most_in_flight <= 3
        house.files.delete("a", created.input_file_id)
        assert house.files.used("a") == sum(each.bytes for each in house.files.listed("a"))
        await until(lambda: not list(tmp_path.rglob("*.journal")))
        with pytest.raises(ApiError) as caught:
            house.runner.find("b", record.id)
        assert caught.value.status == 404
        assert not house.runner.listed("b")
        await house.close()

    run(scenario)


def test_a_file_that_holds_no_requests_fails_the_batch_with_its_line(tmp_path: Path) -> None:
    async def scenario() -> None:
        house = House(tmp_path)
        record = await house.ended(await house.create(content=rows(2) + b"oops\n"))
        assert record.status == "failed"
        (error,) = record.shown()["errors"]["data"]
        assert (error["line"], error["code"]) == (3, "invalid_json_line")
        assert not house.calls.asked
        with pytest.raises(ApiError) as caught:
            await house.runner.cancel("a", record.id)
        assert caught.value.status == 409
        await house.close()

    run(scenario)


def test_a_cancelled_batch_keeps_what_was_answered(tmp_path: Path) -> None:
    async def scenario() -> None:
        house = House(tmp_path)
        house.calls.hold, house.calls.hold_from = asyncio.Event(), 3
        record = await house.create()
        await until(lambda: house.find(record).completed + house.find(record).failed == 3)
        assert (await house.runner.cancel("a", record.id)).status in ("cancelling", "cancelled")
        ended = await house.ended(record)
        assert ended.status == "cancelled"
        assert house.lines("a", ended.output_file_id).keys() == {"row-0", "row-1"}
        errors = house.lines("a", ended.error_file_id)
        codes = {name: each["error"] and each["error"]["code"] for name, each in errors.items()}
        assert codes == {f"row-{_BAD}": None} | {f"row-{number}": "batch_cancelled" for number in (3, 4, 5)}
        assert (await house.runner.cancel("a", record.id)).status == "cancelled"
        await house.close()

    run(scenario)


def test_what_is_not_answered_in_time_has_expired(tmp_path: Path) -> None:
    async def scenario() -> None:
        house = House(tmp_path)
        house.calls.hold = asyncio.Event()
        record = await house.create()
        await until(lambda: house.calls.in_flight == 3)
        await house.close()
        later = House(tmp_path)
        later.now += 86401
        later.calls.hold = asyncio.Event()
        later.runner.start()
        ended = await later.ended(record)
        assert ended.status == "expired"
        assert ended.output_file_id is None
        errors = later.lines("a", ended.error_file_id)
        assert [each["error"]["code"] for each in errors.values()] == ["batch_expired"] * 6
        await later.close()

    run(scenario)


def test_what_passes_is_waited_for_and_what_does_not_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "_MAX_WAIT", 0.0)
    busy, late = Answer(429, b"{}", "queue_full", 5.0), Answer(429, b"{}", "deadline", 1.0)
    gone, withdrawn = Answer(503, b"{}", "engine_unavailable", 2.0), Answer(401, b"{}", "invalid_api_key")

    async def scenario() -> None:
        house = House(tmp_path)
        house.calls.script = {0: [busy] * 5, 1: [late], 3: [gone] * 2, 4: [gone] * 4, 5: [withdrawn]}
        record = await house.ended(await house.create())
        output, errors = house.lines("a", record.output_file_id), house.lines("a", record.error_file_id)
        assert set(output) == {"row-0", "row-3", "row-5"}
        assert {name: each["response"]["status_code"] for name, each in errors.items()} == {
            "row-1": 429, "row-2": 400, "row-4": 503}  # fmt: skip
        await house.close()

    run(scenario)


def test_rows_wait_for_room_and_for_their_key(tmp_path: Path) -> None:
    async def scenario() -> None:
        house = House(tmp_path)
        house.room = False
        record, other = await house.create("a"), await house.create("b")
        await until(lambda: house.find(record).status == house.find(other).status == "in_progress")
        client, house.clients["a"] = house.clients["a"], None
        house.room = True
        assert (await house.ended(other)).status == "completed"
        assert {each.name for each in house.calls.clients} == {"b"}
        house.clients["a"] = client
        assert (await house.ended(record)).status == "completed"
        await house.close()

    run(scenario)


def test_owners_divide_the_concurrency(tmp_path: Path) -> None:
    async def scenario() -> None:
        house = House(tmp_path, concurrency=4)
        house.calls.hold = asyncio.Event()
        first, second = await house.create("a", rows(50)), await house.create("a", rows(50))
        await until(lambda: house.calls.in_flight == 4)
        third = await house.create("b", rows(10))
        await until(lambda: house.find(third).status == "in_progress")  # on a busy machine, reading it takes a while
        house.calls.clients.clear()
        house.calls.hold.set()
        await house.ended(third)
        assert any(not house.find(each).ended for each in (first, second))
        assert house.calls.most_in_flight <= 6
        await house.close()

    run(scenario)


def test_a_batch_ends_when_its_answers_have_no_room(tmp_path: Path) -> None:
    async def scenario() -> None:
        content = rows(50)
        house = House(tmp_path, max_bytes=len(content) + 1000)
        record = await house.ended(await house.create(content=content))
        assert (record.status, record.errors[0]["code"]) == ("failed", "files_full")
        assert 0 < len(house.lines("a", record.output_file_id)) < 50
        await house.close()

    run(scenario)


def test_results_count_among_the_files_of_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_MAX_FILES", 3)

    async def scenario() -> None:
        house = House(tmp_path)
        record = await house.ended(await house.create())  # its input, its output and its errors
        for _ in range(2):  # the same input again would make more
            with pytest.raises(ApiError) as caught:
                await house.runner.create("a", ENDPOINTS[1], record.input_file_id, _DAY, None)
            assert (caught.value.status, caught.value.code) == (400, "files_full")
        assert (await house.ended(await house.create("b"))).status == "completed"
        assert record.error_file_id is not None
        house.files.delete("a", record.error_file_id)
        assert (await house.runner.create("a", ENDPOINTS[1], record.input_file_id, _DAY, None)).status == "validating"
        await house.close()

    run(scenario)


def test_a_disk_that_fails_for_a_while_delays_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_RETRY_SECONDS", 0.0)

    async def scenario() -> None:
        house = House(tmp_path)
        save, left = house.runner._store.save, [3]

        def failing(record: BatchRecord) -> BatchRecord:
            if record.status in ("in_progress", "completed") and left[0]:
                left[0] -= 1
                raise OSError("no space")
            return save(record)

        monkeypatch.setattr(house.runner._store, "save", failing)
        assert (await house.ended(await house.create())).status == "completed"
        assert left == [0]
        await house.close()

    run(scenario)


@pytest.mark.parametrize("cancels", [False, True])
def test_a_kill_at_any_write_loses_and_repeats_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancels: bool
) -> None:
    async def until_killed(house: House, disk: KilledDisk) -> BatchRecord | None:
        """Run until the end or the kill. The record of which the client knows."""
        try:
            record = await house.create(content=rows(4))
            if cancels:
                await until(lambda: disk.dead or house.find(record).status != "validating")
                if not disk.dead and house.find(record).status == "in_progress":
                    with contextlib.suppress(ApiError):  # it was faster
                        await house.runner.cancel("a", record.id)
        except KilledError:
            return None
        await until(lambda: disk.dead or house.find(record).ended)
        return record

    async def scenario(folder: Path, disk: KilledDisk) -> None:
        house = House(folder)
        with monkeypatch.context() as patched:
            disk.use(patched)
            told = await until_killed(house, disk)
            await house.close()
        journals = list(folder.rglob("*.journal"))
        kept = {json.loads(line)["custom_id"] for path in journals for line in path.read_bytes().splitlines(True)
                if line.endswith(b"\n")}  # fmt: skip
        again = House(folder)
        again.runner.start()
        records = again.runner.listed("a")
        assert told is None or told.id in [each.id for each in records]
        for each in records:
            record = await again.ended(each)
            assert record.status in (("completed", "cancelled") if cancels else ("completed",))
            output, errors = again.lines("a", record.output_file_id), again.lines("a", record.error_file_id)
            assert not {*output} & {*errors}
            if record.total:
                assert {*output, *errors} == {f"row-{number}" for number in range(4)}
            assert (record.completed, record.status == "cancelled" or record.failed == 1) == (len(output), True)
        assert not kept & {f"row-{number}" for number in again.calls.asked}
        assert again.files.used("a") == sum(each.bytes for each in again.files.listed("a"))
        assert not again.files.held
        await until(lambda: not list(folder.rglob("*.journal")))
        await again.close()

    monkeypatch.setattr(runner_module, "_RETRY_SECONDS", 0.01)  # a thread of the killed one may still close its journal
    for number in range(200):
        disk = KilledDisk(number)
        asyncio.run(scenario(tmp_path / str(number), disk))
        if not disk.dead:
            return
    pytest.fail("more writes than expected")


def test_only_the_ways_of_the_status_machine_are_open() -> None:
    record = BatchRecord("batch_1", "a", ENDPOINTS[0], "file-1", "24h", 0, 86400)
    for ended in ENDED:
        assert not record.may_enter(ended) or ended == "failed"
    running = record.enter("in_progress", 5.0)
    with pytest.raises(AssertionError):
        running.enter("completed", 6.0)
    done = running.enter("finalizing", 6.0, ending="completed").enter("completed", 7.0)
    assert done.ended
    assert not any(done.may_enter(status) for status in ("cancelling", "in_progress", "finalizing"))
    assert record.result_id("output") != record.result_id("error")
