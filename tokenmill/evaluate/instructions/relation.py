"""How a count is compared with the number that an instruction names."""

from __future__ import annotations

from tokenmill.errors import unknown_name


def holds(count: int, relation: str, number: int) -> bool:
    if relation == "at least":
        return count >= number
    if relation == "less than":
        return count < number
    raise unknown_name("relation", relation, ("at least", "less than"))
