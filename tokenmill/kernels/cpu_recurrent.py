"""The recurrent ops of ref_recurrent.py on the C++ kernels (csrc/cpu/recurrent.h). Part of the CPU backend (cpu.py).

Rows are computed one after the other, whatever their number, so how a sequence is cut into steps changes no bit.
`bound_recurrence` is the same op as the recorded program takes it, over the states of all slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokenmill.kernels.cpu_module import pool
from tokenmill.kernels.native import module

if TYPE_CHECKING:
    from torch import Tensor


def bound_recurrence(op: str, states: Tensor, *arguments: Any) -> Any:
    """The C++ op `op` over `states` [slots, ...], with the arguments that its function here takes after `starts`. It
    points into these tensors."""
    cpu = module()
    if op == "mamba2_scan":
        *rest, dt_scale, limits = arguments
        return cpu.mamba2_scan(states, *rest, dt_scale, *map(float, limits))
    return {"convolve": cpu.convolution, "mamba_scan": cpu.mamba_scan, "delta_scan": cpu.delta_scan}[op](
        states, *arguments
    )


def _run(
    op: str, inputs: Sequence[Tensor], width: int, states: Tensor, slots: Tensor, starts: Tensor, *arguments: Any
) -> Tensor:
    y = inputs[0].new_empty(inputs[0].shape[0], width)
    bound_recurrence(op, states, *arguments).run(pool(), list(inputs), slots, starts.int(), y)
    return y


def convolve(x: Tensor, states: Tensor, slots: Tensor, starts: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _run("convolve", [x], x.shape[1], states, slots, starts, weight, bias)


def mamba_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, states: Tensor, slots: Tensor, starts: Tensor, a: Tensor, d: Tensor
) -> Tensor:
    return _run("mamba_scan", [x, dt, b, c], x.shape[1], states, slots, starts, a, d)


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
    width = states.shape[1] * states.shape[2]
    arguments = (a, d, dt_bias, num_groups, dt_scale, dt_limits)
    return _run("mamba2_scan", [xbc, dt], width, states, slots, starts, *arguments)


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
    width = states.shape[1] * states.shape[3]
    return _run("delta_scan", [qkv, beta, dt], width, states, slots, starts, a, dt_bias, num_key_heads)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, norm_first: bool, gate_scale: float = 1.0
) -> Tensor:
    y = x.new_empty(x.shape)
    weight = weight if weight.dim() == 2 else weight.unsqueeze(0)
    module().gated_norm(pool(), x, gate, weight, eps, norm_first, gate_scale, y)
    return y
