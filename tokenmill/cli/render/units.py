"""Numbers with their units, as people read them: 92.1 MiB, 310 ms, 1,326 tok/s, $0.41.

Pure functions from a number to text; a missing number is a dash. Used by the screens and by progress messages.
"""

from __future__ import annotations

MISSING = "-"
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))


def plain_number(value: float | None) -> str:
    """Three significant digits below 100, whole numbers with separators above."""
    if value is None:
        return MISSING
    if value == 0 or abs(value) >= 99.95:
        return f"{value:,.0f}"
    if abs(value) >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.995 else f"{value:.3g}"


def size(num_bytes: float | None) -> str:
    if num_bytes is None:
        return MISSING
    amount, unit = float(num_bytes), 0
    while abs(amount) >= 1000 and unit < len(_SIZES) - 1:
        amount /= 1024
        unit += 1
    return f"{amount:.0f} B" if unit == 0 else f"{plain_number(amount)} {_SIZES[unit]}"


def gibibytes(amount: float | None) -> str:
    return MISSING if amount is None else f"{amount:.1f} GiB"


def milliseconds(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{plain_number(value / 1000)} s" if abs(value) >= 10_000 else f"{plain_number(value)} ms"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return MISSING
    if seconds < 60:
        return f"{plain_number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def tokens_per_second(value: float | None) -> str:
    return MISSING if value is None else f"{plain_number(value)} tok/s"


def percent(share: float | None, digits: int = 0) -> str:
    """0.417 -> 42%; one that would read as nothing or as everything keeps a digit more."""
    if share is None:
        return MISSING
    value = 100 * share
    if digits == 0 and value and (abs(value) < 1 or 99 < abs(value) < 100):
        digits = 1
    return f"{value:.{digits}f}%"


def change(share: float | None, digits: int = 1) -> str:
    """A difference, with its sign: +22.5%."""
    return MISSING if share is None else f"{100 * share:+.{digits}f}%"


def dollars(value: float | None) -> str:
    if value is None:
        return MISSING
    if value == 0 or abs(value) >= 99.5:
        return f"${value:,.0f}"
    return f"${value:.2f}" if abs(value) >= 0.1 else f"${value:.2g}"


def quantity(value: float | None) -> str:
    """Parameters and the like: 134.5 M, 70.6 B."""
    if value is None:
        return MISSING
    for factor, unit in _COUNTS:
        if abs(value) >= factor:
            return f"{value / factor:.1f} {unit}"
    return f"{value:,.0f}"


def count(value: float | None) -> str:
    return MISSING if value is None else f"{value:,.0f}"


def counted(value: int, noun: str, plural: str = "") -> str:
    """1 device, 2 devices."""
    return f"{value:,} {noun if value == 1 else plural or noun + 's'}"
