"""From the user's request (a method name, a composition such as smoothquant+gptq, a recipe file) to checked steps and a
scheme for each matrix.

Everything that can be refused before any work is refused here: unknown methods, options, layers, groups that do not
divide. Knows the names and shapes of a model's linears, not its weights. Used by the job.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from tokenmill.config import parse_size
from tokenmill.errors import UserError, unknown_name
from tokenmill.kernels.rounding import CALIBRATED
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.base import Solver, Step, Transform
from tokenmill.quantize.methods import SOLVERS, TRANSFORMS
from tokenmill.quantize.mixed import WIDTHS, average_bits_within
from tokenmill.quantize.schemes import FP8_SCALING, GROUP_SIZES, METHODS, Method, adjust, with_activations

MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class LayerOverride:
    """`pattern`: a linear's name, or "re:" and a regular expression that its name begins with."""

    pattern: str
    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None


@dataclass(frozen=True, slots=True)
class RecipeRequest:
    """The user's request; None: not set. `options` are (name, value), the name maybe with its step: "gptq.order"."""

    method: str = "gptq"
    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    options: tuple[tuple[str, Any], ...] = ()
    ignore: tuple[str, ...] = ()
    layers: tuple[LayerOverride, ...] = ()
    activations: str = ""  # of schemes.ACTIVATIONS; empty: the method's


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    method: str
    transforms: tuple[Transform, ...]
    solver: Solver
    scheme: Scheme  # of most matrices
    scheme_of: Mapping[str, Scheme] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # linears of blocks that stay unquantized
    average_bits: float | None = None  # mixed precision: widths are still to be chosen, for this average
    widths: tuple[int, ...] = WIDTHS  # and from these

    @property
    def steps(self) -> tuple[Step, ...]:
        return (*self.transforms, self.solver)

    @property
    def needs_calibration(self) -> bool:
        static = any(scheme.activations in CALIBRATED for scheme in self.scheme_of.values())
        return static or self.average_bits is not None or any(step.needs_calibration for step in self.steps)

    @property
    def needs_targets(self) -> bool:
        return any(step.needs_targets for step in self.steps)

    def describe(self) -> dict[str, Any]:
        """Everything that decides the result, in plain values: hashed for resuming, printed in the card."""
        odd = {name: asdict(scheme) for name, scheme in self.scheme_of.items() if scheme != self.scheme}
        return {
            "method": self.method,
            "steps": [{step.name: asdict(step.options)} for step in self.steps],
            "scheme": asdict(self.scheme),
            "layers": odd,
            "ignore": list(self.ignored),
            **({} if self.average_bits is None else {"average_bits": self.average_bits}),
            **({} if self.widths == WIDTHS else {"widths": list(self.widths)}),
        }


