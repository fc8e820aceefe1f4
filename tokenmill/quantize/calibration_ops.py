"""One block's forward pass on plain float32 tensors: whole sequences, causal attention without KV pages; has gradients.

Implements model/ops.py for calibration. Weights come from a mapping by name, so a caller can run the block with some of
them replaced; a watched linear hands its input to the caller and may end the pass there. Used by calibrate.py only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tokenmill.kernels import ref, ref_recurrent
from tokenmill.kernels.ref_experts import RoutingSpec, route, run_experts
from tokenmill.model.attention.base import AttentionSpec
from tokenmill.model.attention.latent import HeadProjections, LatentSpec
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.formats.stacks import ExpertStacks
from tokenmill.model.layers.rotary import RotaryTable
from tokenmill.model.state.specs import ConvolutionSpec, ScanSpec


class ReachedInput(Exception):
    """Ends a forward pass once the watched input has been seen: what follows is not needed."""


class CalibrationOps:
    """`names`: the name of each linear and norm by identity. `weights`: their float32 values, biases as NAME.bias.
    `state_shapes`: of what a sequence keeps in this layer, if it is a recurrent one."""

    def __init__(
        self,
        names: Mapping[int, str],
        weights: Mapping[str, Tensor],
        length: int,
        watched: Mapping[str, Callable[[Tensor], None]] | None = None,
        stop_at: str | None = None,
        state_shapes: Sequence[tuple[int, ...]] = (),
        watch_attention: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        self._state_shapes = state_shapes
        self._watch_attention = watch_attention  # gets the keys and values that a KV cache would store
        self._names = names
        self._weights = weights
        self._length = length  # of each sequence in the batch
        self._watched = watched or {}
        self._stop_at = stop_at

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, head_dim: int = 0) -> Tensor:
        name = self._names.get(id(weight))  # Llama 4's norms of heads have no weights to name
        return ref.rms_norm(x, weight if name is None else self._weights[name], eps, head_dim)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, head_dim: int = 0) -> Tensor:
        name = self._names[id(weight)]
        offset = None if bias is None else self._weights[f"{name}.bias"]
        return ref.layer_norm(x, self._weights[name], offset, eps, head_dim)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def add_rms_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + y
        return total, self.rms_norm(total, weight, eps)

    def linear(self, x: Tensor, weights: Sequence[LinearWeight]) -> list[Tensor]:
        names = [self._names[id(weight)] for weight in weights]
        if names[0] in self._watched:
            self._watched[names[0]](x)
        if names[0] == self._stop_at:
            raise ReachedInput
        outputs = [x @ self._weights[name].T for name in names]
        biases = [self._weights.get(f"{name}.bias") for name in names]
        return [y if bias is None else y + bias for y, bias in zip(outputs, biases, strict=True)]

    def rope(self, x: Tensor, table: RotaryTable, head_dim: int) -> Tensor:
        positions = torch.arange(self._length, device=x.device).repeat(x.shape[0] // self._length)
        return ref.rope(x, positions, table.cos.to(x.device), table.sin.to(x.device), head_dim, table.interleaved)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        length, repeats = self._length, spec.num_heads // spec.num_kv_heads
        if self._watch_attention is not None:
            self._watch_attention(k, v)

        def heads(x: Tensor, repeat: int) -> Tensor:  # -> [sequences, heads, length, head_dim]
            split = x.view(-1, length, x.shape[1] // spec.head_dim, spec.head_dim).transpose(1, 2)
            return split.repeat_interleave(repeat, 1) if repeat > 1 else split

        query, key, value = heads(q, 1), heads(k, repeats), heads(v, repeats)
        if spec.softcap or spec.sinks is not None or spec.chunk:
            scores = (query @ key.transpose(-1, -2)) * spec.scale
            scores = ref.softcap(scores, spec.softcap) if spec.softcap else scores
            hidden = ~_visible(length, spec.window, q.device, spec.chunk)
            scores = scores.masked_fill(hidden, float("-inf"))
            if spec.sinks is not None:
                sinks = spec.sinks.to(q.device).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
                scores = torch.cat([scores, sinks], -1)
            mixed = scores.softmax(-1)[..., :length] @ value
        elif spec.window and spec.window < length:
            mask = _visible(length, spec.window, q.device)
            mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=spec.scale)
        else:
            mixed = scaled_dot_product_attention(query, key, value, is_causal=True, scale=spec.scale)
        return mixed.transpose(1, 2).reshape(q.shape)

    def experts(self, x: Tensor, router: LinearWeight, stacks: ExpertStacks, routing: RoutingSpec) -> Tensor:
        ids, weights = route(self.linear(x, [router])[0], routing)

        def gate_up(expert: int, rows: Tensor) -> Tensor:
            return torch.cat(self.linear(rows, stacks.gate_up.experts[expert]), -1)

        def down(expert: int, rows: Tensor) -> Tensor:
            return self.linear(rows, stacks.down.experts[expert])[0]

        return run_experts(x, ids, weights, gate_up, down, routing)

    def gate_rows(self, x: Tensor, gate: Tensor) -> Tensor:
        return ref.gate_rows(x, gate)

    def latent_attention(
        self,
        q: Tensor,
        kv: Tensor,
        norm: Tensor,
        eps: float,
        rotary: RotaryTable,
        projections: HeadProjections,
        spec: LatentSpec,
    ) -> Tensor:
        """In the expanded form, in which the projections by head are one linear that reads the latents."""
        norm = self._weights[self._names[id(norm)]]
        latents = ref.rms_norm(kv[:, : spec.rank].contiguous(), norm, eps)
        (both,) = self.linear(latents, projections.stored)
        heads = both.view(q.shape[0], spec.num_heads, -1)
        shared = self.rope(kv[:, spec.rank :].contiguous(), rotary, spec.rope_dim)
        k = torch.cat((heads[..., : spec.nope_dim], shared[:, None].expand(-1, spec.num_heads, -1)), -1)
        queries = q.view(q.shape[0], spec.num_heads, -1)
        tails = self.rope(queries[..., spec.nope_dim :].flatten(1), rotary, spec.rope_dim)
        queries = torch.cat((queries[..., : spec.nope_dim], tails.view(*queries.shape[:2], -1)), -1)

        def sequences(x: Tensor) -> Tensor:  # -> [sequences, heads, length, dim]
            return x.unflatten(0, (-1, self._length)).transpose(1, 2)

        values = sequences(heads[..., spec.nope_dim :])
        mixed = scaled_dot_product_attention(sequences(queries), sequences(k), values, is_causal=True, scale=spec.scale)
        return mixed.transpose(1, 2).reshape(q.shape[0], -1)

    def gated(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        return ref.gated(gate, up, activation)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        return ref.activate(x, activation)

    def split(self, x: Tensor, widths: Sequence[int], heads: int = 1) -> list[Tensor]:
        parts = x.unflatten(-1, (heads, -1)).split(list(widths), dim=-1)
        return [part.flatten(-2) for part in parts]

    def join(self, values: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(values), dim=-1)

    def convolve(self, x: Tensor, spec: ConvolutionSpec) -> Tensor:
        return self._continue((x,), spec)

    def scan(self, inputs: Sequence[Tensor], spec: ScanSpec) -> Tensor:
        return self._continue(inputs, spec)

    def _continue(self, inputs: Sequence[Tensor], spec: ConvolutionSpec | ScanSpec) -> Tensor:
        """Every sequence from its beginning; what it leaves in the state is not needed."""
        count, device = inputs[0].shape[0] // self._length, inputs[0].device
        states = torch.zeros(count, *self._state_shapes[spec.array], device=device)
        starts = torch.arange(count + 1) * self._length
        arguments = (each.to(device) if isinstance(each, Tensor) else each for each in spec.arguments())
        run = ref.find_op(spec.op)
        assert run is not None, spec.op
        y: Tensor = run(*inputs, states, torch.arange(count, device=device), starts, *arguments)
        return y

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, norm_first: bool, gate_scale: float = 1.0
    ) -> Tensor:
        return ref_recurrent.gated_norm(x, gate, weight.to(x.device), eps, norm_first, gate_scale)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return ref.softcap(x, cap)

    def embed(self, table: LinearWeight, scale: float) -> Tensor:
        raise AssertionError("a block does not embed", table, scale)

    def add_positions(self, x: Tensor, table: Tensor) -> Tensor:
        raise AssertionError("a block does not embed", x, table)

    def select_rows(self, x: Tensor) -> Tensor:
        raise AssertionError("a block has no logits", x)


def _visible(length: int, window: int, device: torch.device, chunk: int = 0) -> Tensor:
    """[query, key]: what a token may see."""
    position = torch.arange(length, device=device)
    visible = position.unsqueeze(0) <= position.unsqueeze(1)
    if window:
        visible &= position.unsqueeze(0) > position.unsqueeze(1) - window
    if chunk:
        visible &= position.unsqueeze(0) // chunk == position.unsqueeze(1) // chunk
    return visible
