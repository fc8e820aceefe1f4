"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tokenmill.cli.render import units


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        (units.size, 0, "0 B"),
        (units.size, 999, "999 B"),
        (units.size, 1000, "0.977 KiB"),
        (units.size, 46080, "45.0 KiB"),
        (units.size, 96_576_768, "92.1 MiB"),
        (units.size, 72 * 2**30, "72.0 GiB"),
        (units.size, None, "-"),
        (units.milliseconds, 309.841, "310 ms"),
        (units.milliseconds, 23.02, "23.0 ms"),
        (units.milliseconds, 0.0123, "0.0123 ms"),
        (units.milliseconds, 12_345, "12.3 s"),
        (units.duration, 0.198, "0.198 s"),
        (units.duration, 59.97, "60.0 s"),
        (units.duration, 80, "1 min 20 s"),
        (units.duration, 3_900, "1 h 05 min"),
        (units.tokens_per_second, 1325.9, "1,326 tok/s"),
        (units.tokens_per_second, 9.996, "10.0 tok/s"),
        (units.percent, 0.417, "42%"),
        (units.percent, 0.004, "0.4%"),
        (units.percent, 0.9996, "100.0%"),
        (units.percent, 1.0, "100%"),
        (units.percent, 0.0, "0%"),
        (units.change, -0.6, "-60.0%"),
        (units.change, 0.2246, "+22.5%"),
        (units.dollars, 0.4123, "$0.41"),
        (units.dollars, 0.0235, "$0.024"),
        (units.dollars, 4605.0, "$4,605"),
        (units.dollars, 0, "$0"),
        (units.quantity, 134_515_008, "134.5 M"),
        (units.quantity, 70_552_387_584, "70.6 B"),
        (units.quantity, 35_136, "35,136"),
        (units.plain_number, 99.96, "100"),
        (units.plain_number, -0.5, "-0.5"),
    ],
)
def test_units(unit: Callable[[Any], str], value: float | None, text: str) -> None:
    assert unit(value) == text


def test_nouns_agree_with_their_number() -> None:
    assert (units.counted(1, "core"), units.counted(2, "core")) == ("1 core", "2 cores")
    assert units.counted(1200, "query", "queries") == "1,200 queries"
