"""A Jinja environment for templates nobody has reviewed: they come with the weights, from anywhere.

On top of Jinja's own sandbox (no attribute tricks, nothing mutable) it bounds what a template may use: steps, time, the
size of numbers and strings. Breaking a bound raises SecurityError. Syntax and helpers are those that Hugging Face
templates rely on. Called by chat_template.py.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_STEPS = 200_000  # loop iterations and calls in one rendering
MAX_SECONDS = 5.0
MAX_COUNT = 100_000  # widths, repetitions
MAX_TEXT = 16 * 2**20  # characters of any one string

_TOO_LONG = "it makes a text that is too long"
_FILTERS_WITH_COUNTS = frozenset(("batch", "center", "format", "indent", "slice", "truncate", "wordwrap"))


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Renders one template at a time; `begin` starts the count of steps anew."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters |= {"tojson": _to_json, "join": _join}
        for name, function in list(self.filters.items()):
            self.filters[name] = _bounded(name, function)
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = _Namespace
        self.begin()

    def begin(self) -> None:
        self._steps = 0
        self._deadline = time.monotonic() + MAX_SECONDS

    def count_steps(self, values: Iterable[Any]) -> Iterator[Any]:
        """Stands around what every loop of the template runs over."""
        for value in values:
            self._step()
            yield value

    def join_text(self, *parts: Any) -> str:
        """Stands for the `~` operator."""
        return _joined("", [str(part) for part in parts])

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self._step()
        owner, values = getattr(__obj, "__self__", None), (*args, *kwargs.values())
        if isinstance(owner, str):
            _check_counts(values)
            _check_sizes((owner, *values))
            if __obj.__name__ == "join" and values:
                return _joined(owner, list(values[0]))
        return _check_text(super().call(__context, __obj, *args, **kwargs))

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Jinja would let a forbidden attribute be printed as nothing."""
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_format(left)
            _check_counts(right if isinstance(right, tuple) else (right,))
        elif operator in ("*", "**"):
            _check_product(operator, left, right)
        return _check_text(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _helper("count_steps", [loop.iter])
        _replace_concatenations(tree)
        return tree

    def _step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS or time.monotonic() > self._deadline:
            raise SecurityError("it runs for too long")


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Refuses names that would reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may use the name `self`
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the name {name!r} is not available")


def _helper(name: str, arguments: list[nodes.Node]) -> nodes.Call:
    """A call of the environment's own method, whatever names the template has given new meanings."""
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)


def _replace_concatenations(node: nodes.Node) -> None:
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Concat):
            setattr(node, field, _helper("join_text", list(value.nodes)))
        elif isinstance(value, list):
            value[:] = [_helper("join_text", list(v.nodes)) if isinstance(v, nodes.Concat) else v for v in value]
    for child in node.iter_child_nodes():
        _replace_concatenations(child)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # also copies the mark by which Jinja passes the context
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if name in _FILTERS_WITH_COUNTS:
            _check_counts((*args[1:], *kwargs.values()))
        if name == "format":
            _check_format(str(args[0]))
        _check_sizes((*args, *kwargs.values()))
        return _check_text(function(*args, **kwargs))

    return bounded


def _joined(separator: str, parts: list[str]) -> str:
    if sum(len(part) + len(separator) for part in parts) > MAX_TEXT:
        raise SecurityError(_TOO_LONG)
    return separator.join(parts)


def _join(values: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        values = [value.get(attribute, "") if isinstance(value, dict) else "" for value in values]
    return _joined(str(d), [str(value) for value in values])


def _check_counts(values: tuple[Any, ...]) -> None:
    if any(isinstance(value, (int, float)) and abs(value) > MAX_COUNT for value in values):
        raise SecurityError("it uses a count that is too large")


def _check_sizes(values: tuple[Any, ...]) -> None:
    """Two sizes whose product (as in replace and join) would be huge."""
    sizes = sorted(len(value) for value in values if isinstance(value, (str, list, tuple)))
    if len(sizes) > 1 and sizes[-1] * sizes[-2] > 16 * MAX_TEXT:
        raise SecurityError(_TOO_LONG)


def _check_format(pattern: str) -> None:
    if re.search(r"[0-9]{6,}", pattern):
        raise SecurityError("it formats with a width that is too large")


def _check_product(operator: str, left: Any, right: Any) -> None:
    if not all(isinstance(value, (int, float, str, list, tuple)) for value in (left, right)):
        return
    numeric = all(isinstance(value, (int, float)) for value in (left, right))
    first, second = (abs(value) if isinstance(value, (int, float)) else len(value) for value in (left, right))
    fits = first <= 2**16 and second <= 64 if operator == "**" else first * second <= (2**63 if numeric else MAX_COUNT)
    if not fits:
        raise SecurityError("it computes something that is too large")


def _check_text(value: Any) -> Any:
    if isinstance(value, (str, list, tuple)) and len(value) > MAX_TEXT:
        raise SecurityError(_TOO_LONG)
    return value


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML, which would reach the model."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
