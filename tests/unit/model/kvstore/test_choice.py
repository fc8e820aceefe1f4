"""A store is chosen only for what it can hold."""

from __future__ import annotations

import pytest
import torch

from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import LayerKV, build_layout
from tokenmill.model.kvstore import KV_STORES
from tokenmill.model.kvstore.choice import choose_store

CPU = torch.device("cpu")
FULL = LayerKV("full", 2, 64)


@pytest.mark.parametrize("dtype", KV_STORES.names())
@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ([FULL, LayerKV("full", 2, 32)], "layers of different KV shapes"),
        ([LayerKV("full", 1, 192, value_dim=128)] * 2, "keys and values of different widths"),
    ],
)
def test_what_no_store_holds_yet_is_declined_by_name(dtype: str, layers: list[LayerKV], problem: str) -> None:
    with pytest.raises(UserError, match=f"{dtype} do not support this model's {problem}"):
        choose_store(dtype, 0, layers, CPU)


@pytest.mark.parametrize("dtype", KV_STORES.names())
def test_latent_rows_are_floats(dtype: str) -> None:
    """One number for the row's latent and for its key would round one of them badly: only floats hold both."""
    layers = [LayerKV("latent", 1, 576, value_dim=0)] * 2
    if dtype.startswith(("float", "bfloat", "fp8")):
        assert choose_store(dtype, 0, layers, CPU).page_bytes(build_layout(layers, 16)) == 2 * 16 * _row_bytes(dtype)
    else:
        with pytest.raises(UserError, match=f"{dtype} do not support this model's latent rows"):
            choose_store(dtype, 0, layers, CPU)


def _row_bytes(dtype: str) -> int:
    if dtype == "fp8_per_token_head":
        return 576 + 4
    return 576 * {"float32": 4, "float16": 2, "bfloat16": 2}.get(dtype, 1)


def test_a_layer_that_reads_another_is_no_obstacle() -> None:
    assert choose_store("float32", 0, [FULL, LayerKV("none", source=0)], CPU).name == "float32"
