"""The recurrent ops of ref_recurrent.py on the C++ kernels (csrc/cpu/recurrent.h). Part of the CPU backend (cpu.py).

Rows are computed one after the other, whatever their number, so how a sequence is cut into steps changes no bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.kernels.cpu_module import module, pool


def convolve(x: Tensor, states: Tensor, slots: Tensor, starts: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    module().convolve(pool(), x, states, slots, starts.long(), weight, bias, y)
    return y


def mamba_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, states: Tensor, slots: Tensor, starts: Tensor, a: Tensor, d: Tensor
) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    module().mamba_scan(pool(), x, dt, b, c, states, slots, starts.long(), a, d, y)
    return y


def mamba2_scan(
    xbc: Tensor,
    dt: Tensor,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
    a: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    num_groups: int,
    dt_scale: float = 1.0,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    y = xbc.new_empty(xbc.shape[0], states.shape[1] * states.shape[2])
    limits = tuple(map(float, dt_limits))
    module().mamba2_scan(pool(), xbc, dt, states, slots, starts.long(), a, d, dt_bias, num_groups, dt_scale, *limits, y)
    return y


def delta_scan(
    qkv: Tensor,
    beta: Tensor,
    dt: Tensor,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    num_key_heads: int,
) -> Tensor:
    y = qkv.new_empty(qkv.shape[0], states.shape[1] * states.shape[3])
    module().delta_scan(pool(), qkv, beta, dt, states, slots, starts.long(), a, dt_bias, num_key_heads, y)
    return y


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, norm_first: bool, gate_scale: float = 1.0
) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    weight = weight if weight.dim() == 2 else weight.unsqueeze(0)
    module().gated_norm(pool(), x, gate, weight, eps, norm_first, gate_scale, y)
    return y