def build_recipe(request: RecipeRequest, shapes: Mapping[str, tuple[int, int]]) -> Recipe:
    """`shapes`: every linear inside the model's blocks, by name."""
    options = dict(request.options)
    name, average_bits = _take_mixed(request, options)
    budget = options.pop("budget", None) if average_bits is not None else None
    widths = _take_widths(options) if average_bits is not None else WIDTHS
    method = compose(name)
    scaling = _take_scaling(name, options)
    scheme = adjust(name, method, request.bits, request.group_size, request.symmetric, scaling)
    scheme = with_activations(name, scheme, request.activations)
    ignored = frozenset(name for pattern in request.ignore for name in matching(pattern, shapes))
    if len(ignored) == len(shapes):
        raise UserError("every linear is ignored: nothing is left to quantize", "give fewer --ignore patterns")
    if method.group_open and request.group_size is None:
        scheme = replace(scheme, group_size=_usual_group([shapes[name][1] for name in shapes if name not in ignored]))
    steps = _make_steps(method.steps, options)
    for step in steps[:-1]:
        scheme = step.scheme(scheme) if isinstance(step, Transform) else scheme
    scheme_of = {name: scheme for name in shapes if name not in ignored}
    for override in request.layers:
        for name in matching(override.pattern, shapes):
            if name in scheme_of:
                scheme_of[name] = _overridden(override, scheme_of[name], request.method, method)
    solver = steps[-1]
    assert isinstance(solver, Solver)
    _refuse_lost_zeros(request.method, steps)
    for step in steps[:-1]:
        assert isinstance(step, Transform)
        if (solver.needs_states and step.turns_states) or (solver.needs_outputs and not step.tells_outputs):
            raise UserError(f"{solver.name}: this metric does not go with {step.name}", "use --option metric=plain")
    for name, each in scheme_of.items():
        solver.check(name, shapes[name], each)
    if budget is not None:
        average_bits = _average_within(budget, scheme, sum(math.prod(shapes[name]) for name in scheme_of))
    if average_bits is not None and not min(widths) <= average_bits <= max(widths):
        given = ",".join(map(str, widths))
        raise UserError(f"widths {given} have no average of {average_bits:g} bits", "give widths on both sides of it")
    transforms = tuple(step for step in steps[:-1] if isinstance(step, Transform))
    return Recipe(request.method, transforms, solver, scheme, scheme_of, tuple(sorted(ignored)), average_bits, widths)


def _refuse_lost_zeros(method: str, steps: Sequence[Step]) -> None:
    """What is pruned has to stay zero: pruning is the last transform, and not every solver keeps zeros."""
    pruners = [number for number, step in enumerate(steps) if isinstance(step, Transform) and step.makes_zeros]
    if not pruners:
        return
    if pruners != [len(steps) - 2]:
        raise UserError(
            f"'{method}' changes weights after {steps[pruners[0]].name} has pruned them", "prune once, and last"
        )
    solver = steps[-1]
    if not (isinstance(solver, Solver) and solver.keeps_zeros):
        raise UserError(f"{solver.name} does not keep the zeros of {steps[-2].name}", "use gptq or rtn after it")


