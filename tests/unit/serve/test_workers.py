"""Text workers with real child processes: what hangs, crashes or exhausts one ends alone; keys take turns."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tokenmill.serve.errors import ApiError
from tokenmill.serve.tenants.keys import Client
from tokenmill.serve.workers import jobs
from tokenmill.serve.workers.jobs import Accepted, CheckGrammar, Encode, Encoded, Rejected, Render, Rendered, Setup
from tokenmill.serve.workers.pool import WorkerPool
from tokenmill.serve.workers.process import WorkerProcess
from tokenmill.serve.workers.text import TextWork
from tokenmill.types import StructuredSpec

_DOUBLE = (
    "{% set ns = namespace(a=[1], b=[1]) %}"
    "{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)
# Few steps each, and any of them would run or grow for ever: only the process can be ended.
_HOSTILE = {
    "compare": _DOUBLE + "{{ ns.a == ns.b }}",
    "order": _DOUBLE + "{{ ns.a < ns.b }}",
    "dump": _DOUBLE + "{{ ns.a | tojson }}",
    "print": _DOUBLE + "{{ ns.a }}",
    "contain": _DOUBLE + "{{ ns.a in [ns.b] }}",
    "sort": _DOUBLE + "{{ [ns.a, ns.b, ns.a] | sort }}",
    "loop": "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "recurse": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}
# Gigabytes of text, but only for long messages.
_GROW = (
    "{% set ns = namespace(a=[]) %}"
    "{% for i in range(40000) %}{% set ns.a = ns.a + [messages[0].content ~ i] %}{% endfor %}"
)
_TEMPLATE = (
    "".join(
        f"{{% {'elif' if number else 'if'} messages[0].role == '{role}' %}}{source}"
        for number, (role, source) in enumerate({**_HOSTILE, "grow": _GROW}.items())
    )
    + "{% else %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% endif %}"
)
_CHAIN = "start: T0\n" + "".join(f'T{n}: "a" T{n + 1}\n' for n in range(3500)) + 'T3500: "b"\n'
_QUICK = Encode(["hi"])
_LARGE = "x" * (1 << 17)  # makes a job heavy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes, and a template that does what the first role says."""
    folder = tmp_path_factory.mktemp("model")
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "</s>"]
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": _TEMPLATE}))
    return folder


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renderings get little time, so that tests of what hangs are short."""
    monkeypatch.setitem(jobs.MAX_SECONDS, Render, 0.3)


def _run(
    model: Path,
    test: Callable[[WorkerPool], Awaitable[None]],
    num_workers: int = 1,
    max_queued: int = 64,
    memory: int = 1 << 30,
) -> None:
    async def main() -> None:
        pool = WorkerPool(Setup(str(model), memory, "error"), num_workers, max_queued)
        try:
            await pool.run(_QUICK, Client("first"))  # a worker is there
            await test(pool)
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(main(), 120))


def _say(role: str, content: str = "hello") -> Render:
    return Render([{"role": role, "content": content}])


async def _started(*works: Awaitable[Any]) -> list[asyncio.Future[Any]]:
    """As tasks that are queued or run already."""
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.sleep(0)
    return tasks


def test_each_kind_of_job_answers(model: Path) -> None:
    async def test(pool: WorkerPool) -> None:
        client = Client("a")
        rendered = await pool.run(_say("user"), client)
        assert isinstance(rendered, Rendered)
        assert rendered.text == "<user>hello"
        encoded = await pool.run(Encode(["ab", "", "b" * 100_000]), client)
        assert isinstance(encoded, Encoded)
        assert [len(ids) for ids in encoded.token_ids] == [2, 0, 100_000]
        assert isinstance(await pool.run(CheckGrammar("regex", "[ab]{3}"), client), Accepted)
        refused = await pool.run(CheckGrammar("regex", "(?=a)b"), client)
        assert isinstance(refused, Rejected)
        assert "look-around" in refused.message
        assert isinstance(await pool.run(Render([]), client), Rejected)
        assert isinstance(await pool.run(_say("user", "\ud800"), client), Rejected)  # cannot even be sent
        assert pool.num_replaced == 0

    _run(model, test)


@pytest.mark.usefixtures("short")
def test_every_hostile_template_ends_and_the_next_job_runs(model: Path) -> None:
    async def test(pool: WorkerPool) -> None:
        for role in _HOSTILE:
            result = await pool.run(_say(role), Client("a"))
            assert isinstance(result, Rejected), role
            assert isinstance(await pool.run(_say("user"), Client("b")), Rendered), role
        assert pool.num_replaced > 0

    _run(model, test, memory=1 << 28)


def test_a_grammar_that_crashes_the_compiler_is_refused_once_for_all(model: Path) -> None:
    async def test(pool: WorkerPool) -> None:
        text, spec = TextWork(pool), StructuredSpec("grammar", _CHAIN)
        for client in (Client("a"), Client("a"), Client("b")):
            with pytest.raises(ApiError, match="crashed the compiler") as error:
                await text.check_grammar(spec, client)
            assert (error.value.status, error.value.param) == (400, "response_format")
        assert pool.num_replaced == 1
        await text.check_grammar(StructuredSpec("json_schema", '{"type": "object"}'), Client("a"))

    _run(model, test)


def test_what_is_too_large_is_not_even_sent(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(pool: WorkerPool) -> None:
        async def refuse(*_arguments: Any) -> None:
            raise AssertionError("a job was sent")

        monkeypatch.setattr(pool, "run", refuse)
        text = TextWork(pool)
        with pytest.raises(ApiError, match="at most"):
            await text.check_grammar(StructuredSpec("regex", "a" * 20_000), Client("a"))
        await text.check_grammar(StructuredSpec("json_object"), Client("a"))  # nothing to check
        await text.check_grammar(StructuredSpec("choice", choices=("yes", "no")), Client("a"))

    _run(model, test)


def test_a_job_beyond_the_memory_limit_ends_alone(model: Path) -> None:
    async def test(pool: WorkerPool) -> None:
        result = await pool.run(_say("grow", "x" * 50_000), Client("a"))
        assert isinstance(result, Rejected)
        assert "emory" in result.message
        assert isinstance(await pool.run(_say("user"), Client("a")), Rendered)

    _run(model, test, memory=1 << 28)


def test_a_checkpoint_larger_than_the_memory_limit_is_read(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    """A mapped file counts as private memory while the tokenizer is read from it, and not after that."""
    large = tmp_path / "large.gguf"
    shutil.copyfile(model_path("smollm2"), large)
    os.truncate(large, 4 << 30)  # sparse

    async def test(pool: WorkerPool) -> None:
        assert isinstance(await pool.run(_QUICK, Client("a")), Encoded)

    _run(large, test)


def test_keys_take_turns(model: Path) -> None:
    async def test(pool: WorkerPool) -> None:
        order: list[str] = []

        async def work(name: str) -> None:
            await pool.run(_QUICK, Client(name))
            order.append(name)

        await asyncio.gather(*await _started(*(work("flood") for _ in range(20)), work("polite")))
        assert "polite" in order[:3]

    _run(model, test)


def test_heavy_jobs_leave_a_worker_for_quick_ones(model: Path) -> None:
    async def test(pool: WorkerPool) -> None:
        heavy = await _started(*(pool.run(_say("compare", _LARGE), Client(f"key {n}")) for n in range(4)))
        assert isinstance(await pool.run(_QUICK, Client("polite")), Encoded)
        assert not any(each.done() for each in heavy)
        for each in heavy:
            each.cancel()

    _run(model, test, num_workers=2)


@pytest.mark.usefixtures("short")
def test_a_cancelled_caller_frees_its_place(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    work = WorkerPool._work

    async def recorded(pool: WorkerPool, worker: Any, pending: Any) -> None:
        await work(pool, worker, pending)
        ran.append(pending.client.name)

    monkeypatch.setattr(WorkerPool, "_work", recorded)

    async def test(pool: WorkerPool) -> None:
        ran.clear()
        busy, *waiting = await _started(
            pool.run(_say("compare"), Client("busy")), *(pool.run(_QUICK, Client("a")) for _ in range(2))
        )
        with pytest.raises(ApiError, match="waiting") as error:
            await pool.run(_QUICK, Client("a"))
        assert (error.value.status, error.value.retry_after) == (429, 1)
        waiting[0].cancel()
        (late,) = await _started(pool.run(_QUICK, Client("a")))
        assert isinstance(await pool.run(_QUICK, Client("b")), Encoded)  # another key has a queue of its own
        busy.cancel()
        assert isinstance(await waiting[1], Encoded)
        assert isinstance(await late, Encoded)
        assert sorted(ran) == ["a", "a", "b", "busy"]  # not the one that was cancelled in the queue

    _run(model, test, max_queued=2)


def test_requests_with_one_new_grammar_wait_for_one_check(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[str] = []
    monkeypatch.setattr(Client, "charge_grammar", lambda client, _seconds, _now: checks.append(client.name))

    async def test(pool: WorkerPool) -> None:
        text, spec = TextWork(pool), StructuredSpec("regex", "[a-f]{2}")
        first, *others = await _started(*(text.check_grammar(spec, Client("a")) for _ in range(5)))
        first.cancel()  # another of them takes over
        await asyncio.gather(*others)
        await text.check_grammar(spec, Client("b"))
        assert 1 <= len(checks) <= 2

    _run(model, test)


def test_a_worker_ends_with_its_pipe(model: Path) -> None:
    async def main() -> None:
        worker = await WorkerProcess.start(Setup(str(model), 1 << 30, "error"))
        worker._stdin.close()
        assert await worker._process.wait() == 0

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_worker_that_cannot_start_is_an_error_with_the_reason(tmp_path: Path) -> None:
    async def main() -> None:
        pool = WorkerPool(Setup(str(tmp_path), 1 << 30, "error"), 1, 8)
        with pytest.raises(ApiError, match=r"tokenizer\.json") as error:
            await pool.run(_QUICK, Client("a"))
        assert error.value.status == 503
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))
