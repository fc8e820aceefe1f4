"""Converts between file formats without requantizing: plan, write, verify the values, move into place.

Codes and scales are moved as they are; what would have to be rounded to a new grid is refused, with `quantize` as the
remedy. Every matrix of the finished output is read back and compared with the source, so "lossless" is measured, not
assumed. Streams block by block; the output appears complete or not at all. The writers are in convert_files.py. Called
by the CLI.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tokenmill.checkpoint.gguf import GGUFCheckpoint
from tokenmill.checkpoint.gguf_hybrid import rearranges
from tokenmill.errors import UserError, unknown_name
from tokenmill.model.formats.coded import type_name
from tokenmill.model.formats.files import FILE_FORMATS
from tokenmill.model.formats.files.base import FileFormat
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.convert_files import ConvertPlan, Move, write_directory, write_gguf
from tokenmill.quantize.convert_source import ConvertSource
from tokenmill.quantize.ggml.codes import type_for

DENSE, GGUF = "safetensors", "gguf"
FORMATS = (DENSE, GGUF, *FILE_FORMATS)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_QUANTIZE = "use `tokenmill quantize` to round it anew"
_HALF_SCALES = ("gptq", "gptq_v2", "awq")  # whose readers expect float16 scales
_EDGES = ("model.embed_tokens", "lm_head")


@dataclass(frozen=True, slots=True)
class Loss:
    name: str
    lost: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConvertReport:
    path: str
    format: str
    lossless: bool
    lost: tuple[Loss, ...]  # matrices and vectors whose values changed
    bytes: int
    types: dict[str, int]  # "INT4_G128 to Q4_0" -> how many matrices


def convert(
    path: Path, out: Path, format_name: str, dtype: str = "auto", source: ConvertSource | None = None
) -> ConvertReport:
    """`dtype`: of unquantized tensors in the output; "auto" keeps the stored type and expands codes to float32.
    `source`: what is written instead of the file's own values."""
    if format_name not in FORMATS:
        raise unknown_name("format to convert to", format_name, FORMATS)
    if dtype != "auto" and dtype not in DTYPES:
        raise unknown_name("dtype", dtype, ["auto", *DTYPES])
    if out.exists():
        raise UserError(f"{out} exists", "give another output, or remove it")
    if not out.absolute().parent.is_dir():
        raise UserError(f"{out.absolute().parent} is not a directory", "create it, or give another output")
    source = source or ConvertSource(path)
    plan = make_plan(source, format_name, DTYPES.get(dtype))
    working = out.with_name(f".{out.name}.converting")
    _check_space(source, plan, out)
    with cleaned_up(working):
        (write_gguf if format_name == GGUF else write_directory)(source, plan, working)
        losses = prove(source, ConvertSource(working), plan)
        size = sum(file.stat().st_size for file in ([working] if working.is_file() else working.iterdir()))
        os.replace(working, out)
    return ConvertReport(str(out), format_name, not losses, losses, size, plan.counts())


def make_plan(source: ConvertSource, format_name: str, dtype: torch.dtype | None) -> ConvertPlan:
    """How each matrix is converted; what cannot be is refused here, before anything is written."""
    if format_name == GGUF:
        return _plan_gguf(source, dtype)
    if format_name == DENSE:
        moves = [
            Move(prefix, _stored_as(source, prefix), _named(_dense_type(source, prefix, dtype)))
            for prefix in source.matrices
        ]
        plain = all(source.is_plain(move.prefix) for move in moves)
        if plain and dtype is None and not _is_gguf(source) and not source.changed:
            raise UserError(
                f"{source.checkpoint.path} is plain safetensors already", "give --dtype or another --format"
            )
        return ConvertPlan(moves, None, dtype)
    return _plan_codes(source, FILE_FORMATS.get(format_name), dtype)


def _plan_codes(source: ConvertSource, file_format: type[FileFormat], dtype: torch.dtype | None) -> ConvertPlan:
    schemes = {prefix: scheme for prefix in source.matrices if (scheme := _movable(source, prefix)) is not None}
    if not schemes:
        raise UserError(f"{source.checkpoint.path} has no quantized matrices that {file_format.name} holds", _QUANTIZE)
    # A file may mix matrices with and without zero points: write explicit ones for all.
    ints = [scheme for scheme in schemes.values() if scheme.element == "int"]
    if any(not scheme.symmetric for scheme in ints):
        schemes = {name: replace(each, symmetric=each.element != "int") for name, each in schemes.items()}
    moves, targets = [], {}
    for prefix in source.matrices:
        stored, scheme = _stored_as(source, prefix), schemes.get(prefix)
        if scheme is None:
            moves.append(Move(prefix, stored, _named(_dense_type(source, prefix, dtype))))
            continue
        lost: list[str] = []
        shape = source.shape(prefix)
        unrounded = replace(scheme, activations="none")
        if file_format.refuses(scheme, shape) and not file_format.refuses(unrounded, shape):
            lost = [f"its input is no longer rounded ({scheme.activations})"]
            scheme = unrounded
        targets[prefix] = scheme
        moves.append(Move(prefix, stored, type_name(scheme), scheme, tuple(lost), file_format.name in _HALF_SCALES))
    try:
        file_format.check(targets, {prefix: source.shape(prefix) for prefix in targets})
    except UserError as error:
        raise UserError(error.problem, f"{error.remedy}, or {_QUANTIZE}") from None
    return ConvertPlan(moves, file_format, dtype)


