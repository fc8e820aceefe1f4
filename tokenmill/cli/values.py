"""Parsers of structured flag values: lists of token ids, logit biases.

Pure functions from text, with the remedy in the error. Used by options.py and the verbs.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.errors import UserError


def parse_ids(text: str | Sequence[int]) -> list[int]:
    """ "1,2,3" or "1 2 3" -> [1, 2, 3]."""
    if not isinstance(text, str):
        return list(text)
    words = text.replace(",", " ").strip("[] ").split()
    if not words or not all(word.lstrip("-").isdecimal() for word in words):
        raise UserError(f"'{text}' is not a list of token ids", "write it like 1,2,3")
    return [int(word) for word in words]


def parse_biases(pairs: Sequence[str]) -> dict[int, float]:
    """["12=-5", "7=1.5"] -> {12: -5.0, 7: 1.5}."""
    biases = {}
    for pair in pairs:
        token_id, _, bias = pair.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise UserError(f"'{pair}' is not a logit bias", "write it like 1234=-5, token id first") from None
    return biases
