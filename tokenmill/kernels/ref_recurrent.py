"""The spec of recurrent layers in plain torch: a causal convolution with state, and the three scans.

Each op reads the rows [T, width] of a batch of sequences (`starts` [S + 1], cumulative counts), continues the state of
each sequence (`states` [slots, ...] float32, its slot in `slots` [S]) and leaves there the state after its last row.
Rows are computed one after the other, as in decoding; from `CHUNKED` rows on in chunks whose inner part is a matrix
product. Both give the same numbers up to rounding. Decays are exponentials of numbers <= 0 and are never divided by.
Part of the op table (ref.py finds its functions here).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

CHUNKED = 16  # rows of a sequence from which on the chunked form is used
_CHUNK = 64  # rows of a chunk
_L2_EPS = 1e-6

_Form = Callable[[tuple[Tensor, ...], Tensor], tuple[Tensor, Tensor]]  # (rows, state) -> (output rows, state)


def convolve(x: Tensor, states: Tensor, slots: Tensor, starts: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """silu of a causal convolution of each channel. `weight` [K, C], oldest input first; `states` [slots, K - 1, C]:
    the last inputs of each sequence."""
    width = weight.shape[0]

    def step(rows: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [S, C], states [S, K - 1, C]."""
        window = torch.cat((state, rows[0].unsqueeze(1)), dim=1)
        return _weighted([window[:, i] for i in range(width)], weight, bias), window[:, 1:]

    def several(rows: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
        window = torch.cat((state, rows[0]))
        count = rows[0].shape[0]
        y = _weighted([window[i : i + count] for i in range(width)], weight, bias)
        return y, window[window.shape[0] - (width - 1) :]

    return _each_sequence((x,), states, slots, starts, step, several)


def mamba_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, states: Tensor, slots: Tensor, starts: Tensor, a: Tensor, d: Tensor
) -> Tensor:
    """Mamba: x, dt [T, I]; b, c [T, N]; a [I, N] negative; d [I]; states [slots, I, N]. With t = softplus(dt):
    S = exp(t a) S + t x b, y = S c + d x."""

    def terms(rows: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        x, dt, b, _ = rows
        time = softplus(dt)
        return torch.exp(time.unsqueeze(-1) * a), (time * x).unsqueeze(-1) * b.unsqueeze(1)

    def step(rows: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
        decay, update = terms(rows)
        state = decay * state + update
        return (state * rows[3].unsqueeze(1)).sum(-1) + d * rows[0], state

    def chunk(rows: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs (decay, update) are combined with those 1, 2, 4 ... rows before them."""
        decay, update = terms(rows)
        update = torch.cat((update[:1] + decay[:1] * state, update[1:]))
        distance = 1
        while distance < decay.shape[0]:
            later = update[distance:] + decay[distance:] * update[:-distance]
            update = torch.cat((update[:distance], later))
            decay = torch.cat((decay[:distance], decay[distance:] * decay[:-distance]))
            distance *= 2
        return (update * rows[3].unsqueeze(1)).sum(-1) + d * rows[0], update[-1]

    return _each_sequence((x, dt, b, c), states, slots, starts, step, _by_chunks(step, chunk))


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
    """Mamba 2: xbc [T, H P + 2 G N] (x by head, then b and c by group), dt [T, H]; a, d, dt_bias [H]; states
    [slots, H, P, N]. With t = softplus(dt_scale dt + dt_bias) within its limits: S = exp(t a) S + t x b', y = S c +
    d x."""
    _, heads, head_dim, size = states.shape

    def terms(rows: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [n, H, P], time [n, H], b and c [n, H, N]."""
        xbc, dt = rows
        x, b, c = xbc.split((heads * head_dim, num_groups * size, num_groups * size), dim=-1)
        time = softplus(dt * dt_scale + dt_bias).clamp(*dt_limits)
        b, c = (each.reshape(-1, num_groups, size).repeat_interleave(heads // num_groups, dim=1) for each in (b, c))
        return x.reshape(-1, heads, head_dim), time, b, c

    def step(rows: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
        x, time, b, c = terms(rows)
        decay = torch.exp(time * a)[:, :, None, None]
        state = decay * state + (time.unsqueeze(-1) * x).unsqueeze(-1) * b.unsqueeze(2)
        y = (state * c.unsqueeze(2)).sum(-1) + d.unsqueeze(-1) * x
        return y.flatten(1), state

    def chunk(rows: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
        x, time, b, c = (each.transpose(0, 1) for each in terms(rows))  # heads first
        sums = (time * a.unsqueeze(-1)).cumsum(-1)  # [H, n]
        input_ = time.unsqueeze(-1) * x  # [H, n, P]
        scores = (c @ b.transpose(1, 2)) * _decays(sums)
        y = scores @ input_ + torch.exp(sums).unsqueeze(-1) * (c @ state.transpose(1, 2))
        y = y + d[:, None, None] * x
        left = torch.exp(sums[:, -1:] - sums).unsqueeze(-1)  # what is left of each row at the end of the chunk
        state = torch.exp(sums[:, -1])[:, None, None] * state + (left * input_).transpose(1, 2) @ b
        return y.transpose(0, 1).flatten(1), state

    return _each_sequence((xbc, dt), states, slots, starts, step, _by_chunks(step, chunk))


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
    """The gated delta rule: qkv [T, 2 Hk Dk + H Dv], beta and dt [T, H]; a (negative) and dt_bias [H]; states
    [slots, H, Dk, Dv]. With q and k of length one, q times Dk ** -0.5, g = a softplus(dt + dt_bias), w = sigmoid(beta):
    S = exp(g) S; S += k (w (v - S' k))'; y = S' q."""
    _, heads, key_dim, value_dim = states.shape
    keys = num_key_heads * key_dim

    def terms(rows: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k [n, H, Dk], v [n, H, Dv], weight and gate [n, H]."""
        qkv, beta, dt = rows
        q, k, v = qkv.split((keys, keys, heads * value_dim), dim=-1)
        q, k = (each.reshape(-1, num_key_heads, key_dim) for each in (q, k))
        q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + _L2_EPS) for each in (q, k))
        q, k = (each.repeat_interleave(heads // num_key_heads, dim=1) for each in (q * key_dim**-0.5, k))
        return q, k, v.reshape(-1, heads, value_dim), torch.sigmoid(beta), a * softplus(dt + dt_bias)

    def step(rows: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, weight, gate = terms(rows)
        state = torch.exp(gate)[:, :, None, None] * state
        known = (state * k.unsqueeze(-1)).sum(2)  # what the state answers to this key
        state = state + k.unsqueeze(-1) * (weight.unsqueeze(-1) * (v - known)).unsqueeze(2)
        return (state * q.unsqueeze(-1)).sum(2).flatten(1), state

    def chunk(rows: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
        """The n updates depend on each other: a triangular system of equations solves for all of them at once."""
        q, k, v, weight, gate = (each.transpose(0, 1) for each in terms(rows))  # heads first
        sums, weight = gate.cumsum(-1), weight.unsqueeze(-1)
        decays, grown = _decays(sums), torch.exp(sums).unsqueeze(-1)
        system = (weight * (k @ k.transpose(1, 2)) * decays).tril(-1)
        system = system + torch.eye(system.shape[-1], device=system.device)
        wanted = weight * (v - grown * (k @ state))
        updates = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        y = grown * (q @ state) + (q @ k.transpose(1, 2) * decays) @ updates
        left = torch.exp(sums[:, -1:] - sums).unsqueeze(-1)
        state = torch.exp(sums[:, -1])[:, None, None] * state + (k * left).transpose(1, 2) @ updates
        return y.transpose(0, 1).flatten(1), state

    return _each_sequence((qkv, beta, dt), states, slots, starts, step, _by_chunks(step, chunk))


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, norm_first: bool, gate_scale: float = 1.0
) -> Tensor:
    """RMS norm over groups of x [T, W], times silu(gate_scale * gate): the gate after the norm or before it.

    `weight` [groups, W / groups], or [W'] for all slices of that width."""
    factor = silu(gate * gate_scale)
    groups = (x if norm_first else x * factor).unflatten(-1, (-1, weight.shape[-1]))
    y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps) * weight).flatten(-2)
    return y * factor if norm_first else y


def _weighted(windows: list[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    total = windows[0] * weight[0]
    for window, factor in zip(windows[1:], weight[1:], strict=True):
        total = total + window * factor
    return silu(total if bias is None else total + bias)


def _decays(sums: Tensor) -> Tensor:
    """[H, n] cumulative logs -> [H, n, n]: what is left of row j at row i >= j, 0 elsewhere."""
    differences = sums.unsqueeze(-1) - sums.unsqueeze(-2)
    future = torch.ones(differences.shape[-2:], dtype=torch.bool, device=sums.device).triu(1)
    return torch.exp(differences.masked_fill(future, -torch.inf))


def _by_chunks(step: _Form, chunk: _Form) -> _Form:
    """Rows of one sequence: singly where they are few, else in chunks."""

    def several(rows: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        if rows[0].shape[0] < CHUNKED:
            state = state.unsqueeze(0)
            for part in _parts(rows, 1):
                y, state = step(part, state)
                outputs.append(y)
            return torch.cat(outputs), state[0]
        for part in _parts(rows, _CHUNK):
            y, state = chunk(part, state)
            outputs.append(y)
        return torch.cat(outputs), state

    return several


def _parts(rows: tuple[Tensor, ...], size: int) -> Iterator[tuple[Tensor, ...]]:
    for begin in range(0, rows[0].shape[0], size):
        yield tuple(each[begin : begin + size] for each in rows)


def _each_sequence(
    rows: tuple[Tensor, ...], states: Tensor, slots: Tensor, starts: Tensor, step: _Form, several: _Form
) -> Tensor:
    """All sequences of one row together (`step`), the others one by one (`several`)."""
    begins = starts.tolist()
    lengths = [end - begin for begin, end in pairwise(begins)]
    if all(length == 1 for length in lengths):
        y, states[slots] = step(rows, states[slots])
        return y
    outputs: dict[int, Tensor] = {}
    singles = [number for number, length in enumerate(lengths) if length == 1]
    if singles:
        places = [begins[number] for number in singles]
        y, states[slots[singles]] = step(tuple(each[places] for each in rows), states[slots[singles]])
        outputs = {number: y[i : i + 1] for i, number in enumerate(singles)}
    for number, length in enumerate(lengths):
        if length > 1:
            slot, span = int(slots[number]), slice(begins[number], begins[number + 1])
            # A copy: what gradients read of the state must not be written over.
            outputs[number], states[slot] = several(tuple(each[span] for each in rows), states[slot].clone())
    return torch.cat([outputs[number] for number in range(len(lengths))])
