"""Attention of encoders over packed texts: the kernel against torch's attention of texts of one length."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("no GPU: test_triton.py runs this file under the interpreter", allow_module_level=True)

from tokenmill.kernels.triton.attention.encoder import encoder_attention
from tokenmill.model.encoders.attention import grouped_attention
from tokenmill.model.encoders.packed import Text, pack

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("lengths", "heads", "size", "window"),
    [
        ([1], 2, 16, 0),
        ([5, 70, 1, 5, 17], 3, 32, 0),
        ([130, 9], 2, 64, 0),
        ([100, 30, 3], 2, 24, 8),  # a head that is no power of two, and a window
        ([150], 1, 32, 64),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_agrees_with_torch(lengths: list[int], heads: int, size: int, window: int, dtype: torch.dtype) -> None:
    batch = pack([Text([1] * length) for length in lengths], DEVICE)
    qkv = torch.randn(sum(lengths), 3 * heads * size).to(DEVICE, dtype)
    wanted = grouped_attention(qkv.float(), batch, heads, window)
    got = encoder_attention(qkv, batch.starts, batch.max_length, heads, window).float()
    tolerance = 2e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)
