"""Rows of components: a head is centered and turned by a matrix, and each component rounded with bits of its own.

A row is the codes, from the first component to the last, and a byte for its gain. Matrix, bits and levels are fixed
beforehand: measured (`measured_rows`: components without correlation, bits where they lower the error most), or a
Hadamard matrix and nearly equal bits (`rotated_rows`), which needs no measurement. Knows nothing of pages and
positions. Used by the KVQuant stores; plain torch, in float64 where a last bit could turn a code.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.model.kvstore.packing import pack_codes
from tokenmill.model.kvstore.rotation import Rotation

MAX_BITS = 8  # of a component
_STEPS = 16  # of the gain for each factor of two: 1.3 % of error at most beside 15 % by the codes
_MIDDLE, _LARGEST, _NOT_FINITE = (
    128,
    254,
    255,
)  # codes of gains: one, the largest, of a row with NaN or infinity; 0: zero
_OFFSETS = (0, -4, -2, 2)  # in steps: gains that are tried, as rows are never quite normal (turboquant.py: GAINS)
_MIN_SPREAD = 1e-6
_LEVEL_SAMPLES = 1 << 16  # that levels are fitted to
_ROUNDS = 60


@dataclass(frozen=True, eq=False)
class ComponentRows:
    """Of one layer's keys or values; tensors on the device of the pages."""

    center: Tensor  # float32 [kv_heads, head_dim]
    basis: Tensor  # float32 [kv_heads, head_dim, head_dim]: components are (head - center) @ basis
    inverse: Tensor  # float32, of the basis
    spread: Tensor  # float32 [kv_heads, head_dim]: root mean square of each component over its row's gain
    bits: Tensor  # int64 [kv_heads, head_dim]; the sum over a head fits into its bytes
    levels: Tensor  # float32 [2^(MAX_BITS + 1) - 1]: those of b bits are the 2^b from 2^b - 1 on
    row_bytes: int  # with the gain

    def encode(self, heads: Tensor) -> Tensor:
        """float32 [T, kv_heads, head_dim] -> uint8 [T, kv_heads, row_bytes]."""
        centered = (heads.double() - self.center).transpose(0, 1)  # [kv_heads, T, head_dim]
        target = ((centered @ self.basis.double()).float() / self.spread[:, None]).transpose(0, 1)
        finite = target.isfinite().all(-1, keepdim=True)
        target = torch.where(finite, target, 0.0)
        gain = _gain_code(target.square().mean(-1, keepdim=True).sqrt())
        weights = self.spread.square()
        best: tuple[Tensor, Tensor, Tensor] | None = None  # codes, gain, error
        for offset in _OFFSETS:
            tried = torch.where(gain > 0, (gain + offset).clamp(1, _LARGEST), 0)
            codes = self._nearest(target / _gain(tried.clamp(min=1)))
            error = ((self._level(codes) * _gain(tried) - target).square() * weights).sum(-1, keepdim=True)
            if best is not None:
                better = error < best[2]
                codes, tried, error = (
                    torch.where(better, new, old) for new, old in zip((codes, tried, error), best, strict=True)
                )
            best = codes, tried, error
        assert best is not None
        codes, gain, _ = best
        # Levels are means of their cells, so that what is read would be too short, which harms a model more than noise
        # does: the gain is stored that makes the product of a row with itself exact.
        product = (self._level(codes) * target * weights).sum(-1, keepdim=True)
        length = (target.square() * weights).sum(-1, keepdim=True) / product
        gain = torch.where((product > 0) & (gain > 0), _gain_code(length), gain)
        gain = torch.where(finite, gain, _NOT_FINITE)
        return torch.cat((self._pack(codes), gain.to(torch.uint8)), -1)

    def decode(self, rows: Tensor) -> Tensor:
        """uint8 [pages, kv_heads, page_size, row_bytes] -> float32 [pages, kv_heads, page_size, head_dim]."""
        gain = _gain(rows[..., -1:].long())
        levels = self._level(self._unpack(rows).transpose(1, 2)).transpose(1, 2)
        components = levels * gain * self.spread[:, None]
        return (components.double() @ self.inverse.double()).float() + self.center[:, None]

    def constants(self) -> list[Tensor]:
        """What two processes must share to read each other's rows."""
        return [self.center, self.basis, self.spread, self.bits, self.levels]

    def held(self) -> list[Tensor]:
        """All tensors, those too that are worked out at the first use."""
        kinds = [tensor for kind in self._kinds for tensor in kind]
        return [*self.constants(), self.inverse, self._starts, *kinds]

    def moved(self, device: torch.device) -> ComponentRows:
        tensors = (self.center, self.basis, self.inverse, self.spread, self.bits, self.levels)
        center, basis, inverse, spread, bits, levels = (each.to(device) for each in tensors)
        return ComponentRows(center, basis, inverse, spread, bits, levels, self.row_bytes)

    @cached_property
    def _starts(self) -> Tensor:
        """[kv_heads, head_dim]: of each component in the bits of a row."""
        return self.bits.cumsum(-1) - self.bits

    @cached_property
    def _kinds(self) -> list[tuple[Tensor, Tensor]]:
        """For each number of bits: the components that have them [kv_heads, head_dim], and the bounds of levels."""
        kinds = [(self.bits == bits, self._levels_of(bits)) for bits in range(1, MAX_BITS + 1)]
        return [(where, (levels[1:] + levels[:-1]) / 2) for where, levels in kinds if bool(where.any())]

    def _levels_of(self, bits: int) -> Tensor:
        return self.levels[(1 << bits) - 1 : (2 << bits) - 1]

    def _nearest(self, target: Tensor) -> Tensor:
        codes = torch.zeros_like(target, dtype=torch.int64)
        for where, bounds in self._kinds:
            codes[:, where] = torch.bucketize(target[:, where], bounds)
        return codes

    def _level(self, codes: Tensor) -> Tensor:
        """[..., kv_heads, head_dim]"""
        return self.levels[codes + (1 << self.bits) - 1]

    def _pack(self, codes: Tensor) -> Tensor:
        """Codes [T, kv_heads, head_dim] -> uint8 [T, kv_heads, row_bytes - 1], low bits first."""
        place = torch.arange(8 * (self.row_bytes - 1), device=codes.device).expand(len(self.bits), -1).contiguous()
        ends = (self._starts + self.bits).contiguous()
        component = torch.searchsorted(ends, place, right=True).clamp(max=codes.shape[-1] - 1)
        shift = place - self._starts.gather(1, component)
        picked = codes.gather(-1, component.expand(len(codes), -1, -1))
        return pack_codes((picked >> shift) & 1, 1)

    def _unpack(self, rows: Tensor) -> Tensor:
        """uint8 [pages, kv_heads, page_size, row_bytes] -> codes, int64 [pages, kv_heads, page_size, head_dim]."""
        byte, shift = self._starts // 8, self._starts % 8
        shape = (rows.shape[0], -1, rows.shape[2], -1)
        # A code ends in the next byte at most; behind the last one lies the gain.
        low, high = (
            rows.gather(-1, (byte + more).clamp(max=self.row_bytes - 1)[:, None].expand(shape)).long()
            for more in (0, 1)
        )
        return ((low | high << 8) >> shift[:, None]) & ((1 << self.bits) - 1)[:, None]


