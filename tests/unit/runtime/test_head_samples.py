"""Calibration of KV codes: which tokens are computed, what stores are told of them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenmill import LLM
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import build_layout
from tokenmill.model.kvstore.head_sample import HeadSample
from tokenmill.model.kvstore.kvquant import KVQuant3Store
from tokenmill.model.loader import load_model
from tokenmill.resolution import resolve
from tokenmill.runtime.observation import head_samples
from tokenmill.runtime.observation.head_samples import _sequences, calibrate_store
from tokenmill.runtime.observation.key_conditioning import MeasuringOps

CPU = torch.device("cpu")


class _Remembering(KVQuant3Store):
    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.told: dict[tuple[int, int], HeadSample] = {}

    def calibrate(self, group: int, slot: int, sample: HeadSample) -> None:
        self.told[group, slot] = sample


def test_first_tokens_then_text_from_all_over() -> None:
    ids = list(range(100, 5100))
    plain = _sequences(ids, [], 256)
    assert [len(each) for each in plain] == [1] * 64 + [256] * 8
    assert len({each[0] for each in plain[:64]}) == 64
    assert (plain[64][0], plain[-1][-1]) == (100, 5099)
    begun = _sequences(ids, [1], 256)
    assert begun[0] == [1]
    assert {each[0] for each in begun[65:]} == {1}
    assert {len(each) for each in begun[65:]} == {256}


@pytest.fixture
def without_tokenizer(model_path: Callable[[str], Path], tmp_path: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(model_path("stories15m") / name)
    return tmp_path


def told(path: Path, kernels: str = "", batch_tokens: int = 512) -> dict[tuple[int, int], HeadSample]:
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint, CPU, 128, kernels)
    store = _Remembering(build_layout(model.decoder.kv_layers(), 8), 2, CPU)
    config = resolve(EngineConfig(context=128, batch_tokens=batch_tokens, kernels=kernels))
    calibrate_store(store, model, config, checkpoint, 128)
    return store.told


def test_every_layer_is_told_of(model_path: Callable[[str], Path]) -> None:
    """A model of six layers, six heads of 48, and a token that begins every text."""
    found = told(model_path("stories15m"))
    assert sorted(found) == [(0, slot) for slot in range(6)]
    sample = found[0, 3]
    assert sample.begins
    assert sample.keys.shape == (2048 - 16, 6, 48)
    assert sample.value_mean.shape == (6, 48)
    assert sample.first_keys.shape == sample.first_values.shape == (65, 6, 48)
    assert sample.rotary is not None
    eigenvalues = torch.linalg.eigvalsh(sample.query_moment)
    assert bool((eigenvalues > -1e-9 * eigenvalues.amax()).all())


def test_no_more_tokens_at_once_than_the_engine_may_compute(
    model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured is the same, whether texts and first tokens are computed whole or in parts."""
    for name, value in (("_TOKENS", 64), ("_LENGTH", 32), ("_FIRSTS", 4)):
        monkeypatch.setattr(head_samples, name, value)
    counts: list[int] = []

    def count(ops: MeasuringOps, *arguments: Any) -> None:
        begin(ops, *arguments)
        counts.append(len(ops._batch.token_ids))

    begin = MeasuringOps.__init__
    monkeypatch.setattr(MeasuringOps, "__init__", count)
    found = {}
    for most in (512, 10, 1):
        found[most] = told(model_path("stories15m"), "ref", most)
        assert (max(counts), sum(counts)) == (min(most, 32), 5 + 64)
        counts.clear()
    for place, whole in found[512].items():
        for parts in (found[10][place], found[1][place]):
            for name in ("keys", "value_mean", "first_keys", "first_values", "query_moment"):
                torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-3, atol=1e-4)


def test_a_model_without_tokenizer(without_tokenizer: Path, caplog: pytest.LogCaptureFixture) -> None:
    sample = told(without_tokenizer)[0, 3]
    assert "made-up tokens" in caplog.text
    assert not sample.begins
    assert sample.first_keys.shape == (64, 6, 48)


def test_wrong_options(model_path: Callable[[str], Path], without_tokenizer: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("too short")
    spoken = model_path("stories15m")
    for model, dtype, name, problem in (
        (spoken, "int8", text, "not calibrated"),
        (spoken, "kvquant3", text, "tokens, calibration needs 2048"),
        (spoken, "kvquant3", tmp_path / "none", "cannot read"),
        (without_tokenizer, "kvquant3", text, "no tokenizer"),
    ):
        with pytest.raises(UserError, match=problem):
            LLM(model, kv_cache_dtype=dtype, kv_calibration=str(name), context=64)
    with pytest.raises(UserError, match="the context is 1"):
        LLM(spoken, kv_cache_dtype="kvquant3", context=1)


def test_stated_memory_holds_codes_and_pages(model_path: Callable[[str], Path]) -> None:
    stated = 4 << 20
    path = model_path("stories15m")
    with LLM(path, kv_cache_dtype="kvquant3", context=64, concurrency=64, memory=stated) as llm:
        budget, store = llm.parts.runtime.budget, llm.parts.runtime.store
    assert stated - budget.page_bytes < budget.nbytes <= stated
    pages = budget.num_pages * budget.page_bytes
    assert 6 * 6 * 4 * 48 * 48 * 4 < store.nbytes - pages <= stated - pages


def test_own_text_gives_other_codes(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"{number} times {number} is {number * number}." for number in range(1500)))

    def meaning(**options: str) -> str:
        with LLM(model_path("stories15m"), kv_cache_dtype="kvquant3", context=64, concurrency=1, **options) as llm:
            return llm.parts.runtime.store.meaning()

    assert meaning() != meaning(kv_calibration=str(text))
