"""The logit cache: what the code costs in divergence, round trips through the file, and files of others."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tokenmill.errors import UserError
from tokenmill.evaluate import reference_cache
from tokenmill.evaluate.identity import model_hash, windows_hash
from tokenmill.evaluate.logit_codec import decode, encode
from tokenmill.evaluate.reference import CachedReference
from tokenmill.evaluate.reference_cache import CacheKey, ReferenceCache, cache_path, is_cache, make_room, new_cache
from tokenmill.evaluate.windows import Window

WIDTH = 3000
WINDOWS = [Window([5, 6, 7, 8], 2), Window([9, 10, 11, 12, 13], 2)]


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def logprobs(rows: int, sharpness: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)).log_softmax(-1)


def key(rows: int = 5) -> CacheKey:
    return CacheKey("some-model", "a" * 64, windows_hash(WINDOWS), "numerics", rows, WIDTH)


def write(path: Path, values: torch.Tensor, targets: torch.Tensor) -> None:
    with new_cache(path, key(len(values))) as writer:
        writer.write(2, values[2:], targets[2:])
        writer.write(0, values[:2], targets[:2])


@pytest.mark.parametrize("sharpness", [0.01, 1.0, 4.0, 12.0])
def test_the_code_changes_a_divergence_by_some_millionths_at_most(sharpness: float) -> None:
    reference, candidate = logprobs(8, sharpness), (logprobs(8, sharpness) * 1.02).log_softmax(-1)
    kept = decode(*encode(reference, torch.zeros(8, dtype=torch.int64)))
    exact = (reference.exp() * (reference - candidate)).sum(-1)
    found = (kept.exp() * (kept - candidate)).sum(-1)
    assert float((found - exact).abs().max()) < 5e-6
    itself = (kept.exp() * (kept - reference)).sum(-1)
    assert float(itself.min()) >= -1e-12
    assert float(itself.max()) < 1e-6


def test_a_row_without_preference_is_kept() -> None:
    flat = torch.full((1, 10), 0.1, dtype=torch.float64).log()
    assert torch.allclose(decode(*encode(flat, torch.tensor([3]))), flat, atol=1e-12)


def test_round_trip_with_exact_targets_and_top_tokens(tmp_path: Path) -> None:
    values, targets = logprobs(5, 3.0), torch.tensor([0, 7, 2999, 1, 4])
    path = tmp_path / "reference.logits"
    write(path, values, targets)
    cache = ReferenceCache(path)
    assert cache.key == key()
    assert path.stat().st_size == cache.key.nbytes
    found, exact, best = cache.read(1, 5)
    assert float((found.exp() - values[1:].exp()).abs().max()) < 1e-5
    assert exact.tolist() == values.gather(-1, targets[:, None])[1:, 0].tolist()
    assert best.tolist() == values[1:].argmax(-1).tolist()
    reference = CachedReference(cache, WINDOWS)
    assert reference.rows(1, 1, 3).best.tolist() == best[2:4].tolist()  # window 1 begins at row 2


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "reference.logits"

    def fail() -> None:
        with new_cache(path, key()):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_foreign_and_broken_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "reference.logits"
    write(path, logprobs(5, 1.0), torch.zeros(5, dtype=torch.int64))
    for others in ([Window([5, 6, 7, 8], 1), WINDOWS[1]], WINDOWS[:1], [WINDOWS[1], WINDOWS[0]]):
        with pytest.raises(UserError, match="another text, context, protocol or vocabulary"):
            CachedReference(ReferenceCache(path), others)
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(UserError, match="cut short"):
        ReferenceCache(path)
    path.write_bytes(b"GGUF" + data[4:])
    assert not is_cache(path)
    with pytest.raises(UserError, match="not a logit cache"):
        ReferenceCache(path)
    path.write_bytes(data[:12] + b"[" + data[13:])
    with pytest.raises(UserError, match="not a logit cache"):
        ReferenceCache(path)
    with pytest.raises(UserError, match="cannot read"):
        ReferenceCache(tmp_path / "missing")


def test_the_oldest_use_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_cache, "_SPARE_BYTES", 0)
    folder = cache_path(key()).parent
    folder.mkdir(parents=True)
    for age, name in enumerate(("old", "middle", "new")):
        file = folder / f"{name}.logits"
        file.write_bytes(bytes(100))
        os.utime(file, (1000 + age, 1000 + age))
    assert make_room(150, limit=300)
    assert sorted(file.name for file in folder.iterdir()) == ["new.logits"]
    assert not make_room(301, limit=300)
    assert (folder / "new.logits").exists()


def test_a_model_is_known_by_its_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "notes.txt").write_text("not the model")
    first = model_hash(folder)
    (folder / "notes.txt").write_text("changed")
    assert model_hash(folder) == first
    (folder / "model.safetensors").write_bytes(b"weighty")  # as many bytes
    os.utime(folder / "model.safetensors", (1000, 1000))  # clocks of file systems may not tell two writes apart
    assert model_hash(folder) != first
    assert np.isin(model_hash(folder / "config.json"), [first]).sum() == 0
