"""The exchange between GPUs, with one of them: several were not to be had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("NCCL needs a GPU", allow_module_level=True)

from tokenmill.hardware.sharding import Grid
from tokenmill.runtime.ranks.nccl import NcclGroup


def test_an_exchange_of_one_gpu(tmp_path: Path) -> None:
    group = NcclGroup(Grid(1).place(0), str(tmp_path / "meeting"), 30.0)
    x = torch.randn(3, 8, device="cuda")
    (found,) = group.collect(x, [8])
    assert torch.equal(found, x)
    assert torch.equal(group.gather_rows(x, [3]), x)
