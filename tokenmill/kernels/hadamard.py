"""Hadamard transforms of any width: orthonormal, spreading every input evenly over the outputs, O(n log n) to apply.

A width 2^k * m becomes a Kronecker product of small matrices: Sylvester's for the power of two, Paley's for m where a
Hadamard matrix of that order is known (12, 20, 28, 36, 60, ...), else the discrete Hartley matrix: orthonormal too,
nearly as flat. Signs come from a hash, so a seed means the same everywhere. Used by rotations and codebook formats.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_MAX_POWER = 64  # Sylvester factors are applied as dense products of at most this size: few passes, and BLAS does them
_MAX_PALEY = 256


def hadamard_matrix(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Orthonormal [n, n]; every entry is +-1/sqrt(n) where `has_hadamard(n)`."""
    product = torch.ones(1, 1, dtype=torch.float64)
    for factor in _factors(n):
        product = torch.kron(product, factor)
    return product.to(dtype)


def has_hadamard(n: int) -> bool:
    """Whether `hadamard_matrix(n)` is a true Hadamard matrix, all of whose entries have the same size."""
    return _split(n)[2]


def hadamard_parts(n: int) -> tuple[int, Tensor]:
    """(power, matrix): `hadamard_matrix(n)` is Sylvester's of order `power` (x) `matrix`, orthonormal [rest, rest]. For
    kernels that apply the power of two by butterflies."""
    power, rest, _ = _split(n)
    return power, _factors(n)[-1].float() if rest > 1 else torch.ones(1, 1)


def hadamard(x: Tensor) -> Tensor:
    """H x along the last dimension, H = hadamard_matrix(x.shape[-1])."""
    return _apply(x, transposed=False)


def inverse_hadamard(y: Tensor) -> Tensor:
    return _apply(y, transposed=True)


def signed_hadamard(x: Tensor, seed: int) -> Tensor:
    """H (s * x) along the last dimension, s the random signs of `seed`: a random rotation that costs O(n log n)."""
    return hadamard(x * random_signs(x.shape[-1], seed).to(x))


def inverse_signed_hadamard(y: Tensor, seed: int) -> Tensor:
    return inverse_hadamard(y) * random_signs(y.shape[-1], seed).to(y)


def random_signs(n: int, seed: int) -> Tensor:
    """float32 [n] of +-1: the top bit of the n first outputs of splitmix64 seeded with `seed`."""
    steps = np.arange(1, n + 1, dtype=np.uint64)
    state = np.uint64(seed % 2**64) + steps * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return torch.from_numpy(1.0 - 2.0 * (state >> np.uint64(63)).astype(np.float32))


def _apply(x: Tensor, transposed: bool) -> Tensor:
    factors = _factors(x.shape[-1])
    flat = x.reshape(-1, *(factor.shape[0] for factor in factors))
    for axis, factor in enumerate(factors, start=1):
        matrix = (factor.T if transposed else factor).to(x)
        flat = torch.tensordot(flat, matrix, dims=([axis], [1])).movedim(-1, axis)
    return flat.reshape(x.shape)


@lru_cache(maxsize=64)
def _factors(n: int) -> tuple[Tensor, ...]:
    """Small orthonormal float64 matrices whose Kronecker product is the transform of width n."""
    power, rest, is_hadamard = _split(n)
    factors = []
    while power > 1:
        size = min(power, _MAX_POWER)
        factors.append(_sylvester(size))
        power //= size
    if rest > 1:
        matrix = _paley(rest) if is_hadamard else _hartley(rest)
        assert matrix is not None
        factors.append(matrix)
    return tuple(factors) or (torch.ones(1, 1, dtype=torch.float64),)


def _split(n: int) -> tuple[int, int, bool]:
    """n = power of two * rest; whether a Hadamard matrix of order `rest` is known (1 counts)."""
    assert n > 0
    odd = n // (n & -n)
    rest = odd
    while rest <= min(n, _MAX_PALEY):
        if rest == 1 or _paley_prime(rest):
            return n // rest, rest, True
        rest *= 2
    return n // odd, odd, False


def _sylvester(n: int) -> Tensor:
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    product = torch.ones(1, 1, dtype=torch.float64)
    while product.shape[0] < n:
        product = torch.kron(product, step)
    return product / math.sqrt(n)


def _paley_prime(order: int) -> int:
    """The prime that Paley's construction of this order starts from: q + 1 = order with q = 3 mod 4, or
    2 (q + 1) = order with q = 1 mod 4. 0: none."""
    if _is_prime(order - 1) and (order - 1) % 4 == 3:
        return order - 1
    half = order // 2 - 1
    return half if order % 2 == 0 and _is_prime(half) and half % 4 == 1 else 0


def _paley(order: int) -> Tensor | None:
    prime = _paley_prime(order)
    if not prime:
        return None
    squares = {i * i % prime for i in range(1, prime)}
    residue = [0.0] + [1.0 if i in squares else -1.0 for i in range(1, prime)]
    border = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    border[1:, 1:] = torch.tensor(
        [[residue[(row - column) % prime] for column in range(prime)] for row in range(prime)], dtype=torch.float64
    )
    border[0, 1:] = 1.0
    identity = torch.eye(prime + 1, dtype=torch.float64)
    if prime % 4 == 3:  # the bordered residue matrix is skew
        border[1:, 0] = -1.0
        return (border + identity) / math.sqrt(order)
    border[1:, 0] = 1.0  # symmetric: each 0 becomes one 2x2 block, each +-1 another
    ones = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    diagonal = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    return (torch.kron(border, ones) + torch.kron(identity, diagonal)) / math.sqrt(order)


def _hartley(n: int) -> Tensor:
    angle = torch.outer(torch.arange(n), torch.arange(n)).double() * (2 * math.pi / n)
    return (angle.cos() + angle.sin()) / math.sqrt(n)


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % divisor for divisor in range(2, math.isqrt(n) + 1))
