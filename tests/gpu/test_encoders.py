"""Encoders with the packed kernel: vectors and scores of the torch reference, up to the rounding of 16-bit floats."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("no GPU: test_interpreted.py runs this file under the interpreter", allow_module_level=True)

from tests.embedding_models import PAIRS, TEXTS, save_classifier, save_embedder
from tokenmill import Embedder

ON_GPU = torch.cuda.is_available()
BOUND = 2e-2 if ON_GPU else 1e-5  # float16 on a GPU; the interpreter computes in float32


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_vectors(tmp_path: Path, kind: str) -> None:
    path = save_embedder(tmp_path, kind)
    with Embedder(path, kernels="triton") as fast, Embedder(path, kernels="ref") as reference:
        found, wanted = fast.embed(TEXTS), reference.embed(TEXTS)
    assert np.abs(found - wanted).max() < BOUND
    assert (found * wanted).sum(1).min() > 0.999


def test_scores(tmp_path: Path) -> None:
    path = save_classifier(tmp_path, "bert")
    with Embedder(path, kernels="triton") as fast, Embedder(path, kernels="ref") as reference:
        np.testing.assert_allclose(fast.score_pairs(PAIRS), reference.score_pairs(PAIRS), atol=BOUND)
