"""TurboQuant: the table is Lloyd and Max's, and the error is what theory says, whatever the weights look like."""

from __future__ import annotations

import pytest
import torch

from tests.unit.quantize.methods.fake_block import FakeBlock, random_weight
from tokenmill.errors import UserError
from tokenmill.kernels.hadamard import inverse_signed_hadamard
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.methods.turboquant import TurboQuant, normal_table, to_codebook

PUBLISHED = {
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1519),
    4: (0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326),
}
THEORY = {2: 0.1175, 3: 0.03455, 4: 0.00950}  # mean squared error of a unit vector


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_table_is_the_published_one(bits: int) -> None:
    table = normal_table(bits)
    half = len(table) // 2
    assert table[half:] == pytest.approx(PUBLISHED[bits], abs=5e-5)
    assert [-value for value in reversed(table[:half])] == list(table[half:])


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("columns", [512, 576, 1536])
def test_error_is_what_theory_says(bits: int, columns: int) -> None:
    def error(outliers: bool) -> float:
        weight = random_weight(256, columns, outliers=outliers)
        matrix = to_codebook(weight, Scheme("codebook", bits), seed=5)
        squares = (inverse_signed_hadamard(matrix.dequantize(), 5) - weight).square().sum(1)
        return float((squares / weight.square().sum(1)).nanmean())  # nan: the row of zeros

    assert error(outliers=False) == pytest.approx(THEORY[bits], rel=0.03)
    assert error(outliers=True) < 1.05 * THEORY[bits]  # a rounding grid would have to stretch over them


def test_zero_rows_stay_zero() -> None:
    weight = random_weight(8, 64)
    matrix = to_codebook(weight, Scheme("codebook", 3), seed=0)
    assert bool((matrix.dequantize()[4] == 0).all())


def test_block_sees_unrotated_values() -> None:
    weight = random_weight(32, 128)
    view = FakeBlock({"q": weight}, [("q",)])
    matrix = TurboQuant({"seed": 7}).solve(view, {"q": Scheme("codebook", 4)})["q"]
    assert matrix.rotation_seed == 7
    assert torch.nn.functional.cosine_similarity(view.weights["q"].flatten(), weight.flatten(), 0) > 0.99
    assert torch.equal(matrix.scales.half().float(), matrix.scales)


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(UserError, match="--bits"):
        TurboQuant().check("q", (8, 64), Scheme("codebook", 5))
    with pytest.raises(UserError, match="one scale per row"):
        TurboQuant().check("q", (8, 64), Scheme("codebook", 4, 32))
