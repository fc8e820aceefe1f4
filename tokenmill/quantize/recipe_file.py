"""Reads a recipe file (YAML): steps with their options, and layers that differ. Gives a RecipeRequest.

Unknown keys are refused with the nearest valid one; recipe.py knows what the keys mean. Called by the CLI.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tokenmill.errors import UserError, unknown_name
from tokenmill.quantize.recipe import LayerOverride, RecipeRequest

_KEYS = ("method", "steps", "bits", "group_size", "symmetric", "activations", "ignore", "layers")
_LAYER_KEYS = tuple(spec.name for spec in fields(LayerOverride) if spec.name != "pattern")
_EXAMPLE = "see docs/quantization.md for an example"


def read_recipe(path: Path) -> RecipeRequest:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error.strerror}", "give a recipe file with --recipe") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"'{path}' is not YAML: {' '.join(str(error).split())}", _EXAMPLE) from None
    if not isinstance(content, dict):
        raise UserError(f"'{path}' does not hold a mapping", _EXAMPLE)
    for key in content:
        if key not in _KEYS:
            raise unknown_name("recipe key", str(key), _KEYS)
    if ("method" in content) == ("steps" in content):
        raise UserError(f"'{path}' must have either 'method' or 'steps'", _EXAMPLE)
    method, options = _steps(content.get("steps", content.get("method")))
    ignore = content.get("ignore", [])
    if not isinstance(ignore, list) or not all(isinstance(pattern, str) for pattern in ignore):
        raise UserError("'ignore' in the recipe is not a list of names", _EXAMPLE)
    return RecipeRequest(
        method=method,
        options=tuple(options),
        ignore=tuple(ignore),
        activations=_activations(content),
        layers=tuple(_layer(pattern, value) for pattern, value in _mapping(content, "layers").items()),
        **{key: _checked(key, content[key]) for key in _LAYER_KEYS if key in content},
    )


def _steps(value: Any) -> tuple[str, list[tuple[str, Any]]]:
    """A method name, or a list of names and {name: {option: value}}."""
    if isinstance(value, str):
        return value, []
    if not isinstance(value, list) or not value:
        raise UserError("'steps' in the recipe is not a list of steps", _EXAMPLE)
    names, options = [], []
    for step in value:
        if isinstance(step, str):
            names.append(step)
        elif isinstance(step, dict) and len(step) == 1 and isinstance(next(iter(step)), str):
            name = next(iter(step))
            names.append(name)
            options += [(f"{name}.{option}", each) for option, each in (_mapping(step, name)).items()]
        else:
            raise UserError(f"{step!r} is not a step of a recipe", _EXAMPLE)
    return "+".join(names), options


def _layer(pattern: object, value: Any) -> LayerOverride:
    if not isinstance(pattern, str) or not isinstance(value, dict):
        raise UserError(f"layer {pattern!r} in the recipe has no settings", _EXAMPLE)
    for key in value:
        if key not in _LAYER_KEYS:
            raise unknown_name("layer setting", str(key), _LAYER_KEYS)
    return LayerOverride(pattern, **{key: _checked(key, each) for key, each in value.items()})


def _checked(key: str, value: Any) -> Any:
    expected = bool if key == "symmetric" else int
    if not isinstance(value, expected) or (expected is int and (isinstance(value, bool) or value < 0)):
        raise UserError(
            f"'{key}' in the recipe is {value!r}", f"give {'true or false' if expected is bool else 'a number'}"
        )
    return value


def _activations(content: dict[str, Any]) -> str:
    value = content.get("activations", "")
    if not isinstance(value, str):
        raise UserError(f"'activations' in the recipe is {value!r}", "give a name such as int8")
    return value


def _mapping(content: dict[str, Any], key: str) -> dict[str, Any]:
    value = content.get(key) or {}
    if not isinstance(value, dict):
        raise UserError(f"'{key}' in the recipe is not a mapping", _EXAMPLE)
    return value
