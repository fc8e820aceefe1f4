"""Checks of numbers that callers give: type and range, with what is allowed in the error."""

from __future__ import annotations

import math

from tokenmill.errors import UserError


def check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{name} must be a whole number, got {value!r}", f"give {low} to {high}")
    if not low <= value <= high:
        raise UserError(f"{name} is {value}", f"give {low} to {high}")


def check_float(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise UserError(f"{name} must be a number, got {value!r}", f"give {low:g} to {high:g}")
    if not low <= value <= high or (open_low and value == low):
        span = f"more than {low:g} and at most {high:g}" if open_low else f"{low:g} to {high:g}"
        raise UserError(f"{name} is {value:g}", f"give {span}")
