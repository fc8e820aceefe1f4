"""Error feedback on ggml blocks: ordinary bytes of the type, less error of the output than codes chosen alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tokenmill.kernels.ggml_types import TYPES
from tokenmill.quantize.ggml.blocks import dequantize, quantize
from tokenmill.quantize.ggml.feedback import FEEDBACK_TYPES, FeedbackFactor, with_codes


@pytest.mark.parametrize("type_name", FEEDBACK_TYPES)
def test_the_output_errs_less(type_name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    mixing = torch.eye(512) + 0.1 * torch.randn(512, 512, generator=generator)
    inputs = torch.randn(1024, 512, generator=generator) @ mixing
    weight = torch.randn(16, 512, generator=generator)
    factor = FeedbackFactor(inputs.T @ inputs / 1024)

    def error(packed: torch.Tensor) -> float:
        return float((inputs @ (dequantize(type_name, packed) - weight).T).square().mean())

    packed = factor.quantize(type_name, weight)
    assert packed.shape == (16, TYPES[type_name].row_bytes(512))
    assert error(packed) < 0.8 * error(quantize(type_name, weight, factor.importance))


@pytest.mark.parametrize("type_name", FEEDBACK_TYPES)
def test_codes_are_put_where_the_type_keeps_them(type_name: str) -> None:
    """Writing the same code everywhere gives equal values in each group; the levels rise with the code."""
    layout = TYPES[type_name]
    rows = torch.randn(3, layout.block_size, generator=torch.Generator().manual_seed(5))
    packed = quantize(type_name, rows)
    values = [
        dequantize(type_name, with_codes(type_name, packed, torch.full(rows.shape, code, dtype=torch.uint8)))
        for code in range(4)
    ]
    steps = [after - before for before, after in pairwise(values)]
    for step in steps[1:]:
        assert bool((step.sign() == steps[0].sign()).all())
    one = torch.zeros(rows.shape, dtype=torch.uint8)
    one[:, 7] = 3
    changed = dequantize(type_name, with_codes(type_name, packed, one))
    assert torch.equal(changed[:, 7], values[3][:, 7])
    assert torch.equal(changed[:, 8:], values[0][:, 8:])
