"""Training a draft head: the target's hidden states and outputs in, a small network out.

AdamW trains the head to predict the target's next tokens: half of the loss is on the tokens themselves, half on the
probabilities that the target gives to the vocabulary. The target is not trained. Knows no files but the head's own and
no command line; called by engine/draft_training.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from tokenmill.model.loader import LoadedModel
from tokenmill.runtime.speculation.head_modules import EagleHead, MedusaHeads, build_head
from tokenmill.runtime.speculation.heads import CONFIG_FILE, FORMAT, WEIGHTS_FILE, target_fingerprint
from tokenmill.runtime.speculation.page_views import attention_specs, choose_layers
from tokenmill.runtime.speculation.training_states import HiddenStates, SequenceBatch, shuffled_batches

_FEATURE_WEIGHT = 0.1  # of the distance between predicted and true hidden states, next to the cross entropy
_DEPTH_DECAY = 0.8  # of the loss per further depth: deeper tokens are verified less often
_SOFT_SHARE = 0.5  # of the target's probabilities in the training distribution; the rest are the tokens themselves
_NOISE = 0.1  # standard deviation of noise on the input states, relative to their RMS: against overfitting
_MAX_EPOCHS = 3  # more only overfit
_WARM_UP = 0.05  # share of the steps over which the learning rate rises to its peak
_HELD_OUT = 0.05  # share of the sequences that acceptance is measured on
_MAX_MEASURED = 8192  # held-out positions


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    kind: str = "eagle"
    depth: int = 4  # tokens predicted ahead
    width: int = 0  # of the eagle head's inner layer; 0: twice the hidden size
    layers: int = 3  # of the target, whose keys and values an eagle head attends to
    steps: int = 600
    batch: int = 2048  # positions in a step
    learning_rate: float = 1e-3
    seed: int = 0


def planned_layers(model: LoadedModel, plan: TrainingPlan) -> tuple[int, ...]:
    """The layers whose keys and values are needed for training."""
    return choose_layers(model.decoder, plan.layers) if plan.kind == "eagle" and plan.layers else ()


def train(
    model: LoadedModel, states: HiddenStates, plan: TrainingPlan, on_step: Callable[[int, Tensor], None]
) -> tuple[MedusaHeads | EagleHead, list[float]]:
    """The head, and its acceptance rate at each depth, given that the tokens before were right, on held-out sequences.
    Runs fewer steps than planned if there is too little data.

    `on_step`: gets the number of the step and its loss, still on the device: reading it waits for the step."""
    torch.manual_seed(plan.seed)
    d, device = model.decoder.description, model.device
    layers = planned_layers(model, plan)
    width = plan.width or 2 * d.hidden_size
    head = build_head(plan.kind, d.hidden_size, plan.depth, width, layers, d.num_heads * d.head_dim).to(device)
    objective = _Objective(model, head)
    counts = states.learnable(plan.depth + 1)
    usable = counts.nonzero().flatten()
    cut = max(1, int(len(usable) * (1.0 - _HELD_OUT)))
    total = int(counts[usable[:cut]].sum())
    steps = min(plan.steps, math.ceil(_MAX_EPOCHS * total / plan.batch))
    optimizer = torch.optim.AdamW(
        head.parameters(), lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=device.type == "cuda"
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    batches = shuffled_batches(counts, usable[:cut], plan.batch, torch.Generator().manual_seed(plan.seed))
    for step, chosen in enumerate(islice(batches, steps)):
        loss = objective.loss(SequenceBatch(states, chosen, plan.depth + 1, device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        on_step(step + 1, loss.detach())
    held_out = usable[cut:] if cut < len(usable) else usable
    return head, objective.acceptance(states, held_out, device)


def save_head(
    head: MedusaHeads | EagleHead, model: LoadedModel, plan: TrainingPlan, acceptance: list[float], out: Path
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    width = plan.width or 2 * model.decoder.description.hidden_size
    config = {"format": FORMAT, "kind": plan.kind, "depth": plan.depth, "width": width, "layers": list(head.layers)}
    config |= {"target": target_fingerprint(model), "acceptance": acceptance, "training": asdict(plan)}
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()
    }
    save_file(weights, out / WEIGHTS_FILE)
    (out / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n")


class _Objective:
    """The loss of a head; holds the target's embedding, norm and output matrix as floats, for gradients to pass
    through."""

    def __init__(self, model: LoadedModel, head: MedusaHeads | EagleHead) -> None:
        self.head = head
        decoder, d = model.decoder, model.decoder.description
        self._specs, self._rotary = attention_specs(decoder, head.layers or (0,))
        self._table = (
            decoder.embedding.dequantize(0, d.vocab_size).to(model.device) if model.table is None else model.table
        )
        self._scale = d.embedding_scale
        tied = decoder.head is decoder.embedding
        self._output_matrix = self._table if tied else decoder.head.dequantize(0, d.vocab_size).to(model.device)
        self._norm = decoder.norm
        self._autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda")

    def loss(self, batch: SequenceBatch) -> Tensor:
        hidden = batch.hidden()
        hidden = hidden + _NOISE * hidden.pow(2).mean(-1, keepdim=True).sqrt() * torch.randn_like(hidden)
        total = torch.zeros((), device=hidden.device)
        for depth, guess in enumerate(self._guesses(batch, hidden)):
            truth = batch.hidden(depth + 1)
            target = _SOFT_SHARE * self._logits(truth).softmax(-1)
            target.scatter_add_(
                1, batch.tokens(depth + 2)[:, None], target.new_full((len(target), 1), 1.0 - _SOFT_SHARE)
            )
            normed = self._norm.of_tensor(guess.float())
            total = total + _CrossEntropy.apply(normed, self._output_matrix, target) * _DEPTH_DECAY**depth
            if isinstance(self.head, EagleHead):
                scale = truth.pow(2).mean(-1, keepdim=True).sqrt()
                total = total + _FEATURE_WEIGHT * smooth_l1_loss(guess.float() / scale, truth / scale)
        return total

    @torch.inference_mode()
    def acceptance(self, states: HiddenStates, held_out: Tensor, device: torch.device) -> list[float]:
        self.head.eval()
        depth = self.head.depth
        right, tried = [0] * depth, [0] * depth
        counts = states.learnable(depth + 1)
        enough = held_out[: int((counts[held_out].cumsum(0) < _MAX_MEASURED).sum()) + 1]
        for chosen in enough.split(4):
            batch = SequenceBatch(states, chosen, depth + 1, device)
            alive = torch.ones(len(batch.positions), dtype=torch.bool, device=device)
            for offset, guess in enumerate(self._guesses(batch, batch.hidden())):
                same = self._logits(guess.float()).argmax(-1) == batch.tokens(offset + 2)
                tried[offset] += int(alive.sum())
                alive &= same
                right[offset] += int(alive.sum())
        return [hits / max(1, count) for hits, count in zip(right, tried, strict=True)]

    def _guesses(self, batch: SequenceBatch, hidden: Tensor) -> Iterator[Tensor]:
        """The predicted hidden states [P, hidden] at each depth, given the true tokens before it."""
        head: Any = self.head
        if isinstance(head, MedusaHeads):
            with self._autocast:
                guesses = head(hidden)
            yield from guesses.unbind(1)
            return
        for depth in range(head.depth):
            embedded = self._table[batch.tokens(depth + 1)].float() * self._scale
            with self._autocast:
                hidden = head(
                    hidden, embedded, lambda queries: batch.attend(queries, head.layers, self._specs, self._rotary)
                )
            yield hidden

    @torch.no_grad()
    def _logits(self, hidden: Tensor) -> Tensor:
        normed = self._norm.of_tensor(hidden)
        return (normed.to(self._output_matrix.dtype) @ self._output_matrix.T).float()


class _CrossEntropy(torch.autograd.Function):
    """Mean cross entropy of the logits with target distributions. The gradient is computed with the loss, so that
    logits need not be kept."""

    @staticmethod
    def forward(ctx: Any, normed: Tensor, output_matrix: Tensor, target: Tensor) -> Tensor:
        """normed [P, hidden] float32; output_matrix [vocab, hidden]; target [P, vocab] float32, which is
        overwritten."""
        logits = (normed.to(output_matrix.dtype) @ output_matrix.T).float()
        normalizer = logits.logsumexp(-1, keepdim=True)
        loss = (normalizer[:, 0] - (logits * target).sum(-1)).mean()
        difference = torch.sub(logits.sub_(normalizer).exp_(), target, out=target)
        ctx.save_for_backward((difference.to(output_matrix.dtype) @ output_matrix).float() / len(normed))
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0], None, None


def _rate(step: int, steps: int) -> float:
    warm_up = max(1, int(steps * _WARM_UP))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1.0 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))
