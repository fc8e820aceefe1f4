"""An engine that slept computes what it computed before, and gave its memory back meanwhile."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.tiny_models import make, write_tokenizer
from tokenmill.config import EngineConfig
from tokenmill.engine.build import EngineParts, build_engine
from tokenmill.engine.loop import EngineLoop
from tokenmill.errors import UserError
from tokenmill.kernels import cpu
from tokenmill.kernels.host import address
from tokenmill.runtime.sleeping import SleepingRuntime
from tokenmill.types import Request, SamplingParams, TokenEvent

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is given back on Linux only")


class Answers:
    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def on_events(self, events: list[TokenEvent]) -> None:
        for event in events:
            self.token_ids += event.token_ids

    def on_refused(self, request_id: str, error: UserError) -> None:
        raise AssertionError(request_id, error)


def answer(parts: EngineParts, name: str) -> list[int]:
    answers = Answers()
    loop = EngineLoop(parts.core, answers)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    loop.submit(Request(name, list(range(3, 40)), params))
    loop.drain()
    return answers.token_ids


def in_memory(array: Any) -> int:
    """Pages of memory behind an array or tensor that are resident."""
    page, start = mmap.PAGESIZE, address(array)
    first = -(-start // page) * page
    count = (start + array.nbytes - first) // page
    if count <= 0:
        return 0
    seen = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(count * page), seen) == 0
    return sum(each & 1 for each in seen)


@pytest.mark.parametrize(("family", "tensors"), [("llama", False), ("gemma3", False), ("llama", True)])
def test_sleep_and_wake_change_no_token(
    family: str, tensors: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    make(family, tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    parts = build_engine(tmp_path / "model", EngineConfig(device="cpu", context=64, concurrency=4), tensors)
    sleeping = SleepingRuntime(parts.runtime)
    assert not sleeping.declines
    expected = answer(parts, "before")
    assert len(expected) == 12
    pages = parts.runtime.store.page_tensors()
    for number in range(3):  # the file is written once, and read each time
        assert sum(map(in_memory, pages)) > 0
        parts.kv.clear()
        sleeping.sleep()
        assert sleeping.asleep
        assert sum(map(in_memory, pages)) == 0
        sleeping.wake()
        assert not sleeping.asleep
        assert answer(parts, f"after {number}") == expected
        parts.kv.check()
    assert not any((tmp_path / "cache").iterdir())  # the file has no name


def test_parked_weights_are_gone_until_they_are_read_back(tmp_path: Path) -> None:
    if cpu.unavailable(torch.device("cpu")) is not None:
        pytest.skip("the C++ kernels are not built")
    module = cpu.module()
    stored = torch.randn(64, 64)
    packed = module.PackedLinear("F32", stored.contiguous().view(torch.uint8), 64, 64, "", False)
    x, before, after = torch.randn(3, 64), torch.empty(3, 64), torch.empty(3, 64)
    module.linear(cpu.pool(), x, [packed], [None], [before])
    with (tmp_path / "parked").open("w+b") as file:
        num_bytes = module.park_weights(file.fileno())
        if not num_bytes:
            pytest.skip("a sanitized build parks nothing")
        assert module.unpark_weights(file.fileno()) == num_bytes
    module.linear(cpu.pool(), x, [packed], [None], [after])
    assert torch.equal(before, after)


def test_weights_that_cannot_be_written_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("llama", tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    parts = build_engine(tmp_path / "model", EngineConfig(device="cpu", context=64, concurrency=4))
    expected = answer(parts, "before")
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("TOKENMILL_CACHE", str(blocked / "cache"))
    sleeping = SleepingRuntime(parts.runtime)
    parts.kv.clear()
    with pytest.raises(UserError, match="TOKENMILL_CACHE"):
        sleeping.sleep()
    sleeping.wake()
    assert answer(parts, "after") == expected
