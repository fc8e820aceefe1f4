"""Native edge layers: the slots asked for are exact, the others coded; and FP8 scales that a checkpoint brings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tokenmill.checkpoint.base import StoredTensor
from tokenmill.errors import CheckpointError, UserError
from tokenmill.hardware.kv_layout import LayerKV, build_layout
from tokenmill.model.kvstore.checkpoint_scales import load_kv_scales
from tokenmill.model.kvstore.choice import choose_store, native_layer_count, reading_path
from tokenmill.model.kvstore.float8 import Float8Store

CPU = torch.device("cpu")


def test_edges_are_native() -> None:
    layers = [LayerKV("full", 2, 16)] * 6
    layout = build_layout(layers, 4)
    choice = choose_store("turboquant2", 1, layers, CPU)
    store = choice.build(layout, 5, CPU, "", 1)
    assert store.nbytes == 5 * choice.page_bytes(layout)
    assert native_layer_count(layout, 1) == 2
    k = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    for slot in range(6):
        store.write(slot, torch.arange(8, 12), k, k)
    store.copy_pages([(2, 4)])
    errors = []
    for slot in range(6):
        stored = store.read(slot, torch.tensor([4]))[0][0].float().transpose(0, 1).reshape(4, 32)
        errors.append(float((stored - k).norm() / k.norm()))
    assert max(errors[0], errors[5]) < 1e-3
    assert min(errors[1:5]) > 0.1
    other = choice.build(layout, 5, CPU, "", 1)
    other.import_pages([0], store.export_pages([2]).wait())
    for slot in (0, 3):
        assert torch.equal(other.pages(slot)[0][0], store.pages(slot)[0][2])
    assert reading_path(store).startswith("C++" if store.kernel_pages(0) else "torch")


def test_groups_share_slots_so_more_layers_stay_native() -> None:
    layers = [LayerKV("full", 1, 16) if number % 6 == 5 else LayerKV("sliding", 1, 16, 512) for number in range(18)]
    layout = build_layout(layers, 8)
    assert layout.layers_per_page == 3
    # Layer 0 is in the first slot and layer 17 in the last: both of every group.
    assert native_layer_count(layout, 1) == 12
    assert choose_store("turboquant_4bit_nc", None, layers, CPU).edge_layers == 0
    with pytest.raises(UserError, match="leave none"):
        choose_store("turboquant_4bit_nc", 2, layers, CPU)


@dataclass
class Scales:
    tensors: dict[str, Any] = field(default_factory=dict)

    def names(self) -> Iterable[str]:
        return self.tensors

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def tensor(self, name: str) -> StoredTensor:
        data = torch.tensor(self.tensors[name])
        return StoredTensor(name, tuple(data.shape), "F32", data)


@pytest.mark.parametrize("kernels", ["", "ref"])
def test_calibrated_scales(kernels: str) -> None:
    layout = build_layout([LayerKV("full", 2, 16)] * 2, 4)
    store = Float8Store(layout, 3, CPU, kernels)
    names = {"model.layers.1.self_attn.k_scale": [0.5, 8.0], "model.layers.1.self_attn.v_scale": 4.0}
    load_kv_scales(store, Scales(names))  # type: ignore[arg-type]
    assert store.scales(0)[0].tolist() == [1.0, 1.0]
    assert store.scales(1)[0].tolist() == [0.5, 8.0]
    assert store.scales(1)[1].tolist() == [4.0, 4.0]
    x = torch.full((1, 32), 1000.0)
    for slot in (0, 1):
        store.write(slot, torch.tensor([5]), x, x)
    assert store.pages(0)[0][1, :, 1].unique().tolist() == [448.0]  # saturated
    heads = store.pages(1)[0][1, :, 1, 0]
    assert heads.tolist() == [224.0, 1024.0]  # 448 * 0.5, and 1000 / 8 to the nearest
    codes = store.stored(1)[1][1, :, 1].float()
    assert codes.unique().tolist() == [256.0]  # 1000 / 4


def test_scales_that_are_none_are_refused() -> None:
    store = Float8Store(build_layout([LayerKV("full", 2, 16)], 4), 1, CPU)
    names = {"model.layers.0.self_attn.k_scale": [0.5, -1.0], "model.layers.0.self_attn.v_scale": 4.0}
    with pytest.raises(CheckpointError, match="k_scale"):
        load_kv_scales(store, Scales(names))  # type: ignore[arg-type]
