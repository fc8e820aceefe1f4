"""What rounding lost of each matrix, as an adapter of low rank beside the quantized files: ZeroQuant-V2's compensation.

Of all pairs of factors the one is taken that leaves the least error at the matrix's output, on the inputs of the
calibration text; the blocks after it see base and adapter. The files are PEFT's, so whoever serves an adapter can
apply them. Called by the job; rounding itself knows nothing of it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tokenmill.checkpoint.adapters.adapter import Adapter, AdapterMatrix
from tokenmill.checkpoint.adapters.join import joined_as_stored
from tokenmill.checkpoint.adapters.peft import WEIGHTS_FILE
from tokenmill.checkpoint.adapters.write import write_adapter
from tokenmill.checkpoint.configs.tensor_names import naming_of, stored_name
from tokenmill.checkpoint.identity import model_hash
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import UserError
from tokenmill.quantize.calibrate import CalibratedBlock
from tokenmill.quantize.extract import factorize
from tokenmill.quantize.forecast import Forecast, block_kinds, float_bytes
from tokenmill.quantize.recipe import Recipe
from tokenmill.quantize.source import SourceModel
from tokenmill.quantize.workspace import Workspace

FOLDER = "low_rank"  # of the adapter, in the finished directory
_DAMPING = 0.01  # share of the mean second moment that every input is taken to have


def check_low_rank(rank: int, recipe: Recipe, last_steps: int) -> None:
    if rank < 0:
        raise UserError(f"--low-rank is {rank}", "give at least 1, such as 8")
    if recipe.scheme.element == "float":
        raise UserError(f"{recipe.method} rounds nothing that --low-rank could mend", "leave --low-rank out")
    if last_steps:
        raise UserError("--tune-scales and --train-codes change what --low-rank has mended", "leave one of them out")


def with_low_rank(forecast: Forecast, source: SourceModel) -> Forecast:
    """Also the errors of a block, and the second moments of its widest input with their factor in float64."""
    kinds = block_kinds(source)
    added = float_bytes(kinds) + max(20 * width**2 for kind in kinds for _, width in kind.sizes)
    return replace(forecast, memory_bytes=forecast.memory_bytes + added)


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The factors of a block's matrices, (b [out, rank], a [rank, in]) by name; squared output errors by name."""

    factors: Mapping[str, tuple[Tensor, Tensor]]
    kept: float
    whole: float


@torch.no_grad()
def mend_block(block: CalibratedBlock, quantized: Collection[str], rank: int, dtype: torch.dtype) -> Pairs:
    """Of a block that kept its `residuals` while the linears named became `quantized`. It then computes with its
    adapter, as stored."""
    assert block.residuals is not None
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    kept = whole = 0.0
    for group in block.groups:
        names = [name for name in group.names if name in quantized and block.residuals[name].any()]
        if not names:
            continue
        root = input_root(block.statistics(group, ("hessian",)).hessian)
        for name in names:
            b, a, kept_here, whole_here = weighted_factors(block.residuals[name], root, rank)
            factors[name] = (b.to(dtype), a.to(dtype))
            kept, whole = kept + kept_here, whole + whole_here
        for name in names:
            b, a = factors[name]
            block.replace(name, block.weight(name) + b.float() @ a.float())
    return Pairs(factors, kept, whole)


def input_root(hessian: Tensor | None) -> Tensor:
    """Lower L [in, in] of L L^T = the damped second moments, so that |D L|^2 is what a change D costs at the output."""
    assert hessian is not None
    moments = hessian.double()
    mean = float(moments.diagonal().mean())
    moments.diagonal().add_(_DAMPING * mean if mean else 1.0)  # inputs that no token reached: all alike
    return torch.linalg.cholesky(moments)


def weighted_factors(error: Tensor, root: Tensor, rank: int) -> tuple[Tensor, Tensor, float, float]:
    """(b, a, kept, whole): |(error - b a) root| is the least of this rank; the squares that b a keeps, and all."""
    found = factorize(error.double() @ root, rank)
    a = torch.linalg.solve_triangular(root, found.a.double(), upper=False, left=False)
    balance = (found.b.double().norm() / a.norm()).sqrt()  # so that neither factor leaves the range of 16-bit floats
    return (found.b / balance).float(), (a * balance).float(), found.kept, found.whole


def save_pairs(workspace: Workspace, index: int, pairs: Pairs) -> None:
    tensors = {
        f"{name}.{part}": each for name, pair in pairs.factors.items() for part, each in zip("ba", pair, strict=True)
    }
    squares = {"squares": json.dumps([pairs.kept, pairs.whole])}
    workspace.save(workspace.low_rank(index), {name: each.cpu() for name, each in tensors.items()}, squares)


def write_low_rank(workspace: Workspace, num_blocks: int, rank: int, dtype: torch.dtype, base: str) -> dict[str, Any]:
    """The adapter of the assembled files, in their folder, where the job makes one; what the card says of it."""
    if not rank:
        return {}
    matrices: dict[str, AdapterMatrix] = {}
    kept = whole = 0.0
    for index in range(num_blocks):
        path = workspace.low_rank(index)
        tensors = load_file(path)
        for name in (each.removesuffix(".b") for each in tensors if each.endswith(".b")):
            matrices[name] = AdapterMatrix(name, tensors[f"{name}.a"].float(), tensors[f"{name}.b"].float(), 1.0)
        with safe_open(path, "pt") as file:
            squares = json.loads(file.metadata()["squares"])
        kept, whole = kept + squares[0], whole + squares[1]
    checkpoint = open_checkpoint(workspace.result)
    adapter = Adapter(FOLDER, matrices, base_name=base, base_hash=model_hash(workspace.result))
    rename = partial(stored_name, naming_of(checkpoint.description.architecture))
    write_adapter(joined_as_stored(adapter, checkpoint), workspace.result / FOLDER, rename, dtype)
    size = (workspace.result / FOLDER / WEIGHTS_FILE).stat().st_size
    return {"low_rank": {"rank": rank, "bytes": size, "share_of_squared_error": kept / max(whole, 1e-30)}}
