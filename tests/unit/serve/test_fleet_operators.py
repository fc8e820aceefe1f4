"""Models that operators give up: none with requests, none halfway, whoever leaves meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.serve.test_fleet import Site, run, until
from tokenmill.checkpoint.sources.aliases import load_aliases
from tokenmill.checkpoint.sources.cache import model_folder
from tokenmill.serve.api.ollama_models import _is_served
from tokenmill.serve.fleet.host import LOADED, UNLOADED


def test_two_operators_give_up_no_model_with_requests() -> None:
    async def scenario(site: Site) -> None:
        a = site.hosts[0]
        async with site.fleet._moving:  # another model is being loaded
            first = asyncio.create_task(site.fleet.sleep(a, level=2))
            second = asyncio.create_task(site.fleet.sleep(a, level=2))
            await until(lambda: a.held == 2)
            second.cancel()  # its operator has left
            await until(second.done)
            assert not a.usable
            a.leases += 1  # a request that came in between
        for _ in range(10):
            await asyncio.sleep(0)
        assert a.state == LOADED
        a.leases -= 1
        assert await first == UNLOADED

    run(Site(None, "a"), scenario)


def test_a_move_whose_operator_has_left_is_completed() -> None:
    async def scenario(site: Site) -> None:
        a, going = site.hosts[0], asyncio.Event()
        engine: Any = a.service and a.service.engine
        stop = engine.stop

        async def stop_later(timeout: float) -> None:
            await going.wait()
            await stop(timeout)

        engine.stop = stop_later
        sleeping = asyncio.create_task(site.fleet.sleep(a, level=2))
        await until(lambda: bool(a.moving))
        sleeping.cancel()
        await until(sleeping.done)
        going.set()
        await until(lambda: not a.moving)
        assert a.state == UNLOADED
        assert site.opener.log == ["a load", "a stop"]

    run(Site(None, "a"), scenario)


def test_a_served_model_is_known_by_every_name_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    alias = next(each for each in load_aliases().values() if each.also)
    folder = tmp_path / "hub/models--org--name"
    weights = folder / "blobs/1"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"")
    snapshot = folder / "snapshots/2"
    snapshot.mkdir(parents=True)
    (snapshot / "model.gguf").symlink_to(weights)
    site = Site(None, "a")
    (host,) = site.hosts
    host.spec = replace(host.spec, source=alias.name)
    host.path = model_folder(alias) / alias.file
    assert all(_is_served(site.fleet, name) for name in ("a", alias.name, *alias.also))
    assert not _is_served(site.fleet, "org/name")
    host.path = snapshot / "model.gguf"
    assert _is_served(site.fleet, "org/name")
    assert not _is_served(site.fleet, "nothing")
