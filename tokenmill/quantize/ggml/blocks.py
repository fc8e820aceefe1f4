"""Float rows <-> ggml bytes, for every type that we write: in C++ where it is built, with a torch reference.

Checks what the caller can get wrong (row length, importance, values that are not numbers); the type files do the
arithmetic. Knows nothing of files or models. Called by export.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenmill.errors import UserError, unknown_name
from tokenmill.kernels import cpu, ref_ggml
from tokenmill.kernels.ggml_types import TYPES
from tokenmill.quantize.ggml import grid_blocks, simple_blocks, super_blocks

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SIMPLE: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "Q4_0": simple_blocks.q4_0,
    "Q4_1": simple_blocks.q4_1,
    "Q5_0": simple_blocks.q5_0,
    "Q5_1": simple_blocks.q5_1,
    "Q8_0": simple_blocks.q8_0,
    "IQ4_NL": simple_blocks.iq4_nl,
}
_SUPER: dict[str, tuple[Callable[[Tensor, Tensor | None], Tensor], int]] = {  # with the size of a group
    "Q2_K": (super_blocks.q2_k, 16),
    "Q3_K": (super_blocks.q3_k, 16),
    "Q4_K": (super_blocks.q4_k, 32),
    "Q5_K": (super_blocks.q5_k, 32),
    "Q6_K": (super_blocks.q6_k, 16),
    "IQ4_XS": (super_blocks.iq4_xs, 32),
}
_GRID: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {  # of rows as they are
    "IQ2_XXS": grid_blocks.iq2_xxs,
    "IQ2_XS": grid_blocks.iq2_xs,
    "IQ2_S": grid_blocks.iq2_s,
    "IQ3_XXS": grid_blocks.iq3_xxs,
    "IQ3_S": grid_blocks.iq3_s,
    "TQ1_0": grid_blocks.tq1_0,
    "TQ2_0": grid_blocks.tq2_0,
}
BLOCK_TYPES: tuple[str, ...] = (*_SIMPLE, *_SUPER, *_GRID)
# A channel that calibration hardly reached keeps a little importance: a group of zeros would lose its weights.
_LEAST_IMPORTANCE = 1e-9


def quantize(type_name: str, rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """float32 [n, in] -> uint8 [n, bytes per row].

    `importance` [in], >= 0, says how much an error in each column matters: the mean square of that input. Q8_0 and the
    plain types do not use it.
    """
    rows, importance = _checked(type_name, rows, importance)
    if type_name in PLAIN:
        return rows.to(PLAIN[type_name]).contiguous().view(torch.uint8)
    if cpu.unavailable(rows.device) is not None:
        return reference(type_name, rows, importance)
    out = torch.empty(rows.shape[0], TYPES[type_name].row_bytes(rows.shape[1]), dtype=torch.uint8)
    cpu.module().quantize_rows(cpu.pool(), type_name, rows, importance, out)
    return out


def reference(type_name: str, rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """As `quantize`, in plain torch: the reference of the C++ code, and the fallback where it is not built."""
    rows, importance = _checked(type_name, rows, importance)
    if type_name in _GRID:
        size = TYPES[type_name].block_size
        repeated = None if importance is None else importance.view(-1, size).repeat(rows.shape[0], 1)
        return _GRID[type_name](rows.view(-1, size), repeated).reshape(rows.shape[0], -1)
    group = 32 if type_name in _SIMPLE else _SUPER[type_name][1]
    x = rows.reshape(-1, group).t().contiguous()  # [group, groups of all rows]
    repeated = None
    if importance is not None:
        repeated = importance.view(-1, group).t().repeat(1, rows.shape[0])
    if type_name in _SIMPLE:
        weights = simple_blocks.block_weights if type_name == "IQ4_NL" else simple_blocks.row_weights
        packed = _SIMPLE[type_name](x, None if repeated is None else weights(x, repeated, rows.shape[1] // group))
    else:
        packed = _SUPER[type_name][0](x, repeated)
    return packed.reshape(rows.shape[0], -1)


def dequantize(type_name: str, data: Tensor) -> Tensor:
    """Bytes [n, bytes per row] (or a plain dtype) -> float32 [n, in], in C++ where it is built, else by ref_ggml."""
    if type_name in PLAIN or cpu.unavailable(data.device) is not None:
        return ref_ggml.dequantize(type_name, data)
    layout = TYPES[type_name]
    rows = torch.empty(data.shape[0], data.shape[1] // layout.block_bytes * layout.block_size)
    every_row = torch.arange(data.shape[0])
    cpu.module().embed(cpu.pool(), type_name, data.contiguous(), data.shape[0], every_row, 1.0, rows)
    return rows


def _checked(type_name: str, rows: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if type_name not in PLAIN and type_name not in BLOCK_TYPES:
        raise unknown_name("ggml type to quantize to", type_name, [*PLAIN, *BLOCK_TYPES])
    block = TYPES[type_name].block_size
    if rows.ndim != 2 or rows.shape[1] % block:
        raise UserError(
            f"{type_name} needs rows of a multiple of {block} values, these have {rows.shape[-1]}",
            "choose F16, or a type with blocks of 32" if block > 32 else "choose F16 for this tensor",
        )
    rows = rows.float().contiguous()
    if not bool(torch.isfinite(rows).all()):
        raise UserError("the weights hold values that are not numbers (NaN or infinity)", "use an undamaged checkpoint")
    if importance is None or type_name in PLAIN or type_name == "Q8_0":
        return rows, None
    importance = importance.float().contiguous()
    if importance.shape != (rows.shape[1],) or not bool((torch.isfinite(importance) & (importance >= 0)).all()):
        raise UserError(
            f"the importance {list(importance.shape)} of rows of {rows.shape[1]} has another length or negative values",
            "collect it again for this model",
        )
    mean = float(importance.double().mean())
    if mean == 0.0:
        return rows, None
    return rows, importance.clamp(min=mean * _LEAST_IMPORTANCE)
