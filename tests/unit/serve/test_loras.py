"""Adapters as models: what a key sees, where files may come from, and how many labels metrics get."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokenmill.config import EngineConfig
from tokenmill.engine.messages import AdapterAnswer, AdapterInfo, LoadAdapter, Ready, UnloadAdapter
from tokenmill.engine.stats import EngineStats
from tokenmill.errors import UserError
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.errors import ApiError, engine_gone
from tokenmill.serve.loras import OTHER, Loras
from tokenmill.serve.metrics import Metrics
from tokenmill.serve.server import with_adapters
from tokenmill.serve.supervision.adapter_questions import AdapterQuestions, Question, replacement_config
from tokenmill.serve.tenants.key_file import read_keys
from tokenmill.serve.tenants.keys import Client
from tokenmill.types import AdapterRef


def info(name: str) -> AdapterInfo:
    return AdapterInfo(name, f"/srv/{name}", name.encode().ljust(32), 8, 100)


class Engine:
    """Answers every question at once: adapters whose path ends in `bad` do not fit."""

    def __init__(self, *names: str) -> None:
        self.asked: list[Question] = []
        self.adapters = AdapterQuestions(self.ask)
        self.adapters.by_name = {name: info(name) for name in names}

    def ask(self, question: Question) -> None:
        self.asked.append(question)
        if isinstance(question, UnloadAdapter):
            busy = question.name == "busy" and not question.drains
            code = "adapter_in_use" if busy else ""
            answer = AdapterAnswer(question.number, None, "in use by 2 requests" if busy else "", code)
        elif question.path.endswith("bad"):
            answer = AdapterAnswer(question.number, None, "does not fit base 'm'")
        else:
            answer = AdapterAnswer(question.number, info(question.name))
        asyncio.get_running_loop().call_soon(self.adapters.take, answer)


def make(engine: Engine, tmp_path: Path | None = None, **options: Any) -> Loras:
    folders = (str(tmp_path),) if tmp_path is not None else ()
    return Loras(("m",), engine, Metrics("m"), ServeConfig(lora_dir=folders, **options))  # type: ignore[arg-type]


def refusal(work: Any) -> tuple[int, str]:
    with pytest.raises(ApiError) as caught:
        asyncio.run(work)
    return caught.value.status, caught.value.code or ""


def test_what_a_key_may_not_use_does_not_exist_for_it() -> None:
    loras = make(Engine("sql", "team-a", "team-b"))
    some = Client("some", loras=("team-*",))
    assert [each.name for each in loras.visible_to(some)] == ["team-a", "team-b"]
    assert [each.name for each in loras.visible_to(Client("all"))] == ["sql", "team-a", "team-b"]
    assert loras.find("team-a", some) == AdapterRef("team-a", b"team-a".ljust(32))
    assert loras.find("m", some) is None
    assert loras.find(None, some) is None
    errors = []
    for name in ("sql", "nothing"):
        with pytest.raises(ApiError) as caught:
            loras.find(name, some)
        errors.append((caught.value.status, caught.value.message.replace(name, "")))
    assert errors[0] == errors[1]
    assert errors[0][0] == 404


def test_rights_come_from_the_keys_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys: [{key: a, loras: [x, 'y-*']}, {key: b, loads_loras: true}]")
    (_, first), (_, second) = read_keys((), str(file))
    for client in (first, second):
        client.share_with(2)
    assert (first.loras, first.may_use("y-1"), first.may_use("z"), first.changes_loras) == (
        ("x", "y-*"),
        True,
        False,
        False,
    )
    assert (second.loras, second.may_use("z"), second.changes_loras) == (None, True, True)
    file.write_text("keys: [{key: a, loras: x}]")
    with pytest.raises(UserError, match="wrong type: loras"):
        read_keys((), str(file))


def test_files_come_from_the_operators_directories_only(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside / "sql", inside / "bad", outside / "sql"):
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
    (inside / "away").symlink_to(outside / "sql")
    (inside / "mixed").mkdir()
    (inside / "mixed" / "adapter_config.json").symlink_to(outside / "sql" / "adapter_config.json")
    engine = Engine()
    loras = make(engine, inside)
    client = Client()
    for path in ("sql", str(inside / "sql"), "sql/../sql"):
        assert asyncio.run(loras.load("x", path, True, client)).name == "x"
    assert {question.path for question in engine.asked if isinstance(question, LoadAdapter)} == {str(inside / "sql")}
    engine.asked.clear()
    for path, status in (
        (str(outside / "sql"), 403),
        ("/nowhere", 403),
        ("../out/sql", 404),
        ("away", 404),
        ("mixed", 403),
        ("nothing", 404),
    ):
        assert refusal(loras.load("x", path, True, client))[0] == status, path
    assert not engine.asked
    assert refusal(loras.load("x", "bad", False, client))[0] == 400
    assert refusal(loras.load("m", "sql", False, client))[0] == 400
    assert refusal(loras.load("a=b", "sql", False, client))[0] == 400


def test_only_those_with_the_right_change_adapters(tmp_path: Path) -> None:
    among = Client("among")
    among.share_with(2)
    assert refusal(make(Engine("a"), tmp_path).unload("a", False, among)) == (403, "lora_right")
    assert refusal(make(Engine("a")).unload("a", False, Client())) == (403, "lora_dir")
    loader = Client("loader", loads_loras=True)
    loader.share_with(2)
    engine = Engine("a", "busy")
    loras = make(engine, tmp_path)
    asyncio.run(loras.unload("a", False, loader))
    assert list(engine.adapters.by_name) == ["busy"]
    assert refusal(loras.unload("a", False, loader))[0] == 404
    assert refusal(loras.unload("busy", False, loader)) == (409, "adapter_in_use")
    assert list(engine.adapters.by_name) == ["busy"]
    asyncio.run(loras.unload("busy", True, loader))
    assert not engine.adapters.by_name


def test_who_loads_adapters_touches_none_of_others(tmp_path: Path) -> None:
    (tmp_path / "sql").mkdir()
    loader = Client("loader", loads_loras=True, loras=("team-*",))
    loader.share_with(2)
    engine = Engine("other")
    loras = make(engine, tmp_path)
    assert refusal(loras.load("other", "sql", True, loader)) == (403, "lora_right")
    assert refusal(loras.unload("other", True, loader)) == refusal(loras.unload("nothing", True, loader))
    assert not engine.asked
    assert asyncio.run(loras.load("team-a", "sql", True, loader)).name == "team-a"


def test_an_adapter_has_a_name_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "sql").mkdir()
    engine = Engine()
    loras = make(engine, tmp_path)
    loras.is_taken = lambda name: name == "two"
    for name in ("m", "m:latest", "two"):
        assert refusal(loras.load(name, "sql", True, Client()))[0] == 400, name
    assert not engine.asked


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "/" + "x" * 300])
def test_a_path_that_no_system_takes_is_not_found(tmp_path: Path, path: str) -> None:
    assert refusal(make(Engine(), tmp_path).load("x", path, True, Client()))[0] in (403, 404)


def test_an_answer_counts_also_if_nobody_waits_for_it() -> None:
    async def scenario() -> AdapterQuestions:
        asked: list[Question] = []
        questions = AdapterQuestions(asked.append)
        loading = asyncio.ensure_future(questions.load("a", "/a", False))
        await asyncio.sleep(0)
        loading.cancel()
        await asyncio.sleep(0)
        questions.take(AdapterAnswer(asked[0].number, info("a")))
        waiting = asyncio.ensure_future(questions.load("b", "/b", False))
        await asyncio.sleep(0)
        questions.fail(engine_gone("killed"))
        with pytest.raises(ApiError, match="killed"):
            await waiting
        return questions

    questions = asyncio.run(scenario())
    assert questions.paths() == {"a": "/srv/a"}


def test_a_replaced_engine_has_the_same_memory_and_starts_whatever_became_of_the_files() -> None:
    config = EngineConfig(lora=("a=/a",))
    ready = Ready(1, [], {"max_lora_rank": 8}, "", "", "", 0, 0.0, [info("a")])
    assert replacement_config(config, None) is config
    again = replacement_config(config, ready)
    assert (again.lora, again.serves_adapters, again.max_lora_rank) == ((), True, 8)


def test_the_number_of_labels_is_bounded() -> None:
    loras = make(Engine(), max_metric_loras=2)
    output = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1, 2])], prompt_token_ids=[1, 2, 3])
    for name in ("a", "b", "c", "d", "a"):
        request = SimpleNamespace(adapter=AdapterRef(name, b""))
        loras.on_end(SimpleNamespace(request=request, first_token=1.0, output=output))  # type: ignore[arg-type]
    assert loras._metrics._values["adapter_requests"] == {("a",): 2.0, ("b",): 1.0, (OTHER,): 2.0}
    assert loras._metrics.get("adapter_generation_tokens") == 10


def test_the_adapters_of_this_moment_are_one_line() -> None:
    metrics = Metrics("m")
    metrics.max_loras = 4
    for number in range(5):
        metrics.on_step(EngineStats(running_adapters=["a", str(number)], waiting_adapters=["z"]))
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith("vllm:lora_requests_info{")]
    assert len(lines) == 1
    assert 'running_lora_adapters="a,4"' in lines[0]
    assert 'waiting_lora_adapters="z"' in lines[0]


def test_a_directory_to_load_from_must_exist(tmp_path: Path) -> None:
    assert with_adapters(ServeConfig(lora_dir=(str(tmp_path),)), EngineConfig()).serves_adapters
    assert not with_adapters(ServeConfig(), EngineConfig()).serves_adapters
    with pytest.raises(UserError, match="is not a directory"):
        with_adapters(ServeConfig(lora_dir=("/nowhere",)), EngineConfig())
