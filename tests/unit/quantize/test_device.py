"""Every step computes on the device of the block: nothing it makes lands on the default device by mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.unit.quantize.methods.tiny_blocks import TinyModel
from tokenmill.errors import UserError
from tokenmill.quantize import device as device_module
from tokenmill.quantize.calibrate import KINDS, CalibratedBlock
from tokenmill.quantize.device import check_room, choose_device, full_device_explained
from tokenmill.quantize.recipe import Recipe, RecipeRequest, build_recipe
from tokenmill.quantize.schemes import METHODS

_GROUPS = {"nf4": 32}  # the tiny model's rows are not whole blocks of 64
_OPTIONS = {"autoround": (("iterations", 3),)}
_VARIANTS = [
    *(
        RecipeRequest(name, group_size=_GROUPS.get(name), options=_OPTIONS.get(name, ()))
        for name in METHODS
        if name != "spinquant"  # learns from the whole model before its first block
    ),
    RecipeRequest("gptq", 4, 32, symmetric=False, options=(("order", "static"), ("mse", True))),
    RecipeRequest("gptq", options=(("order", "none"),)),
    RecipeRequest("autoround", 4, 32, symmetric=False, options=(("iterations", 3), ("objective", "layer"))),
    RecipeRequest("fp8", options=(("scaling", "tensor"),)),
    RecipeRequest("fp8", options=(("scaling", "block"), ("compensate", True))),
    RecipeRequest("mxfp4", options=(("rule", "best"),)),
    RecipeRequest("nvfp4", options=(("four_over_six", True),)),
]


_each_variant = pytest.mark.parametrize(
    "wanted", _VARIANTS, ids=lambda wanted: "-".join([wanted.method, *(str(value) for _, value in wanted.options)])
)


def _recipe(model: TinyModel, wanted: RecipeRequest) -> Recipe:
    return build_recipe(wanted, {name: model.source.shape(name) for name in model.source.layer_linears()})


def _steps(block: CalibratedBlock, recipe: Recipe) -> dict[str, Tensor]:
    """What each linear of the block is rounded to."""
    scheme_of = {name: recipe.scheme_of[name] for group in block.groups for name in group.names}
    for transform in recipe.transforms:
        transform.apply(block, scheme_of)
    matrices = recipe.solver.solve(block, scheme_of)
    values = {name: matrix.dequantize() for name, matrix in matrices.items()}
    assert {value.device.type for value in values.values()} == {block.device.type}
    return values


@_each_variant
def test_steps_make_nothing_on_the_default_device(wanted: RecipeRequest, tmp_path: Path) -> None:
    """With a default device that holds no numbers, a tensor that was made there cannot be computed with."""
    model = TinyModel("llama", tmp_path)
    recipe = _recipe(model, wanted)
    _steps(model.block(), recipe)  # tables that are kept on the host (Hadamard factors) exist from here on
    block = model.block()
    with torch.device("meta"):
        _steps(block, recipe)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@_each_variant
def test_a_gpu_gives_the_values_of_the_host(wanted: RecipeRequest, tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    recipe = _recipe(model, wanted)
    expected = _steps(model.block(), recipe)
    for name, value in _steps(model.block(device=torch.device("cuda")), recipe).items():
        # a sum in another order may tip a code
        assert float((value.cpu() - expected[name]).norm() / expected[name].norm()) < 0.02


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_calibration_makes_nothing_on_the_default_device(name: str, tmp_path: Path) -> None:
    block = TinyModel(name, tmp_path).block()
    with torch.device("meta"):
        for group in block.groups:
            block.statistics(group, KINDS)
        block.survey(KINDS)
        block.advance()


def test_several_sequences_at_once_are_each_alone(tmp_path: Path) -> None:
    block = TinyModel("llama", tmp_path).block()
    with torch.no_grad():
        together = block.forward(torch.stack(list(block.inputs())), {})
        alone = torch.stack([block.forward(sequence, {}) for sequence in block.inputs()])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module.torch.cuda, "is_available", lambda: False)
    assert choose_device("auto").type == choose_device("cpu").type == "cpu"
    with pytest.raises(UserError, match="--device cpu"):
        choose_device("cuda")
    with pytest.raises(UserError, match="cuda"):
        choose_device("cudaa")


def test_a_gpu_without_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module.torch.cuda, "mem_get_info", lambda _device: (1 << 20, 8 << 20))
    check_room(torch.device("cuda"), 1 << 20)
    check_room(torch.device("cpu"), 1 << 40)
    with pytest.raises(UserError, match="2 MiB of GPU memory, 1 are free"):
        check_room(torch.device("cuda"), 2 << 20)
    with pytest.raises(UserError, match="it resumes at the last block"), full_device_explained("block 3"):
        raise torch.OutOfMemoryError