def compose(text: str) -> Method:
    """ "smoothquant+gptq" -> one method: transforms in order, then a solver (rtn where none is named)."""
    if text in METHODS:
        return METHODS[text]
    names = [name.strip() for name in text.split("+")]
    for name in names:
        if name not in METHODS:
            raise unknown_name("method", name, [*METHODS, MIXED])
    *before, last = names
    for name in before:
        if METHODS[name].steps[0] not in TRANSFORMS:
            raise UserError(
                f"'{name}' in '{text}' chooses the final values: nothing can follow it",
                f"put it last; before it can stand {', '.join(TRANSFORMS)}",
            )
    ending = METHODS[last]
    steps = tuple(METHODS[name].steps[0] for name in before) + ending.steps
    if len(set(steps)) != len(steps):
        raise UserError(f"'{text}' has a step twice", "name each step once")
    # Smoothing implies int8 activations; every other transform leaves the solver's scheme as it is.
    scheme = METHODS["smoothquant"].scheme if "smoothquant" in steps and ending.free_bits else ending.scheme
    return replace(ending, steps=steps, scheme=scheme, group_open=ending.group_open and scheme is ending.scheme)


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The linears that a name or a "re:" pattern means; refused when there are none, with the nearest names."""
    known = list(names)
    if pattern.startswith("re:"):
        try:
            expression = re.compile(pattern[3:])
        except re.error as error:
            raise UserError(f"'{pattern}' is not a regular expression: {error}", "correct it") from None
        matches = [name for name in known if expression.match(name)]
    else:
        matches = [name for name in known if name == pattern]
    if not matches:
        near = difflib.get_close_matches(pattern.removeprefix("re:"), known, n=3, cutoff=0.3) or known[:3]
        raise UserError(f"no layer is called '{pattern}'", f"the nearest are {', '.join(near)}")
    return matches


def _take_mixed(request: RecipeRequest, options: dict[str, Any]) -> tuple[str, float | None]:
    """ "mixed" is not a step: it chooses the widths of the solver named with it (gptq where none is)."""
    names = [name.strip() for name in request.method.split("+")]
    if MIXED not in names:
        return request.method, None
    names.remove(MIXED)
    value = options.pop("average_bits", request.bits if request.bits is not None else 4)
    try:
        average = float(value)
    except (TypeError, ValueError):
        average = 0.0
    if not 2 <= average <= 8:
        raise UserError(f"average_bits is {value!r}", "give a number from 2 to 8, such as 3.5")
    name = "+".join(names) or "gptq"
    if not compose(name).free_bits:
        raise UserError(
            f"{name} has one width only: there is nothing to mix", "use mixed+gptq, mixed+rtn or mixed alone"
        )
    return name, average


def _take_widths(options: dict[str, Any]) -> tuple[int, ...]:
    """`widths=4,8`: the bits that a matrix may have; an engine may read only some."""
    text = str(options.pop("widths", ",".join(map(str, WIDTHS))))
    parts = {part.strip() for part in text.split(",")}
    widths = tuple(bits for bits in WIDTHS if str(bits) in parts)
    if len(widths) != len(parts) or len(widths) < 2:
        known = ", ".join(map(str, WIDTHS))
        raise UserError(f"widths is {text!r}", f"give at least two of {known}, such as widths=4,8")
    return widths


def _average_within(budget: Any, scheme: Scheme, num_weights: int) -> float:
    """The average width at which `num_weights` take `budget` bytes, scales and zero points included."""
    average = average_bits_within(parse_size(budget), num_weights, scheme)
    if average < 2:
        minimum = math.ceil(num_weights * replace(scheme, bits=2).bits_per_weight / 8)
        raise UserError(f"a budget of {budget} is too small for 2 bits each", f"give at least {minimum:,} bytes")
    return min(average, 8.0)


def _take_scaling(method: str, options: dict[str, Any]) -> str:
    """fp8's `scaling` decides the scheme, not the solver."""
    if method != "fp8" or "scaling" not in options:
        return ""
    scaling = str(options.pop("scaling"))
    if scaling not in FP8_SCALING:
        raise unknown_name("scaling of fp8", scaling, FP8_SCALING)
    return scaling


def _usual_group(inputs: Sequence[int]) -> int:
    for size in GROUP_SIZES:
        if all(width % size == 0 for width in inputs):
            return size
    return 0


def _overridden(override: LayerOverride, scheme: Scheme, name: str, method: Method) -> Scheme:
    changed = adjust(name, replace(method, scheme=scheme), override.bits, override.group_size, override.symmetric, "")
    return scheme if name == "fp8" else changed


def _make_steps(names: Sequence[str], options: Mapping[str, Any]) -> list[Step]:
    """Each option goes to the step that has it; "step.option" says which where two have it."""
    classes = {name: (TRANSFORMS if name in TRANSFORMS else SOLVERS).get(name) for name in names}
    values: dict[str, dict[str, Any]] = {name: {} for name in names}
    known = {name: {spec.name: spec for spec in fields(kind.Options)} for name, kind in classes.items()}
    for key, value in options.items():
        step, _, option = key.rpartition(".")
        owners = [name for name in names if option in known[name] and step in ("", name)]
        if not owners:
            valid = [f"{name}.{option}" for name in names for option in known[name]]
            raise unknown_name("option", key, valid or ["(none)"])
        if len(owners) > 1:
            raise UserError(f"both {' and '.join(owners)} have the option '{option}'", f"write {owners[0]}.{option}")
        values[owners[0]][option] = _typed(value, known[owners[0]][option].default)
    return [kind(values[name]) for name, kind in classes.items()]


def _typed(value: Any, default: Any) -> Any:
    """A command-line value converted to the option's type; parse_options refuses what does not fit."""
    if not isinstance(value, str) or isinstance(default, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
