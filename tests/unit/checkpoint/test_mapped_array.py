"""Arrays over a file are the tensors over it, whatever part of a fused matrix they are."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from tokenmill.checkpoint import mapped_array, mapped_tensor
from tokenmill.checkpoint.tensor_views import Rows, TensorView
from tokenmill.errors import CheckpointError

_VIEWS = [
    TensorView(("a",)),
    TensorView(("a",), transposed=True),
    TensorView(("a", "b")),
    TensorView(("a",), rows=Rows(4, 8, 12), total_rows=12),
    TensorView(("a",), rows=Rows(0, 2, 6), total_rows=12),  # of each 6 rows the first 2
    TensorView(("a",), rows=Rows(2, 4, 6), total_rows=6, axis=1),
    TensorView(("a",), rows=Rows(8, 4, 12), total_rows=24),  # two stored rows for each of these
]


@pytest.mark.parametrize("view", _VIEWS, ids=str)
def test_views_are_those_of_tensors(view: TensorView) -> None:
    stored = [np.arange(12 * 6, dtype=np.float32).reshape(12, 6) + number for number in range(len(view.sources))]
    expected = mapped_tensor.take_view(view, [torch.from_numpy(each) for each in stored])
    assert np.array_equal(mapped_array.take_view(view, stored), expected.numpy())


def test_rows_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(CheckpointError, match="cannot be cut"):
        mapped_array.take_view(TensorView(("a",), rows=Rows(1, 1, 3), total_rows=5), [np.zeros((12, 6))])


def test_misaligned_values_are_copied() -> None:
    with mmap.mmap(-1, 64) as buffer:
        buffer[2:10] = np.array([1.5, -2.0], dtype=np.float32).tobytes()
        values = mapped_array.view_array(buffer, "float32", (2,), 2)
        assert values.tolist() == [1.5, -2.0]
        assert values.flags.aligned
        assert mapped_array.view_array(buffer, "float32", (0, 3), 2).shape == (0, 3)
