"""Recipes: names and compositions become steps and schemes; what cannot work is refused with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.methods import SOLVERS, TRANSFORMS
from tokenmill.quantize.recipe import LayerOverride, RecipeRequest, build_recipe, compose
from tokenmill.quantize.recipe_file import read_recipe
from tokenmill.quantize.schemes import METHODS

_SHAPES = {
    f"model.layers.{layer}.{name}": shape
    for layer in range(2)
    for name, shape in {
        "self_attn.q_proj": (256, 256),
        "self_attn.o_proj": (256, 256),
        "mlp.up_proj": (768, 256),
        "mlp.down_proj": (256, 768),
    }.items()
}


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_builds(name: str) -> None:
    recipe = build_recipe(RecipeRequest(name), _SHAPES)
    assert set(recipe.scheme_of) == set(_SHAPES)
    assert all(step.name in (*TRANSFORMS, *SOLVERS) for step in recipe.steps)
    assert recipe.describe()["method"] == name


@pytest.mark.parametrize(
    ("text", "steps", "scheme"),
    [
        ("awq", ("awq", "rtn"), Scheme("int", 4, 128, symmetric=False)),
        ("smoothquant", ("smoothquant", "rtn"), Scheme("int", 8, 0, activations="int8_token")),
        ("smoothquant+gptq", ("smoothquant", "gptq"), Scheme("int", 8, 0, activations="int8_token")),
        ("rotation+gptq", ("rotation", "gptq"), Scheme("int", 4, 128)),
        ("awq+gptq", ("awq", "gptq"), Scheme("int", 4, 128)),
        ("rotation+awq", ("rotation", "awq", "rtn"), Scheme("int", 4, 128, symmetric=False)),
        ("fp8", ("fp8",), Scheme("e4m3", 8, 0, activations="fp8_token")),
    ],
)
def test_compositions(text: str, steps: tuple[str, ...], scheme: Scheme) -> None:
    recipe = build_recipe(RecipeRequest(text), _SHAPES)
    assert tuple(step.name for step in recipe.steps) == steps
    assert recipe.scheme == scheme


def test_flags_change_the_scheme() -> None:
    request = RecipeRequest(
        "gptq", bits=3, group_size=32, symmetric=False, options=(("order", "static"), ("mse", "true"))
    )
    recipe = build_recipe(request, _SHAPES)
    assert recipe.scheme == Scheme("int", 3, 32, symmetric=False)
    assert (recipe.solver.options.order, recipe.solver.options.mse) == ("static", True)
    assert recipe.needs_calibration
    assert not build_recipe(RecipeRequest("rtn"), _SHAPES).needs_calibration


def test_fp8_kinds() -> None:
    block = build_recipe(RecipeRequest("fp8", group_size=128), _SHAPES).scheme
    assert (block.block_rows, block.group_size) == (128, 128)
    static = build_recipe(RecipeRequest("fp8", options=(("scaling", "tensor"),)), _SHAPES)
    assert static.scheme.activations == "fp8_static"
    assert static.needs_calibration


def test_group_size_is_the_largest_that_divides() -> None:
    shapes = {"a": (64, 576), "b": (64, 1536)}
    assert build_recipe(RecipeRequest("rtn"), shapes).scheme.group_size == 64
    assert build_recipe(RecipeRequest("rtn"), {"a": (64, 30)}).scheme.group_size == 0


def test_layers_can_differ_and_be_ignored() -> None:
    request = RecipeRequest(
        "gptq",
        ignore=("model.layers.0.mlp.up_proj",),
        layers=(
            LayerOverride("re:.*down_proj", bits=8),
            LayerOverride("model.layers.1.self_attn.q_proj", group_size=32),
        ),
    )
    recipe = build_recipe(request, _SHAPES)
    assert recipe.ignored == ("model.layers.0.mlp.up_proj",)
    assert "model.layers.0.mlp.up_proj" not in recipe.scheme_of
    assert recipe.scheme_of["model.layers.0.mlp.down_proj"].bits == 8
    assert recipe.scheme_of["model.layers.1.self_attn.q_proj"] == Scheme("int", 4, 32)
    assert recipe.scheme_of["model.layers.0.self_attn.q_proj"] == Scheme("int", 4, 128)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (RecipeRequest("gptqq"), "did you mean 'gptq'"),
        (RecipeRequest("gptq+awq"), "put it last"),
        (RecipeRequest("rotation+rotation"), "twice"),
        (RecipeRequest("rotation+autoround", options=(("metric", "fisher"),)), "does not go with rotation"),
        (RecipeRequest("gptq", bits=9), "--bits from 2 to 8"),
        (RecipeRequest("mxfp4", bits=8), "leave --bits out"),
        (RecipeRequest("nvfp4", group_size=32), "leave --group-size out"),
        (RecipeRequest("smoothquant", symmetric=False), "leave --symmetric/--asymmetric out"),
        (RecipeRequest("gptq", group_size=96), "not a multiple of the group size 96"),
        (RecipeRequest("gptq", options=(("oder", "static"),)), "did you mean 'gptq.order'"),
        (RecipeRequest("gptq", options=(("damping", "much"),)), "expected a float"),
        (RecipeRequest("gptq", ignore=("model.layers.0.mlp.gate",)), "the nearest are"),
        (RecipeRequest("gptq", ignore=("re:[",)), "not a regular expression"),
        (RecipeRequest("gptq", ignore=("re:.*",)), "nothing is left"),
        (RecipeRequest("gptq", layers=(LayerOverride("lm_head", bits=8),)), "no layer is called 'lm_head'"),
        (RecipeRequest("fp8", options=(("scaling", "row"),)), "valid: block, channel, tensor"),
    ],
)
def test_refusals_carry_the_remedy(request_: RecipeRequest, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        build_recipe(request_, _SHAPES)


def test_option_goes_to_the_step_that_has_it() -> None:
    recipe = build_recipe(RecipeRequest("rotation+gptq", options=(("rotation.seed", "7"), ("gptq.norm", "2"))), _SHAPES)
    assert recipe.transforms[0].options.seed == 7
    assert recipe.solver.options.norm == 2
    with pytest.raises(UserError, match=r"unknown option 'rtn\.mse'"):
        build_recipe(RecipeRequest("gptq", options=(("rtn.mse", "true"),)), _SHAPES)


def test_recipe_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "steps:\n  - smoothquant\n  - gptq: {order: none, damping: 0.05}\nbits: 8\nignore: ['re:.*o_proj']\n"
        "layers:\n  're:.*up_proj': {symmetric: true}\n"
    )
    request = read_recipe(path)
    assert request.method == "smoothquant+gptq"
    recipe = build_recipe(request, _SHAPES)
    assert (recipe.solver.options.order, recipe.solver.options.damping) == ("none", 0.05)
    assert len(recipe.ignored) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("method: gptq\nbitss: 4\n", "did you mean 'bits'"),
        ("bits: 4\n", "either 'method' or 'steps'"),
        ("method: gptq\nbits: four\n", "'bits' in the recipe is 'four'"),
        ("method: gptq\nlayers: {a: {bit: 4}}\n", "did you mean 'bits'"),
        ("- gptq\n", "does not hold a mapping"),
        ("a: [\n", "is not YAML"),
        ("steps: [{gptq: 3}]\n", "is not a mapping"),
    ],
)
def test_recipe_file_refusals(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        read_recipe(path)
    with pytest.raises(UserError, match="cannot read"):
        read_recipe(tmp_path / "none.yaml")


def test_mixed_leaves_the_widths_open() -> None:
    recipe = build_recipe(RecipeRequest("awq+mixed+gptq", options=(("average_bits", "3.5"),)), _SHAPES)
    assert [step.name for step in recipe.steps] == ["awq", "gptq"]
    assert recipe.average_bits == 3.5
    assert build_recipe(RecipeRequest("mixed", bits=3), _SHAPES).average_bits == 3.0
    weights = sum(out * width for out, width in _SHAPES.values())
    request = RecipeRequest("mixed", group_size=64, options=(("budget", str(weights // 2)),))  # 4 bits with scales
    assert build_recipe(request, _SHAPES).average_bits == pytest.approx(3.75)
    some = build_recipe(RecipeRequest("mixed", bits=5, options=(("widths", "8, 4"),)), _SHAPES)
    assert some.widths == (4, 8)
    assert some.describe()["widths"] == [4, 8]
    with pytest.raises(UserError, match="too small"):
        build_recipe(RecipeRequest("mixed", options=(("budget", "1000"),)), _SHAPES)
    with pytest.raises(UserError, match="nothing to mix"):
        build_recipe(RecipeRequest("mixed+nvfp4"), _SHAPES)
    with pytest.raises(UserError, match="from 2 to 8"):
        build_recipe(RecipeRequest("mixed", options=(("average_bits", "many"),)), _SHAPES)
    for widths in ("4", "4,7", "four,8", ""):
        with pytest.raises(UserError, match="at least two of"):
            build_recipe(RecipeRequest("mixed", options=(("widths", widths),)), _SHAPES)
    with pytest.raises(UserError, match="no average of 3 bits"):
        build_recipe(RecipeRequest("mixed", bits=3, options=(("widths", "4,8"),)), _SHAPES)


def test_compose_keeps_order() -> None:
    assert compose("rotation+smoothquant+gptq").steps == ("rotation", "smoothquant", "gptq")
