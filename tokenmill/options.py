"""What an option is: a field of a record that is also a flag, a variable and a key of a config file.

Loose values (text of a flag, a file or a variable) become values of the option's type, and are checked against its
range. config.py and serve/config.py declare the options themselves; knows none of them by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import Field, field, fields
from typing import Any

from tokenmill.errors import UserError, unknown_name
from tokenmill.peer_options import translate
from tokenmill.units import parse_count as parse_count
from tokenmill.units import parse_milliseconds as parse_milliseconds
from tokenmill.units import parse_size as parse_size

_TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def option(
    default: Any,
    help: str,
    *,
    kind: type | None = None,
    metavar: str = "",
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    parse: Any = None,
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """A field that is also a flag. `default` None means automatic, and `kind` is then the type of a set value."""
    kind = kind or type(default)
    assert kind is not type(None), "an automatic option must state its kind"
    metadata = {"help": help, "kind": kind, "metavar": metavar, "aliases": aliases, "choices": choices}
    return field(default=default, metadata=metadata | {"parse": parse, "low": low, "high": high})


def size_option(help: str, default: int = 0, low: int = 0) -> Any:
    return option(default, help, metavar="SIZE", parse=parse_size, low=low)


def automatic(kind: type, help: str, **details: Any) -> Any:
    """An option that is decided by hardware or model unless it is set."""
    return option(None, help, kind=kind, **details)


def option_fields(record: type) -> tuple[Field[Any], ...]:
    """The fields of a record that are options."""
    return tuple(spec for spec in fields(record) if "help" in spec.metadata)


def is_automatic(value: Any) -> bool:
    """Whether a value given for an automatic option leaves it automatic."""
    return value is None or (isinstance(value, str) and value.lower() in ("", "auto"))


def convert(spec: Field[Any], value: Any) -> Any:
    """A loose value (text of a flag, a file or a variable) as the type of the option; other values stay as they are."""
    kind = spec.metadata["kind"]
    if spec.default is None and is_automatic(value):
        return None
    if kind is tuple and not isinstance(value, tuple):
        return tuple(value.split(",")) if isinstance(value, str) else tuple(value)
    if not isinstance(value, str):
        return float(value) if kind is float and type(value) is int else value
    if spec.metadata["parse"] is not None:
        return spec.metadata["parse"](value)
    if kind is bool:
        return _TRUTH.get(value.lower(), value)
    if kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            return value
    return value


def check(spec: Field[Any], value: Any) -> None:
    """Raise a UserError for a value of the wrong type or out of range."""
    kind, low, high = spec.metadata["kind"], spec.metadata["low"], spec.metadata["high"]
    if spec.default is None and value is None:
        return
    or_automatic = ", or leave it out: automatic" if spec.default is None else ""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{spec.name} must be a {kind.__name__}, got {value!r}", f"correct it{or_automatic}")
    if (low is not None and value < low) or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"{low} to {high}"
        raise UserError(f"{spec.name} is {value}", f"give {allowed}{or_automatic}")
    choices = spec.metadata["choices"]
    if choices and value not in choices:
        raise unknown_name(spec.name, value, choices)


def by_option_name(options: Mapping[str, Any], specs: Iterable[Field[Any]]) -> dict[str, Any]:
    """Loose options under our names: dashes and other engines' names are mapped, what is unknown is refused."""
    known = {spec.name: spec for spec in specs}
    found: dict[str, Any] = {}
    for key, value in options.items():
        name = key.replace("-", "_")
        means = translate(name, value)
        if means is None:
            if name not in known:
                raise unknown_name("option", key, known)
            means = {name: value}
        for ours, meant in means.items():
            if ours not in known:
                raise UserError(f"option '{key}' means {ours}, which is not available here", f"leave {key} out")
            if ours in found:
                raise UserError(f"option '{key}' is given twice (it means {ours})", "keep one of them")
            found[ours] = convert(known[ours], meant)
    return found


def from_environment(specs: Iterable[Field[Any]], environment: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Name -> (value, source) of options that have a variable such as TOKENMILL_CONTEXT."""
    found = {}
    for spec in specs:
        variable = f"TOKENMILL_{spec.name.upper()}"
        if environment.get(variable):
            try:
                value = convert(spec, environment[variable])
                check(spec, value)
            except UserError as error:
                raise UserError(f"environment variable {variable}: {error.problem}", error.remedy) from None
            found[spec.name] = value, f"from environment variable {variable}"
    return found
