"""Errors that cross layers.

A `UserError` can be fixed by the user: it says what is wrong and what to do, in one line. The CLI turns it into exit
code 2, the server into HTTP 400. Everything else that escapes is our bug (exit 1). Called by every layer.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input. `problem` says what is wrong, `remedy` what to do about it."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = problem.rstrip(".")
        self.remedy = remedy.rstrip(".")
        super().__init__(f"{self.problem}. {self.remedy}." if self.remedy else f"{self.problem}.")


class CheckpointError(UserError):
    """The file or directory is corrupt, truncated, or holds something we do not run."""


class UnavailableError(UserError):
    """A source, device or package that the request needs cannot be reached from here."""


def unknown_name(kind: str, name: str, valid: Iterable[str]) -> UserError:
    """The error for a name that is not in a table: suggests the nearest one and lists the rest."""
    names = sorted(valid)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return UserError(f"unknown {kind} '{name}'", f"{hint}valid: {', '.join(names)}")
