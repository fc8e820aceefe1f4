"""The laboratory of `optimize` on a GPU: two formats alternate in children that share it, with weights made up and with
files made on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.gpu.models import write_config
from tokenmill.bench.prompts import random_requests
from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.dummy import DummyCheckpoint
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config import EngineConfig
from tokenmill.evaluate.logit_codec import decode, encode
from tokenmill.optimize.artefacts import ArtefactCache
from tokenmill.optimize.machine_laboratory import MachineLaboratory
from tokenmill.optimize.quality import QualityPlan
from tokenmill.optimize.results import CandidateResult
from tokenmill.optimize.store import Store
from tokenmill.optimize.traffic import Traffic

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

_TEXT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. " * 40


def _laboratory(path: Path, checkpoint: Checkpoint, out: Path, load_format: str = "auto") -> MachineLaboratory:
    vocabulary = checkpoint.description.vocab_size
    traffic = Traffic(lambda count, run: random_requests(vocabulary, count, 32, 16, seed=run), 48, 32, 16, "short")
    engine = EngineConfig(context=48, concurrency=4, batch_tokens=512, device="cuda", load_format=load_format)
    cache = ArtefactCache(path, checkpoint, "model", 0, "cuda")
    return MachineLaboratory(Store(out, "k"), traffic, engine, cache, QualityPlan(_TEXT, 64, 1, 2, 0.5, 0.5))


def test_two_formats_of_made_up_weights_alternate(tmp_path: Path) -> None:
    path = write_config(tmp_path / "model", hidden_size=256, intermediate_size=512)
    lab = _laboratory(path, DummyCheckpoint(path), tmp_path / "out", "dummy")
    try:
        plain = CandidateResult("stored", "stored", "bfloat16", 512)
        rounded = CandidateResult("fp8", "stored", "bfloat16", 512, options={"quantization": "fp8"})
        base, runs = lab.pair("first", plain, rounded)
        assert base[0].total_tok_s > 0
        assert runs[0].memory_bytes < base[0].memory_bytes
        for number in range(2):
            assert len(lab.cycle([plain, rounded], number)) == 2
    finally:
        lab.close()


def test_formats_made_on_the_device_are_timed_and_judged(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    path = model_path("stories15m")
    lab = _laboratory(path, open_checkpoint(path), tmp_path / "out")
    try:
        plain = CandidateResult("stored", "stored", "bfloat16", 512)
        for name in ("fp8", "rtn-8"):
            candidate = CandidateResult(name, name, "bfloat16", 512)
            assert Path(lab.build(candidate, 600.0).path).is_dir()
            _, runs = lab.pair("first", plain, candidate)
            assert runs[0].total_tok_s > 0
            assert lab.check(plain, candidate).kld_mean < 0.1
    finally:
        lab.close()


def test_rows_of_a_reference_are_the_same_on_the_device() -> None:
    logprobs = torch.randn(7, 5000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    targets = torch.arange(7)
    rows, codes = encode(logprobs, targets)
    on_device, device_codes = encode(logprobs.cuda(), targets.cuda())
    assert (rows["best"] == on_device["best"]).all()
    assert np.abs(codes.astype(int) - device_codes.astype(int)).max() <= 1
    torch.testing.assert_close(decode(rows, codes, "cuda").cpu(), decode(rows, codes), rtol=0, atol=1e-9)
