"""Measures what makes keys easier to quantize (model/kvstore/conditioning.py): centers, scales and moments of queries.

Keys of one head share a common component with half or more of their energy, and queries weigh some directions far more
than others. Both are measured in one step over fixed pseudo-random tokens, before rotary positions are applied, and
then averaged over positions; text gives nearly the same. The first token gets more weight because it is an attention
sink. Called once, by build.py. The step runs on the model's device, by the ops of its executor; what it finds is
worked out on the host.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from tokenmill.config import ResolvedConfig
from tokenmill.hardware.kv_layout import build_layout
from tokenmill.kernels.hadamard import random_signs
from tokenmill.log import get_logger
from tokenmill.model.attention.base import AttentionSpec
from tokenmill.model.kvstore import KV_STORES
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.kvstore.conditioning import KeyConditioning
from tokenmill.model.layers.rotary import RotaryTable
from tokenmill.model.loader import LoadedModel
from tokenmill.runtime.executors.eager import EagerExecutor, EagerOps
from tokenmill.runtime.observation.heads import Add
from tokenmill.types import Batch

_log = get_logger(__name__)
_TOKENS = 128
# Positions averaged over, independent of the context length, so that servers can exchange pages
_EVERYWHERE = torch.arange(0, 4096, 8)
_FIRST_TOKEN = 0.25  # weight of the first key: it gets at least about this share of attention
# Rounding with feedback would call for E[k^2]^(-1/2); half that exponent, because the measured tokens are not the real
# ones.
_EXPONENT = -1 / 4
_MAX_SCALE = 8.0  # of a channel; the minimum is its inverse


def condition_keys(store: KVStore, model: LoadedModel, config: ResolvedConfig, context: int) -> None:
    """Set the centers and scales of the layers, if the store uses them."""
    if not store.conditions_keys:
        return
    began = time.perf_counter()
    for layer, conditioning in find_conditioning(model, config, context).items():
        wanted = conditioning if model.table is None else conditioning.centered()  # GPU kernels have no feedback
        store.condition_keys(store.layout.place(layer)[1], wanted)
    how = "centered, scaled" if model.table is None else "centered"
    _log.info("keys are stored %s and rotated: measured in %.2f s", how, time.perf_counter() - began)


@torch.inference_mode()
def find_conditioning(model: LoadedModel, config: ResolvedConfig, context: int) -> dict[int, KeyConditioning]:
    """By layer; none for layers with capped scores or sinks, which would change with the center."""
    count = min(_TOKENS, context)
    layout = build_layout(model.decoder.kv_layers(), count)
    on_gpu = model.table is not None
    pages = str(model.table.dtype).removeprefix("torch.") if model.table is not None else "float32"
    store = KV_STORES.get(pages)(layout, len(layout.groups), model.device, model.kernels)
    store.states.clear([0])
    batch = _batch(model, count, len(layout.groups))
    found = _Measurements()
    if on_gpu:
        from tokenmill.runtime.observation.device_conditioning import measure_on_device

        measure_on_device(model, store, batch, found.add)
    else:
        model.decoder.forward(MeasuringOps(EagerExecutor(model, store, config), batch, found.add))
    return found.conditioning


def _batch(model: LoadedModel, count: int, groups: int) -> Batch:
    """One sequence of fixed tokens, with a page of its own in every group."""
    device = model.device
    return Batch(
        token_ids=pseudo_random_tokens(model.decoder.description.vocab_size, count).to(device),
        positions=torch.arange(count, device=device),
        query_starts=torch.tensor([0, count], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
        slots=tuple(torch.arange(count, device=device) + group * count for group in range(groups)),
        block_tables=tuple(torch.tensor([[group]], dtype=torch.int32, device=device) for group in range(groups)),
        logit_rows=torch.zeros(0, dtype=torch.int64, device=device),
        max_query=count,
        max_seq=count,
        state_slots=torch.zeros(1, dtype=torch.int64, device=device),
    )


def pseudo_random_tokens(vocabulary: int, count: int) -> Tensor:
    """Fixed ids, spread over the vocabulary: 16 signs of a hash make a number each."""
    bits = (random_signs(16 * count, seed=0) > 0).view(count, 16).long()
    return (bits << torch.arange(16)).sum(-1) * vocabulary // (1 << 16)


class _Measurements:
    def __init__(self) -> None:
        self.conditioning: dict[int, KeyConditioning] = {}

    def add(
        self,
        spec: AttentionSpec,
        queries: Tensor,
        keys: Tensor,
        _values: Tensor,
        tables: tuple[RotaryTable | None, RotaryTable | None],
    ) -> None:
        """Layers with capped scores or sinks are left out."""
        if spec.softcap or spec.sinks is not None:
            return
        (queries, _), (keys, table) = (
            at_first_position(each, on_host) for each, on_host in zip((queries, keys), tables, strict=True)
        )
        first, rest = keys[0], keys[1:]
        mean = _over_positions(rest.mean(0), table)
        center = first.lerp(mean, 1 - _FIRST_TOKEN)
        # E[(k - center)^2] over the remaining tokens: rotation does not change the energy of a pair.
        rest_spread = rest.square().mean(0) - 2 * mean * center + center.square()
        spread = _pair_energy((first - center).square().lerp(rest_spread, 1 - _FIRST_TOKEN), table)
        moment = query_moment(queries[1:].unflatten(1, (spec.num_kv_heads, -1)), table)
        self.conditioning[spec.layer] = KeyConditioning(center, _scale(spread), moment)


def at_first_position(heads: Tensor, table: RotaryTable | None) -> tuple[Tensor, RotaryTable | None]:
    """On the host, as at position 0, where a rotary table may still scale."""
    heads = heads.cpu()
    if table is None:
        return heads, None
    table = RotaryTable(table.cos.cpu(), table.sin.cpu(), table.interleaved)
    half = table.cos.shape[1]
    return torch.cat((heads[..., : 2 * half] * table.cos[0, 0], heads[..., 2 * half :]), -1), table


class MeasuringOps(EagerOps):
    """Ops that measure queries, keys and values on their way to attention."""

    def __init__(self, executor: EagerExecutor, batch: Batch, add: Add) -> None:
        super().__init__(executor, batch)
        self._add = add
        self._unrotated: list[tuple[Tensor, Tensor, RotaryTable]] = []  # of this layer: output and input of rope, table

    def rope(self, x: Tensor, table: RotaryTable, head_dim: int) -> Tensor:
        y = super().rope(x, table, head_dim)
        self._unrotated.append((y, x, table))
        return y

    def attention(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        (queries, q_table), (keys, k_table) = (self._before_rotation(each, spec.head_dim) for each in (q, k))
        self._add(spec, queries, keys, v.view(v.shape[0], spec.num_kv_heads, -1), (q_table, k_table))
        self._unrotated.clear()
        return super().attention(q, k, v, spec)

    def _before_rotation(self, rotated: Tensor, head_dim: int) -> tuple[Tensor, RotaryTable | None]:
        """[T, heads, head_dim]."""
        for y, x, table in self._unrotated:
            if y is rotated:
                return x.view(x.shape[0], -1, head_dim), table
        return rotated.view(rotated.shape[0], -1, head_dim), None


def _over_positions(mean: Tensor, table: RotaryTable | None) -> Tensor:
    """The mean of vectors [heads, head_dim] that are rotated to every position."""
    if table is None:
        return mean
    rotated = _complex(mean, table) * _phases(table).mean(0)
    return torch.cat((_real(rotated, table).float(), mean[:, 2 * table.cos.shape[1] :]), 1)


def query_moment(queries: Tensor, table: RotaryTable | None, positions: Tensor = _EVERYWHERE) -> Tensor:
    """E[q q^T] float64 [kv_heads, head_dim, head_dim] of queries [T, kv_heads, group, head_dim] at all of these
    positions, which need not be whole numbers."""
    rows = queries.double().transpose(0, 1).flatten(1, 2)  # [kv_heads, T * group, head_dim]
    moment = rows.transpose(1, 2) @ rows / rows.shape[1]
    if table is None:
        return moment
    # With z = a + ib for a pair: E[z z^H] and E[z z^T] turn by the difference and by the sum of two angles.
    z, phases = _complex(rows, table), _phases(table, positions)
    half = z.shape[-1]
    outer = z.transpose(1, 2) @ z.conj() / z.shape[1] * (phases.T @ phases.conj() / len(phases))
    plain = z.transpose(1, 2) @ z / z.shape[1] * (phases.T @ phases / len(phases))
    blocks = torch.stack(
        (outer.real + plain.real, plain.imag - outer.imag, plain.imag + outer.imag, outer.real - plain.real), -1
    )  # aa, ab, ba, bb, twice over
    pairs = (blocks / 2).unflatten(-1, (2, 2))  # [kv_heads, pair, pair, a or b, a or b]
    order = (0, 1, 3, 2, 4) if table.interleaved else (0, 3, 1, 4, 2)
    moment[:, : 2 * half, : 2 * half] = pairs.permute(order).reshape(-1, 2 * half, 2 * half)
    moment[:, 2 * half :, : 2 * half] = moment[:, : 2 * half, 2 * half :] = 0  # averages out over positions
    return moment


def _phases(table: RotaryTable, positions: Tensor = _EVERYWHERE) -> Tensor:
    """complex128 [positions, pairs]: the rotation of each pair at each position."""
    if table.cos.shape[0] < 2:
        return torch.ones(1, table.cos.shape[1], dtype=torch.complex128)
    step = torch.complex(table.cos[1].double(), table.sin[1].double()).angle()
    angles = torch.outer(positions.double(), step)
    return torch.polar(torch.ones_like(angles), angles)


def _complex(x: Tensor, table: RotaryTable) -> Tensor:
    """Pairs that are rotated together as complex numbers [..., pairs]."""
    half = table.cos.shape[1]
    pairs = x[..., : 2 * half].double().unflatten(-1, (half, 2) if table.interleaved else (2, half))
    axis = -1 if table.interleaved else -2
    return torch.complex(pairs.select(axis, 0), pairs.select(axis, 1))


def _real(z: Tensor, table: RotaryTable) -> Tensor:
    return torch.stack((z.real, z.imag), -1 if table.interleaved else -2).flatten(-2)


def _pair_energy(energy: Tensor, table: RotaryTable | None) -> Tensor:
    """[heads, head_dim] with the mean over each pair of rotated channels: positions mix the two."""
    if table is None:
        return energy
    z = _complex(energy, table)
    mean = (z.real + z.imag) / 2
    return torch.cat((_real(torch.complex(mean, mean), table).float(), energy[:, 2 * table.cos.shape[1] :]), 1)


def _scale(spread: Tensor) -> Tensor:
    """E[k^2]^exponent with a geometric mean of one per head."""
    floor = 1e-6 * spread.mean(-1, keepdim=True).clamp(min=1e-12)
    logs = spread.maximum(floor).log() * _EXPONENT
    return (logs - logs.mean(-1, keepdim=True)).exp().clamp(1 / _MAX_SCALE, _MAX_SCALE)
