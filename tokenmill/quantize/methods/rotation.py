"""Rotations fused into the weights: a random Hadamard turns the residual stream (R1) and each value head (R2), so that
no channel stands out and rounding errs less. The model computes the same function; nothing is left to do at run time.

R1 needs norms without weights, so these are folded into the linears behind them, and the embedding is untied from the
head. Matrices are random here; spinquant.py learns them. A solver rounds afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.errors import UserError
from tokenmill.kernels.hadamard import signed_hadamard
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.base import BlockView, LinearGroup, ModelView, Transform

_ROWS = 4096  # rotated at once in float64
Turn = Callable[[Tensor], Tensor]  # rows x of float64 -> R x each


class Rotation(Transform):
    name = "rotation"
    turns_states = True
    tells_outputs = True

    @dataclass(frozen=True, slots=True)
    class Options:
        residual: bool = True  # R1
        heads: bool = True  # R2
        seed: int = 0

    def residual_turn(self) -> Turn:
        """R1."""
        return partial(signed_hadamard, seed=self.options.seed)

    def head_turn(self, index: int) -> Turn:
        """R2 of block `index`."""
        return partial(signed_hadamard, seed=self.options.seed + 1 + index)

    def begin(self, model: ModelView) -> None:
        model.turn_outputs(partial(self._turn_outputs, model.description.head_dim))
        if not self.options.residual:
            return
        refuse_normed_updates(model.description)
        turn = self.residual_turn()
        head = model.weight("lm_head") * model.weight("model.norm")
        embedding = model.weight("model.embed_tokens")
        model.replace("lm_head", rotate_inputs(head, turn))
        model.replace("model.embed_tokens", rotate_inputs(embedding, turn))
        model.replace("model.norm", torch.ones_like(model.weight("model.norm")))

    def apply(self, block: BlockView, scheme_of: Mapping[str, Scheme]) -> None:
        del scheme_of  # linears that stay as they are live in the same residual stream
        for group in block.groups:
            if self.options.residual:
                self._rotate_residual(block, group)
            if self.options.heads and _is_of_heads(group):
                _rotate_heads(block, group, self.head_turn(block.index))

    def _turn_outputs(
        self, head_dim: int, index: int, groups: Sequence[LinearGroup], name: str, rows: Tensor
    ) -> Tensor:
        """As `apply` turns what a linear puts out."""
        if self.options.heads and any(_is_of_heads(group) and group.source == name for group in groups):
            return rotate_inputs(rows.reshape(-1, head_dim), self.head_turn(index)).view(rows.shape)
        writes = any(name in group.names for group in groups if not group.source_is_norm)
        return rotate_inputs(rows, self.residual_turn()) if self.options.residual and writes else rows

    def _rotate_residual(self, block: BlockView, group: LinearGroup) -> None:
        """Linears behind a norm read the residual stream; all others of a block write to it."""
        turn = self.residual_turn()
        if group.source_is_norm:
            assert group.source is not None
            norm = block.weight(group.source)
            for name in group.names:
                block.replace(name, rotate_inputs(block.weight(name) * norm, turn))
            block.replace(group.source, torch.ones_like(norm))
            return
        for name in group.names:
            block.replace(name, rotate_outputs(block.weight(name), turn))
            bias = block.bias(name)
            if bias is not None:
                block.replace_bias(name, rotate_inputs(bias.unsqueeze(0), turn)[0])


def _is_of_heads(group: LinearGroup) -> bool:
    """Whether it reads values head by head, so that these can be rotated."""
    return group.source is not None and group.source.endswith("v_proj")


def refuse_normed_updates(description: ModelDescription) -> None:
    """Refuse models that norm what their blocks add to the residual stream: those channel weights do not commute with a
    rotation."""
    if "latent" in description.layer_kinds:
        raise UserError(
            f"{description.architecture} has norms inside its attention, which a rotation of the residual stream "
            "would have to pass by: that is not supported",
            "choose another method, such as gptq or awq",
        )
    if any(layer.states for layer in description.kv_layers()):
        raise UserError(
            f"{description.architecture} has recurrent layers, through which a rotation of the residual stream is not "
            "supported",
            "choose another method, such as gptq or awq",
        )
    if description.norm != "rms" or any(layer.norms != "pre" for layer in description.layers):
        raise UserError(
            f"{description.architecture} scales each channel of what its blocks add to the residual stream: "
            "that cannot be rotated",
            "rotate only the value heads: --option rotation.residual=false",
        )
    if any(layer.feed_forward is not None and layer.feed_forward.num_experts for layer in description.layers):
        raise UserError(
            f"{description.architecture} has routers, which stay as they are and would read a rotated stream",
            "rotate only the value heads: --option rotation.residual=false",
        )


def rotate_inputs(weight: Tensor, turn: Turn) -> Tensor:
    """W R^T for a linear [out, in] whose input x becomes R x; also the rows of an embedding."""
    return torch.cat([turn(rows.double()).float() for rows in weight.split(_ROWS)])


def rotate_outputs(weight: Tensor, turn: Turn) -> Tensor:
    """R W for a linear whose output y becomes R y."""
    return rotate_inputs(weight.T, turn).T.contiguous()


def _rotate_heads(block: BlockView, group: LinearGroup, turn: Turn) -> None:
    """One rotation for every value head, so that query heads that share one stay right."""
    assert group.source is not None
    value, size = block.weight(group.source), block.head_dim
    turned = rotate_inputs(value.view(-1, size, value.shape[1]).transpose(1, 2).reshape(-1, size), turn)
    turned = turned.view(-1, value.shape[1], size).transpose(1, 2).reshape(value.shape)
    block.replace(group.source, turned)
    bias = block.bias(group.source)
    if bias is not None:
        block.replace_bias(group.source, rotate_inputs(bias.view(-1, size), turn).view(-1))
    for name in group.names:
        output = block.weight(name)
        block.replace(name, rotate_inputs(output.reshape(-1, size), turn).view(output.shape))
