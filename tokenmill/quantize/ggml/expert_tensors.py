"""The tensors of expert layers as a GGUF stores them: one for all experts and each projection, under canonical names.

Made from the layers of the architecture, so that it does not matter how the source keeps its experts. Used by
source_tensors.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokenmill.model.architectures.decoder import Decoder
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.layers.experts import Experts, expert_layers

_FEED_FORWARDS = re.compile(r"model\.layers\.(\d+)\.(mlp|block_sparse_moe|feed_forward)\.")


@dataclass(slots=True, eq=False)
class ExpertTensors:
    matrices: dict[str, list[LinearWeight]] = field(default_factory=dict)  # by canonical prefix; several: a stack
    vectors: dict[str, Tensor] = field(default_factory=dict)  # by canonical name
    _layers: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, decoder: Decoder) -> ExpertTensors:
        tensors = cls()
        for layer, block in enumerate(decoder.blocks):
            for experts in expert_layers([block]):
                tensors._layers.add(layer)
                tensors._add(f"model.layers.{layer}.mlp", experts)
        return tensors

    def owns(self, name: str) -> bool:
        """Whether a tensor of the checkpoint belongs to one of these layers' experts."""
        match = _FEED_FORWARDS.match(name)
        return match is not None and int(match[1]) in self._layers

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for prefix, weights in self.matrices.items():
            shape = (weights[0].out_features, weights[0].in_features)
            one_row = prefix.endswith("shared_expert_gate")
            stacked = prefix.split(".")[-2] == "experts"
            shapes[f"{prefix}.weight"] = (len(weights), *shape) if stacked else shape[1:] if one_row else shape
        return shapes | {name: tuple(vector.shape) for name, vector in self.vectors.items()}

    def _add(self, prefix: str, mlp: Experts) -> None:
        self.matrices[f"{prefix}.gate"] = [mlp.router]
        if mlp.router.bias is not None:
            self.vectors[f"{prefix}.gate.bias"] = mlp.router.bias
        if mlp.routing.correction_bias is not None:
            self.vectors[f"{prefix}.gate.e_score_correction_bias"] = mlp.routing.correction_bias
        inputs, outputs = mlp.stacks.gate_up.experts, mlp.stacks.down.experts
        for name, weights in (
            ("gate_proj", [blocks[0] for blocks in inputs]),
            ("up_proj", [blocks[1] for blocks in inputs]),
            ("down_proj", [blocks[0] for blocks in outputs]),
        ):
            self.matrices[f"{prefix}.experts.{name}"] = weights
            biases = [weight.bias for weight in weights if weight.bias is not None]
            if biases:
                self.vectors[f"{prefix}.experts.{name}.bias"] = torch.stack(biases)
        if mlp.shared is not None:
            shared = (*mlp.shared.inputs, mlp.shared.output)
            for name, weight in zip(("gate_proj", "up_proj", "down_proj"), shared, strict=True):
                self.matrices[f"{prefix}.shared_expert.{name}"] = [weight]
            if mlp.shared.gate is not None:
                self.matrices[f"{prefix}.shared_expert_gate"] = [mlp.shared.gate]
