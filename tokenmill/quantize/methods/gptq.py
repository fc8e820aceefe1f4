"""GPTQ: columns are rounded one after the other, and each one's error is pushed onto the columns not yet rounded, as
far as the inputs' correlations allow compensation.

The arithmetic is a recursion over column ranges: solve the left half, update the right half by one matrix product,
solve the right half. So nearly all work is matrix products, whatever the block size. Matrices that read one input are
stacked and share one factorization. What is rounded makes good for what earlier blocks lost (drift.py, unless
`target=block`). `metric=fisher` then mends codes and scales by what their errors cost the model's answers (refine.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenmill.errors import UserError, unknown_name
from tokenmill.log import get_logger
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.quantize.base import BlockView, ModelView, Solver
from tokenmill.quantize.fisher import GRAM_PASSES, GRAM_SEQUENCES
from tokenmill.quantize.methods.drift import JUDGED, undrifted
from tokenmill.quantize.methods.refine import fit_scales, refine
from tokenmill.quantize.methods.rtn import check_integer_scheme, choose_grid, round_to_nearest

_log = get_logger(__name__)
_LEAF = 16  # columns solved one by one
_INVERT_LEAF = 64
ORDERS = ("none", "static", "gar")
METRICS = ("plain", "fisher")
TARGETS = ("float", "block")
GRID_NORM = 2.0  # of the errors of which grids have least
_GRIDS = 8e3  # operations of a product in whose time a weight's grid is chosen and it is rounded, on one core
_SWEEP = 7e4  # operations of a product in whose time a weight is visited, on one core


def factor_hessian(hessian: Tensor, damping: float, order: Tensor | None = None) -> tuple[Tensor, float]:
    """(U, damping used): upper U with U^T U = (H + damping * mean(diag H) * I)^-1, columns taken in `order`.

    Instead of inverting H and factoring the inverse: a Cholesky of H from its last column up, H = M M^T with M upper,
    then U = M^-1. Inputs that were always zero count as independent. Damping grows until the factorization succeeds.
    """
    backwards = torch.arange(hessian.shape[0], device=hessian.device) if order is None else order
    backwards = backwards.flip(0)
    damped = hessian[backwards][:, backwards]
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1.0
    mean, added = float(diagonal.mean()), 0.0
    while True:
        diagonal.add_((damping - added) * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed) and bool(torch.isfinite(lower[-1, -1])):
            break
        added, damping = damping, max(damping + 0.01, damping * 2)
        if damping >= 1.0:
            raise UserError(
                "the calibration statistics cannot be factored", "give more or other calibration text, or use rtn"
            )
    del damped, diagonal
    factor = lower.flip(0, 1)
    del lower
    invert_upper_(factor)
    return factor, damping


def invert_upper_(matrix: Tensor) -> None:
    """Invert an upper triangular matrix in place, by halves: [[A, B], [0, C]]^-1 = [[A', -A'BC'], [0, C']]."""
    size = matrix.shape[0]
    if size <= _INVERT_LEAF:
        identity = torch.eye(size, dtype=matrix.dtype, device=matrix.device)
        matrix.copy_(torch.linalg.solve_triangular(matrix, identity, upper=True))
        return
    half = size // 2
    left, right, corner = matrix[:half, :half], matrix[half:, half:], matrix[:half, half:]
    invert_upper_(left)
    invert_upper_(right)
    corner.copy_((left @ corner @ right).neg_())


class Columns:
    """The state of one solve, transposed so that a column of W is contiguous: `weight` and `codes` are [in, out].

    Rounds to integers; subclasses for other number types override `round`.
    """

    def __init__(self, weight: Tensor, factor: Tensor, scheme: Scheme, norm: float, full_range: bool = False) -> None:
        self.weight, self.factor, self.scheme, self.norm = weight, factor, scheme, norm
        self.full_range = full_range
        self.codes = weight.new_empty(weight.shape, dtype=torch.uint8)
        self.errors = torch.empty_like(weight)
        self.group = scheme.group_size or weight.shape[0]
        num_groups = weight.shape[0] // self.group
        self.scales = weight.new_empty(num_groups, weight.shape[1])
        self.zeros = None if scheme.symmetric else torch.empty_like(self.scales)
        self.group_of: list[int] | None = None  # static: group of each column, grids fixed beforehand
        pruned = weight == 0.0
        self.pruned = pruned if bool(pruned.any()) else None  # zeros take no part in the compensation: they stay

    def solve(self, begin: int, end: int) -> None:
        """Round columns [begin, end); all updates from the columns before `begin` have been applied to them."""
        if self.group_of is None and end - begin == self.group and begin % self.group == 0:
            self._choose(begin // self.group)
        if end - begin <= _LEAF:
            self._solve_leaf(begin, end)
            return
        middle = self._split(begin, end)
        self.solve(begin, middle)
        # W[right] -= U[left, right]^T @ E[left]
        self.weight[middle:end].addmm_(self.factor[begin:middle, middle:end].T, self.errors[begin:middle], alpha=-1)
        self.solve(middle, end)

    def _split(self, begin: int, end: int) -> int:
        """The middle, at a group's edge as long as there is more than one group."""
        unit = self.group if end - begin > self.group else _LEAF if end - begin > 2 * _LEAF else 1
        return begin + max(unit, (end - begin) // 2 // unit * unit)

    def _choose(self, group: int) -> None:
        rows = self.weight[group * self.group : (group + 1) * self.group].T
        pivots = self.factor.diagonal()[group * self.group : (group + 1) * self.group]
        scales, zeros = choose_grid(rows, self._whole_row(), self.norm, pivots**-2, self.full_range)
        self.scales[group] = scales[:, 0]
        if self.zeros is not None and zeros is not None:
            self.zeros[group] = zeros[:, 0]

    def _whole_row(self) -> Scheme:
        return Scheme("int", self.scheme.bits, 0, symmetric=self.scheme.symmetric)

    def _solve_leaf(self, begin: int, end: int) -> None:
        small_groups = self.group_of is None and self.group < end - begin
        for column in range(begin, end):
            if small_groups and column % self.group == 0:  # all updates from the columns before it have been applied
                self._choose(column // self.group)
            group = self.group_of[column] if self.group_of is not None else column // self.group
            value, error = self.weight[column], self.errors[column]
            torch.sub(value, self.round(column, value, group), out=error)
            error.div_(self.factor[column, column])
            if column + 1 < end:
                self.weight[column + 1 : end].addr_(self.factor[column, column + 1 : end], error, alpha=-1)

    def round(self, column: int, value: Tensor, group: int) -> Tensor:
        """Fill in the codes of a column and return their values."""
        scale = self.scales[group]
        middle: float | Tensor = 2.0 ** (self.scheme.bits - 1) if self.zeros is None else self.zeros[group]
        if self.pruned is not None:
            value = value.masked_fill(self.pruned[column], 0.0)
        code = (value / scale).add_(middle).round_().clamp_(0, 2**self.scheme.bits - 1)
        self.codes[column] = code
        return code.sub_(middle).mul_(scale)


def column_order(diagonal: Tensor, group_size: int, order: str) -> Tensor | None:
    """The order in which columns are rounded: those with the largest inputs first, while others can compensate.

    "static": freely, grids are fixed before. "gar": whole groups by their largest, and inside each group, so that
    groups stay together and their grids can follow the updated weights.
    """
    if order == "none" or (order == "gar" and not group_size):
        return None if order == "none" else torch.argsort(diagonal, descending=True, stable=True)
    if order == "static":
        return torch.argsort(diagonal, descending=True, stable=True)
    groups = diagonal.view(-1, group_size)
    inside = torch.argsort(groups, dim=1, descending=True, stable=True)
    outside = torch.argsort(groups.amax(1), descending=True, stable=True)
    begins = torch.arange(groups.shape[0], device=groups.device).unsqueeze(1) * group_size
    return (inside + begins)[outside].reshape(-1)


def gptq(
    weight: Tensor,
    factor: Tensor,
    scheme: Scheme,
    order: Tensor | None = None,
    static: bool = False,
    norm: float = 0.0,
    full_range: bool = False,
) -> QuantizedMatrix:
    """`weight` [out, in] on `scheme`'s grid; `factor` is of the Hessian in the same column order as `order` says."""
    return solve_columns(weight, factor, scheme, order, static, norm, full_range)[0]


def solve_columns(
    weight: Tensor,
    factor: Tensor,
    scheme: Scheme,
    order: Tensor | None = None,
    static: bool = False,
    norm: float = 0.0,
    full_range: bool = False,
) -> tuple[QuantizedMatrix, Tensor]:
    """(the matrix, the weights [out, in] as they stood when their turn came, which round to the matrix)."""
    columns = weight.T[order] if order is not None else weight.T
    state = Columns(columns.contiguous().clone() if order is None else columns, factor, scheme, norm, full_range)
    if static:
        scales, zeros = choose_grid(weight, scheme, norm, full_range=full_range)
        state.scales, state.zeros = scales.T.contiguous(), None if zeros is None else zeros.T.contiguous()
        columns_in_order = order if order is not None else torch.arange(weight.shape[1], device=weight.device)
        state.group_of = (columns_in_order // state.group).tolist()
    state.solve(0, weight.shape[1])
    codes, weights, scales_of_groups, zeros_of_groups = state.codes, state.weight, state.scales, state.zeros
    if order is not None:
        codes, weights = _scattered(codes, order), _scattered(weights, order)
        if not static:  # groups were moved as wholes
            moved = order[:: state.group] // state.group
            scales_of_groups = _scattered(scales_of_groups, moved)
            zeros_of_groups = None if zeros_of_groups is None else _scattered(zeros_of_groups, moved)
    zeros = None if zeros_of_groups is None else zeros_of_groups.T.contiguous()
    matrix = QuantizedMatrix(scheme, codes.T.contiguous(), scales_of_groups.T.contiguous(), zeros)
    return matrix, weights.T.contiguous()


def _scattered(rows: Tensor, indices: Tensor) -> Tensor:
    result = torch.empty_like(rows)
    result[indices] = rows
    return result


class Gptq(Solver):
    name = "gptq"
    needs_calibration = True
    keeps_zeros = True

    @dataclass(frozen=True, slots=True)
    class Options:
        damping: float = 0.01  # share of the mean diagonal; grows by itself where the factorization fails
        order: str = "gar"  # "none", "static" or "gar": see column_order
        mse: bool = True  # grids of least error instead of min and max
        norm: float = GRID_NORM
        full_range: bool = True  # of symmetric grids below 8 bits: see range_grid
        least_tokens: float = 0.005  # share of tokens that must reach a matrix, else it is rounded to nearest
        target: str = "float"  # outputs of the float model; or "block": of its weights on the inputs as they are now
        metric: str = "plain"  # of errors; "fisher": codes are then mended by what they cost the model's answers
        sweeps: int = 10  # over the columns, while they are mended

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        self.needs_outputs = self.options.metric == "fisher"
        self.needs_targets = self.options.target == "float"
        self._grams: Mapping[str, Tensor] = {}

    def begin(self, model: ModelView) -> None:
        if self.needs_outputs:
            self._grams = model.remember(self.name, model.linear_grams)

    def check(self, name: str, shape: tuple[int, int], scheme: Scheme) -> None:
        check_integer_scheme(self.name, name, shape, scheme)
        if self.options.order not in ORDERS:
            raise unknown_name("order of gptq", self.options.order, ORDERS)
        if self.options.metric not in METRICS:
            raise unknown_name("metric of gptq", self.options.metric, METRICS)
        if self.options.target not in TARGETS:
            raise unknown_name("target of gptq", self.options.target, TARGETS)
        if self.options.sweeps < 1:
            raise UserError("gptq: sweeps is below 1", "give a count from 1, or metric=plain")
        if not 0 < self.options.damping < 1:
            raise UserError(f"gptq: damping is {self.options.damping}", "give a share of the mean, such as 0.01")
        if not 0 < self.options.norm < math.inf:
            raise UserError(f"gptq: norm is {self.options.norm}", "give a power such as 2, or mse=false for none")
        if not 0 <= self.options.least_tokens <= 1:
            raise UserError(f"gptq: least_tokens is {self.options.least_tokens}", "give a share from 0 to 1")

    def memory_bytes(self, shape: tuple[int, int]) -> int:
        """Three matrices like the Hessian while it is factored; weight, errors and a copy while columns are solved."""
        out_features, in_features = shape
        plain = 4 * in_features * max(3 * in_features, 2 * in_features + 4 * out_features)
        # Of the drift: second and cross moments of both halves of the sequences and second moments of all, and what is
        # solved beside them.
        plain = max(plain, 4 * in_features * (9 * in_features + 4 * out_features)) if self.needs_targets else plain
        return plain + (4 * out_features * 6 * in_features if self.needs_outputs else 0)

    def operations(self, num_weights: int, length: int) -> float:
        """Of what visits each weight, in the time of how many products; with a metric of gradients by outputs, too."""
        if not self.needs_outputs:
            return _GRIDS * num_weights
        sweeps = _SWEEP * self.options.sweeps
        return num_weights * (_GRIDS + 2.0 * GRAM_PASSES * GRAM_SEQUENCES * length + sweeps)

    def stack_operations(self, shape: tuple[int, int]) -> float:
        """Of fitting scales and, beside the float model, of the drift (drift.py)."""
        out, width = shape
        products = 4.0 * out * width**2
        if self.needs_targets:
            products += (2 / 3 + 2 * (out > width)) * width**3  # factors, and S
            products += ((2 if out > width else 4) * out + 4 * min(out, JUDGED)) * width**2
        return products

    def solve(self, block: BlockView, scheme_of: Mapping[str, Scheme]) -> dict[str, QuantizedMatrix]:
        total = sum(len(sequence) for sequence in block.inputs())
        matrices: dict[str, QuantizedMatrix] = {}
        for group in block.groups:
            names = [name for name in group.names if name in scheme_of]
            if not names:
                continue
            statistics, drift = block.statistics_beside_float(group)
            assert statistics.hessian is not None
            if statistics.num_tokens < self.options.least_tokens * total:
                _log.warning("%s received %d of %d tokens: rounded to nearest", names[0], statistics.num_tokens, total)
                solved = {name: round_to_nearest(block.weight(name), scheme_of[name]) for name in names}
            else:
                weights = {name: block.weight(name) for name in names}
                if drift is not None and self.needs_targets:
                    weights = undrifted(weights, drift)
                    for name, weight in weights.items():  # errors are those of what is rounded
                        block.replace(name, weight)
                drift = None
                solved = self._solve_group(weights, statistics.hessian, scheme_of)
                dead = statistics.hessian.diagonal() == 0
                for name in self._grams.keys() & solved.keys():
                    gram, wanted = self._grams[name].to(dead.device), weights[name].masked_fill(dead, 0.0)
                    solved[name] = refine(solved[name], wanted, statistics.hessian, gram, self.options.sweeps)
            del statistics
            for name, matrix in solved.items():
                block.replace(name, matrix.dequantize())
            matrices |= solved
        return matrices

    def _solve_group(
        self, weights: dict[str, Tensor], hessian: Tensor, scheme_of: Mapping[str, Scheme]
    ) -> dict[str, QuantizedMatrix]:
        """Stack matrices of equal scheme; factor once per column order."""
        static = self.options.order == "static"
        dead = hessian.diagonal() == 0
        by_scheme: dict[Scheme, list[str]] = {}
        for name in weights:
            by_scheme.setdefault(scheme_of[name], []).append(name)
        solved: dict[str, QuantizedMatrix] = {}
        for scheme, names in by_scheme.items():
            order = column_order(hessian.diagonal(), scheme.group_size, self.options.order)
            factor, damping = factor_hessian(hessian, self.options.damping, order)
            if damping > self.options.damping:
                _log.info("%s: damping raised to %.2f", names[0], damping)
            stacked = torch.cat([weights[name] for name in names])
            stacked[:, dead] = 0.0
            norm = self.options.norm if self.options.mse else 0.0
            full_range = self.options.full_range and scheme.bits < 8
            matrix = gptq(stacked, factor, scheme, order, static, norm, full_range)
            del factor
            matrix = fit_scales(matrix, stacked, hessian)
            solved |= unstacked(matrix, {name: weights[name].shape[0] for name in names})
        return solved


def unstacked(matrix: QuantizedMatrix, rows_of: Mapping[str, int]) -> dict[str, QuantizedMatrix]:
    """The matrices that were solved as one stack."""
    parts, begin = {}, 0
    for name, rows in rows_of.items():
        cut = slice(begin, begin + rows)
        zeros = None if matrix.zeros is None else matrix.zeros[cut]
        parts[name] = QuantizedMatrix(matrix.scheme, matrix.codes[cut], matrix.scales[cut], zeros)
        begin += rows
    return parts
