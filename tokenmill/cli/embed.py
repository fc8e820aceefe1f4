"""`tokenmill embed`: the vectors of the texts in a file, by an embedding model."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from tokenmill.cli.options import AsJson, Verbose, engine_options
from tokenmill.cli.output import print_json
from tokenmill.cli.progress import print_note
from tokenmill.config import EngineConfig
from tokenmill.errors import UserError

if TYPE_CHECKING:
    import numpy as np

_TEXTS_AT_ONCE = 4096  # bounds memory, and is enough to find texts of like length


@engine_options()
def embed(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Alias, Hugging Face id or directory.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Texts: lines, or JSON lines (.jsonl). -: stdin.")],
    out: Annotated[Path, typer.Option(help="File to write: .npy (a matrix) or .jsonl (a vector per line).")],
    field: Annotated[str, typer.Option(help="Key of the text in JSON lines.")] = "text",
    prompt_name: Annotated[str | None, typer.Option(help="A prompt of the model, put before each text.")] = None,
    prompt: Annotated[str | None, typer.Option(help="A text put before each text, instead.")] = None,
    dimensions: Annotated[int | None, typer.Option(help="Shorter vectors, of a model trained for them.")] = None,
    normalize: Annotated[
        bool, typer.Option("--normalize", help="Vectors of length one, also where the model does not make them so.")
    ] = False,
    as_json: AsJson = False,
    _verbose: Verbose = False,
    *,
    engine: EngineConfig,
) -> None:
    """Write the vector of each text of FILE, in order. Texts too long for the model are cut, with a warning."""
    if out.suffix not in (".npy", ".jsonl"):
        raise UserError(f"cannot tell the format of {out}", "give --out a name that ends in .npy or .jsonl")
    batches = _batches(_texts(file, field))
    first = next(batches)  # what is wrong with the file is found before the model is loaded
    from tokenmill.engine.embedding.embedder import Embedder

    began = time.perf_counter()
    number, dimension = 0, 0
    with Embedder(model, engine) as embedder, _Writer(out) as writer:
        loaded = time.perf_counter()
        batch: list[str] | None = first
        while batch is not None:
            vectors = embedder.embed(
                batch, prompt_name=prompt_name, prompt=prompt, dimensions=dimensions, normalize=normalize
            )
            writer.add(vectors)
            number, dimension = number + len(vectors), vectors.shape[1]
            batch = next(batches, None)
    seconds = time.perf_counter() - loaded
    if as_json:
        print_json({"out": str(out), "texts": number, "dimension": dimension, "seconds": round(seconds, 3),
                    "texts_s": round(number / seconds, 1), "load_seconds": round(loaded - began, 3)})  # fmt: skip
    else:
        print_note(f"{number} vectors of {dimension} dimensions: {out} ({number / seconds:.0f} texts/s)")


def _texts(file: Path, field: str) -> Iterator[str]:
    try:
        lines = sys.stdin if str(file) == "-" else file.open(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}", "check the path") from None
    with lines:
        try:
            for number, line in enumerate(lines, start=1):
                text = line.rstrip("\r\n")
                if file.suffix == ".jsonl":
                    text = _field(text, field, number, file)
                if not text:
                    raise UserError(f"line {number} of {file} is empty", "remove it, or give a text")
                yield text
        except UnicodeDecodeError:
            raise UserError(f"{file} is not UTF-8 text", "convert it first") from None
        except IsADirectoryError:
            raise UserError(f"{file} is a directory", "give a file of texts") from None


def _field(line: str, field: str, number: int, file: Path) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(f"line {number} of {file} is not JSON", "correct it") from None
    text = value.get(field) if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise UserError(f"line {number} of {file} has no text '{field}'", "name the key with --field")
    return text


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    found = False
    for text in texts:
        found = True
        batch.append(text)
        if len(batch) == _TEXTS_AT_ONCE:
            yield batch
            batch = []
    if not found:
        raise UserError("the file has no texts", "give at least one line")
    if batch:
        yield batch


class _Writer:
    """Writes vectors as they come: lines at once, a matrix at the end."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._lines: IO[str] | None = None
        self._parts: list[np.ndarray] = []
        self._number = 0

    def __enter__(self) -> _Writer:
        try:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            if self._out.suffix == ".jsonl":
                self._lines = self._out.open("w", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {self._out}: {error.strerror}", "give another --out") from None
        return self

    def add(self, vectors: np.ndarray) -> None:
        if self._lines is None:
            self._parts.append(vectors)
            return
        for vector in vectors.tolist():
            self._lines.write(json.dumps({"index": self._number, "embedding": vector}) + "\n")
            self._number += 1

    def __exit__(self, kind: object, _error: object, _trace: object) -> None:
        if self._lines is not None:
            self._lines.close()
        elif kind is None and self._parts:
            import numpy

            numpy.save(self._out, numpy.concatenate(self._parts))
