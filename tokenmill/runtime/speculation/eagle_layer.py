"""The forward pass of a published EAGLE head: one Llama layer between the target's states and a choice of tokens.

* EAGLE-1 and 2: `fc` joins a token's embedding and the target's last state, normed; the layer has no norm before its
  attention. The target's head reads its state as it is.
* EAGLE-3: `fc` joins the target's states at three depths; attention reads the embedding and that state side by side,
  each normed. Norm and head are its own, over some of the target's tokens: `d2t` has the distance to their ids.

Plain torch on any device: 16-bit products on a GPU, float32 elsewhere. Files are read by eagle_files.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.kernels.ref import gated, rms_norm, rope
from tokenmill.model.attention.base import AttentionSpec
from tokenmill.model.layers.rotary import RotaryTable
from tokenmill.runtime.speculation.layer_drafter import AttendNew, DraftLayer
from tokenmill.runtime.speculation.target_vocabulary import TargetVocabulary


@dataclass(frozen=True, slots=True)
class EagleShape:
    hidden_size: int
    norm_eps: float
    activation: str
    spec: AttentionSpec
    kept_layers: tuple[int, ...]  # as `fc` joins them; empty: EAGLE-1 and 2
    norm_before_residual: bool = False  # the residual is the normed state


class EagleLayer(DraftLayer):
    def __init__(
        self,
        shape: EagleShape,
        tensors: dict[str, Tensor],
        rotary: RotaryTable,
        vocabulary: TargetVocabulary,
        embed: Callable[[Tensor], Tensor],
    ) -> None:
        """`tensors`: by name, the layer's own without a prefix; on the device, matrices in the type of products."""
        self._shape, self._tensors, self._rotary = shape, tensors, rotary
        self._vocabulary, self._embed = vocabulary, embed
        self.key_width = shape.spec.num_kv_heads * shape.spec.head_dim
        self.kept_layers = tuple(sorted(set(shape.kept_layers)))
        self.dtype = tensors["fc.weight"].dtype
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())

    def features(self, hidden: Tensor) -> Tensor:
        if not self._shape.kept_layers:
            return self._vocabulary.normed(hidden)
        _, *inner = hidden.chunk(1 + len(self.kept_layers), 1)
        joined = torch.cat([inner[self.kept_layers.index(layer)] for layer in self._shape.kept_layers], 1)
        return self._product("fc", joined)

    def keys(self, features: Tensor, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        _, x = self._inputs(features, token_ids)
        k = self._rotated(self._product("self_attn.k_proj", x), positions)
        return k, self._product("self_attn.v_proj", x)

    def step(self, features: Tensor, token_ids: Tensor, positions: Tensor, attend: AttendNew) -> Tensor:
        residual, x = self._inputs(features, token_ids)
        q = self._rotated(self._product("self_attn.q_proj", x), positions)
        k = self._rotated(self._product("self_attn.k_proj", x), positions)
        attended = attend(q, k, self._product("self_attn.v_proj", x), self._shape.spec)
        residual = residual + self._product("self_attn.o_proj", attended)
        x = self._norm("post_attention_layernorm", residual)
        gate, up = self._product("mlp.gate_proj", x), self._product("mlp.up_proj", x)
        return residual + self._product("mlp.down_proj", gated(gate, up, self._shape.activation))

    def best(self, features: Tensor) -> tuple[Tensor, Tensor]:
        x = self._norm("norm", features) if "norm.weight" in self._tensors else features
        if "lm_head.weight" not in self._tensors:
            chances, ids = self._vocabulary.top_of_normed(x, 1)
            return chances[:, 0], ids[:, 0]
        logits = self._product("lm_head", x)
        value, ids = logits.max(-1)
        if "d2t" in self._tensors:
            ids = ids + self._tensors["d2t"][ids]
        return (value - logits.logsumexp(-1)).exp(), ids

    def _inputs(self, features: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream, and what the projections of attention read."""
        embedding = self._embed(token_ids).float()
        if not self._shape.kept_layers:
            x = self._product("fc", torch.cat([embedding, features], 1))
            return x, self._norm("input_layernorm", x) if "input_layernorm.weight" in self._tensors else x
        normed = self._norm("hidden_norm", features)
        x = torch.cat([self._norm("input_layernorm", embedding), normed], 1)
        return normed if self._shape.norm_before_residual else features, x

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self._tensors[f"{name}.weight"], self._shape.norm_eps)

    def _product(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias")
        y = (x.to(weight.dtype) @ weight.T).float()
        return y if bias is None else y + bias

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        table = self._rotary
        return rope(x, positions, table.cos, table.sin, self._shape.spec.head_dim, table.interleaved)