def _movable(source: ConvertSource, prefix: str) -> Scheme | None:
    """The scheme of a matrix whose codes are copied, None if it becomes floats; refuses blocks without a scheme."""
    if prefix in _EDGES and (_is_gguf(source) or prefix == _EDGES[0]):
        return None  # these formats keep the embedding and, by custom, the head as floats
    scheme = source.scheme(prefix)
    if scheme is None and not source.is_plain(prefix):
        raise _no_counterpart(source, prefix)
    return scheme


def _plan_gguf(source: ConvertSource, dtype: torch.dtype | None) -> ConvertPlan:
    if _is_gguf(source):
        raise UserError(
            f"{source.checkpoint.path} is a GGUF already", "use `tokenmill quantize --type` for other types in it"
        )
    if rearranges(source.description):
        raise UserError(
            f"the matrices of '{source.description.architecture}' lie otherwise in a GGUF: their codes cannot be moved",
            "use `tokenmill quantize --format gguf`",
        )
    moves = []
    for prefix in source.matrices:
        stored, scheme = _stored_as(source, prefix), source.scheme(prefix)
        if scheme is None:
            moves.append(Move(prefix, stored, _named(_dense_type(source, prefix, dtype))))
            continue
        ggml_type = type_for(scheme, source.shape(prefix)[1])
        if ggml_type is None:
            raise _no_counterpart(source, prefix)
        lost = () if scheme.activations == "none" else (f"its input is no longer rounded ({scheme.activations})",)
        moves.append(Move(prefix, stored, ggml_type, scheme, lost, half_scales=True))
    return ConvertPlan(moves, None, dtype)


def prove(source: ConvertSource, result: ConvertSource, plan: ConvertPlan) -> tuple[Loss, ...]:
    """Compare every value of the two; each difference is reported as a loss with its size."""
    losses = []
    for move in plan.moves:
        lost, error = list(move.lost), 0.0
        for begin, end in source.tiles(move.prefix):
            error = max(
                error, _difference(source.floats(move.prefix, begin, end), result.floats(move.prefix, begin, end))
            )
        if error:
            what = f"{'scales' if move.scheme else 'values'} rounded to {_rounded_to(move)}"
            lost.append(f"{what}: up to {error:.1e} of the largest value")
        source.release(move.prefix)
        if lost:
            losses.append(Loss(move.prefix, tuple(lost)))
    for name in source.vectors:
        error = _difference(source.as_used(name), result.as_used(name))
        if error:
            losses.append(Loss(name, (f"values rounded: up to {error:.1e} of the largest value",)))
    return tuple(losses)


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    if torch.equal(a, b):
        return 0.0
    if not bool(torch.isfinite(b).all()):
        raise UserError("some values do not fit the output's number type", "use --dtype bfloat16 or float32")
    return float((a - b).abs().max() / a.abs().max())


def _rounded_to(move: Move) -> str:
    if move.scheme is None:
        return move.becomes
    return (
        "float16, and offsets"
        if move.becomes in ("Q4_1", "Q5_1")
        else "float16"
        if move.half_scales
        else "the file's type"
    )


def _stored_as(source: ConvertSource, prefix: str) -> str:
    return source.weight(prefix).type_name


def _dense_type(source: ConvertSource, prefix: str, dtype: torch.dtype | None) -> torch.dtype:
    return source.stored_dtype(prefix) if dtype is None else dtype


def _named(dtype: torch.dtype) -> str:
    return {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]


def _is_gguf(source: ConvertSource) -> bool:
    return isinstance(source.checkpoint, GGUFCheckpoint)


def _no_counterpart(source: ConvertSource, prefix: str) -> UserError:
    kind = _stored_as(source, prefix)
    return UserError(f"{prefix} is {kind}: its codes fit nothing there and would have to be rounded again", _QUANTIZE)


def _check_space(source: ConvertSource, plan: ConvertPlan, out: Path) -> None:
    needed = 2 * plan.bytes_of(source)  # the parts, and the files they are joined into
    free = shutil.disk_usage(out.absolute().parent).free
    if free < needed:
        raise UserError(
            f"{out} needs {needed} bytes of working space, {free} are free there", "make room, or use another disk"
        )


@contextlib.contextmanager
def cleaned_up(working: Path) -> Iterator[None]:
    """Remove partial output on failure, also that of an earlier run that was killed."""

    def remove() -> None:
        shutil.rmtree(working) if working.is_dir() else working.unlink(missing_ok=True)

    try:
        remove()
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "make room, or use another disk" if full else "check the disk and its permissions"
        raise UserError(f"cannot write {working.parent}: {error.strerror or error}", remedy) from None
    finally:
        remove()