def held_bytes(heads: int, head_dim: int, measured: bool) -> int:
    """At most, of `ComponentRows.held`; of rotated rows without the matrix and the levels, which all share."""
    numbers = heads * head_dim * (4 + 4 + 8 + 8 + MAX_BITS)  # center, spread, bits, starts, kinds
    bounds = (2 << MAX_BITS) * 4
    return numbers + bounds + measured * (bounds + heads * 2 * head_dim * head_dim * 4)  # levels, basis, inverse


def shared_bytes(head_dim: int) -> int:
    """What all rotated rows hold together."""
    return 4 * (head_dim * head_dim + (2 << MAX_BITS))


def row_bytes(head_dim: int, bits: float) -> int:
    """Of a row with `bits` for each value."""
    if head_dim % 8:
        raise UserError(f"heads of {head_dim} values cannot be packed", "use --kv-cache-dtype float16")
    return -int(-head_dim * bits // 8) + 1


def rotated_rows(center: Tensor, num_bytes: int) -> ComponentRows:
    """Rows around `center` [kv_heads, head_dim] as a Hadamard matrix turns them; some components have a bit more."""
    heads, size = center.shape
    basis, levels = _hadamard_basis(size, center.device), _normal_levels(center.device)
    least, more = divmod(8 * (num_bytes - 1), size)
    bits = torch.full((heads, size), least, device=center.device)
    bits[:, :more] += 1
    turn, back = (each.expand(heads, -1, -1) for each in (basis, basis.T))
    return ComponentRows(center, turn, back, torch.ones_like(center), bits, levels, num_bytes)


@cache
def _hadamard_basis(size: int, device: torch.device) -> Tensor:
    """Shared by all layers."""
    return Rotation(size).rotate(torch.eye(size, dtype=torch.float64)).float().to(device)


def measured_rows(sample: Tensor, center: Tensor, metric: Tensor, num_bytes: int) -> ComponentRows:
    """Rows for heads like `sample` [N, kv_heads, head_dim] around `center`, where e has the error e^T metric e.

    With metric = L L^T the error of L^T head is a plain one; its components along the eigenvectors of its covariance
    (Karhunen-Loeve) have no correlation, and each gets bits while they lower the sum of errors most (reverse
    water-filling). `metric` [kv_heads, head_dim, head_dim] is positive definite."""
    deviation = (sample - center).double().transpose(0, 1)  # [kv_heads, N, head_dim]
    root = torch.linalg.cholesky(metric)
    whitened = deviation @ root
    covariance = whitened.transpose(1, 2) @ whitened / len(sample)
    turn = torch.linalg.eigh(covariance).eigenvectors.flip(-1)  # from the largest
    components = whitened @ turn
    spread = components.square().mean(1).sqrt()
    floor = _MIN_SPREAD * spread.amax(-1, keepdim=True).clamp(min=_MIN_SPREAD)
    for _ in range(3):  # a gain depends on the spreads and these, over the gain, on it
        spread = spread.maximum(floor)
        gain = (components / spread[:, None]).square().mean(-1, keepdim=True).sqrt().clamp(min=_MIN_SPREAD)
        spread = (components / gain).square().mean(1).sqrt()
    spread = spread.maximum(floor)
    levels, errors = _fitted_levels((components / gain / spread[:, None]).flatten())
    bits = torch.tensor([_allocate(row, errors, 8 * (num_bytes - 1)) for row in spread.square().tolist()])
    basis = root @ turn
    return ComponentRows(
        center, basis.float(), torch.linalg.inv(basis).float(), spread.float(), bits, levels, num_bytes
    )


def _fitted_levels(samples: Tensor) -> tuple[Tensor, list[float]]:
    """Levels of every number of bits (Lloyd-Max) for numbers like `samples`, and the shares of energy that rounding to
    them loses."""
    values = samples[:: -(-len(samples) // _LEVEL_SAMPLES)].double().sort().values
    sums = torch.cat((torch.zeros(1, dtype=torch.float64), values.cumsum(0)))
    energy = float(values.square().mean().clamp(min=1e-30))  # heads may be all zero
    found, errors = [torch.zeros(1, dtype=torch.float64)], [1.0]
    for bits in range(1, MAX_BITS + 1):
        shares = (torch.arange(1 << bits, dtype=torch.float64) + 0.5) / (1 << bits)
        even = torch.lerp(values[len(values) // 2000], values[-1 - len(values) // 2000], shares)
        levels = (values[(shares * len(values)).long()] + even) / 2
        for _ in range(_ROUNDS):  # bounds halfway between levels, levels at the mean of their cell
            inner = torch.searchsorted(values, (levels[1:] + levels[:-1]) / 2)
            edges = torch.cat((torch.zeros_like(inner[:1]), inner, torch.full_like(inner[:1], len(values))))
            counts = edges.diff()
            levels = torch.where(counts > 0, sums[edges].diff() / counts, levels)
        codes = torch.bucketize(values, (levels[1:] + levels[:-1]) / 2)
        found.append(levels)
        errors.append(float((values - levels[codes]).square().mean()) / energy)
    return torch.cat(found).float(), errors


@cache
def _normal_levels(device: torch.device) -> Tensor:
    """Shared by all layers."""
    shares = (torch.arange(_LEVEL_SAMPLES, dtype=torch.float64) + 0.5) / _LEVEL_SAMPLES
    return _fitted_levels(torch.special.ndtri(shares))[0].to(device)


def _allocate(energies: Sequence[float], errors: Sequence[float], total: int) -> list[int]:
    """Bits for components of these energies, one after the other where it takes most from the sum of errors. `errors`:
    the shares of energy that are lost, by bits."""
    bits = [0] * len(energies)
    waiting = [(-energy * (errors[0] - errors[1]), number) for number, energy in enumerate(energies)]
    heapq.heapify(waiting)
    for _ in range(min(total, MAX_BITS * len(bits))):
        _, number = heapq.heappop(waiting)
        bits[number] = have = bits[number] + 1
        if have < MAX_BITS:
            heapq.heappush(waiting, (-energies[number] * (errors[have] - errors[have + 1]), number))
    return bits


def _gain_code(gain: Tensor) -> Tensor:
    """int64; 0 of what is too small to be told from zero."""
    code = (gain.double().clamp(min=1e-30).log2() * _STEPS).round().long() + _MIDDLE
    return torch.where(code < 1, 0, code.clamp(max=_LARGEST))


def _gain(code: Tensor) -> Tensor:
    return _gains().to(code.device)[code]


@cache
def _gains() -> Tensor:
    """By code. A table, because vector instructions round powers differently at the end of a row of numbers."""
    gains = torch.exp2((torch.arange(256, dtype=torch.float64) - _MIDDLE) / _STEPS).float()
    gains[0], gains[_NOT_FINITE] = 0.0, torch.nan
    return gains
