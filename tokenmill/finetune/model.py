"""A frozen base with trainable low-rank factors: its losses on packed rows, and the adapter they become.

Builds the engine's own architecture over the checkpoint, so what is trained is what is served, in every weight format.
Blocks are recomputed in the backward pass (gradient checkpointing), and so are logits where they would be large.
Factors begin as PEFT's: A uniform, B zero. Knows nothing of steps or files. Used by job.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint as recomputed

from tokenmill.checkpoint.adapters.adapter import Adapter, AdapterMatrix
from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.hf_export import to_hf_layout
from tokenmill.errors import UserError
from tokenmill.finetune.data import IGNORED, Rows
from tokenmill.finetune.ops import LowRank, TrainingOps
from tokenmill.log import get_logger
from tokenmill.model.architectures import architecture_of
from tokenmill.model.architectures.decoder import Decoder
from tokenmill.model.architectures.hybrid import Hybrid
from tokenmill.model.device_weights import place_reference
from tokenmill.model.reader import WeightReader

_log = get_logger(__name__)
_LOGITS_AT_ONCE = 1 << 24  # values; 64 MiB, a few times over with gradients
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
MAX_RANK = 1024


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    rank: int = 16
    alpha: float = 0.0  # 0: twice the rank
    targets: tuple[str, ...] = (*ATTENTION, *MLP)  # last parts of module names
    seed: int = 0

    @property
    def scale(self) -> float:
        return (self.alpha or 2 * self.rank) / self.rank


class TrainableModel:
    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, num_positions: int, plan: AdapterPlan | None = None
    ) -> None:
        """`plan`: None for a model that is only compared with."""
        description = checkpoint.description
        self.checkpoint, self.device = checkpoint, device
        reader = WeightReader(checkpoint)
        self.decoder: Decoder = architecture_of(description)(reader, description, num_positions)
        reader.finish()
        kinds = {layer.kind for layer in description.layers}
        if isinstance(self.decoder, Hybrid) or not kinds <= {"full", "sliding", "chunked"}:
            raise UserError(
                f"'{description.model_type}' has {', '.join(sorted(kinds - {'full', 'sliding', 'chunked'}))} layers, "
                "which `finetune` does not train",
                "use a model with attention in every layer",
            )
        if device.type != "cpu":
            place_reference(self.decoder, reader, device)
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16  # of large products
        self.weights = reader.weights
        self._names = {id(weight): name for name, weight in reader.weights.items()}
        self.factors: dict[str, LowRank] = {} if plan is None else self._begin(plan)
        self._adapted = True
        rounded = {weight.activations for weight in self.weights.values()} - {"none"}
        if rounded:
            _log.warning("inputs of products are not rounded in training (%s)", ", ".join(sorted(rounded)))

    @property
    def is_quantized(self) -> bool:
        return any(weight.format_name != "dense" for weight in self.weights.values())

    def _begin(self, plan: AdapterPlan) -> dict[str, LowRank]:
        chosen = [name for name in self.weights if _is_target(name, plan.targets)]
        if not chosen:
            known = sorted({name.rpartition(".")[2] for name in self.weights if name.startswith("model.layers.")})
            raise UserError(f"no module is called {', '.join(plan.targets)}", f"there are {', '.join(known)}")
        generator = torch.Generator().manual_seed(plan.seed)
        factors = {}
        for name in chosen:
            weight = self.weights[name]
            if plan.rank > min(weight.in_features, weight.out_features, MAX_RANK):
                most = min(weight.in_features, weight.out_features, MAX_RANK)
                raise UserError(f"--rank {plan.rank} is more than {name} can have ({most})", f"give at most {most}")
            bound = 1 / math.sqrt(weight.in_features)  # Kaiming's with a slope of sqrt(5), as nn.Linear begins
            a = (torch.rand(plan.rank, weight.in_features, generator=generator) * 2 - 1) * bound
            b = torch.zeros(weight.out_features, plan.rank)
            a, b = a.to(self.device).requires_grad_(), b.to(self.device).requires_grad_()
            factors[name] = LowRank(a, b, plan.scale)
        return factors

    def parameters(self) -> dict[str, Tensor]:
        """Trained tensors by name: MODULE.a and MODULE.b."""
        return {f"{name}.{side}": getattr(each, side) for name, each in self.factors.items() for side in "ab"}

    @contextmanager
    def base(self) -> Iterator[None]:
        """The base without its adapter."""
        self._adapted = False
        try:
            yield
        finally:
            self._adapted = True

    def hidden(self, rows: Rows) -> tuple[TrainingOps, Tensor]:
        """States of all tokens before the final norm, [tokens, hidden], and the ops that made them."""
        ops = TrainingOps(self._names, self.factors if self._adapted else {}, rows, self.dtype)
        decoder = self.decoder
        residual: Tensor = ops.embed(decoder.embedding, decoder.description.embedding_scale)
        if decoder.positions is not None:
            residual = ops.add_positions(residual, decoder.positions)
        update: Tensor | None = None
        for block in decoder.blocks:
            if torch.is_grad_enabled():
                residual, update = recomputed(partial(block, ops), residual, update, use_reentrant=False)
            else:
                residual, update = block(ops, residual, update)
        assert update is not None
        return ops, residual + update

    def text_loss(self, rows: Rows) -> Tensor:
        """Sum of the cross-entropies of the targets, in nats."""
        ops, hidden = self.hidden(rows)
        learned = (rows.targets != IGNORED).flatten()
        targets = rows.targets.flatten()[learned]

        def piece(states: Tensor, chosen: Tensor) -> Tensor:
            return cross_entropy(self.decoder.logits(ops, states), chosen, reduction="sum")

        return self._summed(piece, hidden[learned], targets)

    def divergence(self, rows: Rows, teacher: TrainableModel) -> Tensor:
        """Sum over the targets of KL(teacher || this model), in nats."""
        with torch.no_grad():
            expected_ops, expected = teacher.hidden(rows)
        ops, hidden = self.hidden(rows)
        learned = (rows.targets != IGNORED).flatten()

        def piece(states: Tensor, wanted: Tensor) -> Tensor:
            with torch.no_grad():
                target = teacher.decoder.logits(expected_ops, wanted).log_softmax(-1)
            ours = self.decoder.logits(ops, states)
            width = min(ours.shape[1], target.shape[1])  # a vocabulary may be padded
            ours, target = ours[:, :width].log_softmax(-1), target[:, :width]
            return (target.exp() * (target - ours)).sum()

        return self._summed(piece, hidden[learned], expected[learned])

    def _summed(self, piece: Callable[[Tensor, Tensor], Tensor], states: Tensor, other: Tensor) -> Tensor:
        """The sum over pieces of the rows whose logits fit in memory; with gradients they are computed again."""
        step = max(1, _LOGITS_AT_ONCE // self.checkpoint.description.vocab_size)
        whole = states.shape[0] <= step
        total = states.new_zeros(())
        for begin in range(0, states.shape[0], step):
            part = (states[begin : begin + step], other[begin : begin + step])
            if torch.is_grad_enabled() and not whole:
                total = total + recomputed(piece, *part, use_reentrant=False)
            else:
                total = total + piece(*part)
        return total

    def adapter(self, name: str, base_name: str, base_hash: str) -> Adapter:
        """The factors as an adapter, its rows as Hugging Face files have them."""
        description = self.checkpoint.description

        def turned(module: str, b: Tensor) -> Tensor:
            b = b.detach().cpu()
            return to_hf_layout(f"{module}.weight", b, description) if description.rope_interleaved else b

        matrices = {
            module: AdapterMatrix(module, each.a.detach().cpu(), turned(module, each.b), each.scale)
            for module, each in self.factors.items()
        }
        return Adapter(name, matrices, base_name=base_name, base_hash=base_hash)


def _is_target(name: str, targets: tuple[str, ...]) -> bool:
    """Experts are left out: each would see few tokens, and their adapters are not servable."""
    return (
        name.startswith("model.layers.")
        and ".experts." not in name
        and any(name.endswith(f".{target}") for target in targets)
    )
