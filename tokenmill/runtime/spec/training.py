"""Training a draft head: the target's hidden states and outputs in, a small network out.

The target reads sequences (a text and its own continuations) once; its hidden states are kept in float16 and the head
learns, by plain AdamW, to guess the tokens that the target will choose. Nothing of the target is trained. Knows no
files and no command line; cli/train_draft.py calls it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, smooth_l1_loss

from tokenmill.kernels.ref import rms_norm
from tokenmill.model.loader import LoadedModel
from tokenmill.runtime.batch import build_batch
from tokenmill.runtime.build import Runtime
from tokenmill.runtime.spec.head_modules import HEADS, EagleHead, MedusaHeads
from tokenmill.runtime.spec.heads import CONFIG_FILE, FORMAT, WEIGHTS_FILE, target_fingerprint
from tokenmill.types import Request, SamplingParams, ScheduledTokens, StepPlan

_FEATURE_WEIGHT = 0.1  # of the distance between guessed and true hidden states, beside the tokens' cross entropy
_NOISE = 0.1  # added to the states that are learned from, of their size: the text will be another one
_MOST_PASSES = (
    3  # over what there is to learn from: after more, a head knows these answers by heart and others no better
)
_WARM_UP = 0.05  # share of the steps over which the learning rate rises
_HELD_OUT = 0.05  # share of the sequences that acceptance is measured on


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    kind: str = "eagle"
    depth: int = 4  # tokens guessed ahead
    width: int = 0  # of the eagle head's inner layer; 0: twice the hidden size
    steps: int = 600
    batch: int = 2048  # positions in a step
    learning_rate: float = 1e-3
    seed: int = 0


@dataclass(slots=True)
class HiddenStates:
    """Of all sequences one after the other: the token at each position, and the target's state after reading it."""

    token_ids: Tensor  # [N] int64
    hidden: Tensor  # [N, hidden] float16
    left: Tensor  # [N] int64: positions that follow in the same sequence; 0 where nothing is to be learned


@torch.inference_mode()
def read_hidden_states(
    runtime: Runtime,
    sequences: Sequence[Sequence[int]],
    most_tokens: int,
    most_sequences: int,
    firsts: Sequence[int] | None = None,
) -> HiddenStates:
    """Run the target over the sequences, as many in a step as it takes. Overwrites KV pages: the engine must be idle.

    `firsts`: of each sequence, the first position to learn from (default: its beginning)."""
    size, where = runtime.layout.page_size, runtime.store.where
    hidden = []
    most_pages = runtime.store.num_pages // len(runtime.layout.groups)
    for group in _steps(sequences, most_tokens, most_sequences, most_pages, size):
        rows, page = [], 0
        for sequence in group:
            pages = -(-len(sequence) // size)
            tables = []
            for _ in runtime.layout.groups:
                tables.append(list(range(page, page + pages)))
                page += pages
            request = Request("training", list(sequence), SamplingParams())
            rows.append(ScheduledTokens(request, 0, len(sequence), tuple(tables), False))
        longest = max(row.count for row in rows)
        for start in range(0, longest, most_tokens):  # more than one round only for one sequence longer than a step
            cut = [replace(row, start=start, count=min(row.count - start, most_tokens)) for row in rows]
            batch = build_batch(StepPlan(cut), size, where)
            hidden.append(runtime.executor.forward(batch).to(torch.float16, copy=True))
    ids = torch.tensor([token for sequence in sequences for token in sequence])
    left = [torch.arange(len(sequence) - 1, -1, -1) for sequence in sequences]
    for places, first in zip(left, firsts or (), strict=False):
        places[:first] = 0
    states = torch.cat(hidden)
    return HiddenStates(ids.to(states.device), states, torch.cat(left).to(states.device))


def _steps(
    sequences: Sequence[Sequence[int]], most_tokens: int, most: int, num_pages: int, page_size: int
) -> Iterator[list[Sequence[int]]]:
    """Runs of sequences that fit a step and the pages together, in order."""
    run: list[Sequence[int]] = []
    tokens = pages = 0
    for sequence in sequences:
        needed = -(-len(sequence) // page_size)
        full = len(run) == most or tokens + len(sequence) > most_tokens or pages + needed > num_pages
        if run and full:
            yield run
            run, tokens, pages = [], 0, 0
        run.append(sequence)
        tokens, pages = tokens + len(sequence), pages + needed
    if run:
        yield run


def train(
    model: LoadedModel, states: HiddenStates, plan: TrainingPlan, on_step: Callable[[int, Tensor], None]
) -> tuple[MedusaHeads | EagleHead, list[float]]:
    """The head, and how often its guess at each depth is the target's token where those before it were, held out. Fewer
    steps than planned where there is too little to learn from.

    `on_step`: the number of the step and its loss, still on the device: reading it waits for the step."""
    torch.manual_seed(plan.seed)
    d, where = model.decoder.description, model.where
    head = HEADS[plan.kind](d.hidden_size, plan.depth, plan.width or 2 * d.hidden_size).to(where)
    vocabulary = _Vocabulary(model)
    cut = int(len(states.token_ids) * (1.0 - _HELD_OUT))
    usable = (states.left >= plan.depth + 1).nonzero().flatten().cpu()
    training, held_out = usable[usable < cut], usable[usable >= cut]
    steps = min(plan.steps, math.ceil(_MOST_PASSES * len(training) / plan.batch))
    optimizer = torch.optim.AdamW(head.parameters(), lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    for step, positions in enumerate(_batches(training, plan, steps)):
        loss = _loss(head, vocabulary, states, positions, where)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        on_step(step + 1, loss.detach())
    return head, _acceptance(head, vocabulary, states, held_out, where)


def save_head(
    head: MedusaHeads | EagleHead, model: LoadedModel, plan: TrainingPlan, acceptance: list[float], out: Path
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    width = plan.width or 2 * model.decoder.description.hidden_size
    config = {"format": FORMAT, "kind": plan.kind, "depth": plan.depth, "width": width}
    config |= {"target": target_fingerprint(model), "acceptance": acceptance, "training": asdict(plan)}
    save_file({name: each.detach().cpu().contiguous() for name, each in head.state_dict().items()}, out / WEIGHTS_FILE)
    (out / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n")


class _Vocabulary:
    """The target's embedding, norm and head as plain floats, for gradients to pass through."""

    def __init__(self, model: LoadedModel) -> None:
        decoder = model.decoder
        d = decoder.description
        self._table = (
            decoder.embedding.dequantize(0, d.vocab_size).to(model.where) if model.table is None else model.table
        )
        self._scale = d.embedding_scale
        if decoder.head is decoder.embedding:
            self._head = self._table
        else:
            self._head = decoder.head.dequantize(0, d.vocab_size).to(model.where)
        self._norm, self._eps = decoder.norm, d.norm_eps

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._table[token_ids].float() * self._scale

    def logits(self, hidden: Tensor) -> Tensor:
        normed = rms_norm(hidden, self._norm, self._eps)
        return (normed.to(self._head.dtype) @ self._head.T).float()


def _guesses(
    head: MedusaHeads | EagleHead, vocabulary: _Vocabulary, hidden: Tensor, following: Tensor
) -> Iterator[Tensor]:
    """The guessed hidden state at each depth, given the true tokens before it: [T, hidden] each.

    `following` [T, depth + 1]: the tokens after the position of `hidden`.
    """
    if isinstance(head, MedusaHeads):
        yield from head(hidden).unbind(1)
        return
    for depth in range(head.depth):
        hidden = head(hidden, vocabulary.embed(following[:, depth]))
        yield hidden


def _loss(
    head: MedusaHeads | EagleHead, vocabulary: _Vocabulary, states: HiddenStates, positions: Tensor, where: torch.device
) -> Tensor:
    positions = positions.to(states.token_ids.device)
    ahead = positions[:, None] + torch.arange(1, head.depth + 2, device=positions.device)
    following = states.token_ids[ahead].to(where)
    hidden = states.hidden[positions].to(where).float()
    hidden = hidden + _NOISE * hidden.pow(2).mean(-1, keepdim=True).sqrt() * torch.randn_like(hidden)
    total = torch.zeros((), device=where)
    for depth, guess in enumerate(_guesses(head, vocabulary, hidden, following)):
        total = total + cross_entropy(vocabulary.logits(guess), following[:, depth + 1]) * 0.8**depth
        if isinstance(head, EagleHead):
            truth = states.hidden[positions + depth + 1].to(where).float()
            scale = truth.pow(2).mean(-1, keepdim=True).sqrt()
            total = total + _FEATURE_WEIGHT * smooth_l1_loss(guess / scale, truth / scale)
    return total


@torch.inference_mode()
def _acceptance(
    head: MedusaHeads | EagleHead, vocabulary: _Vocabulary, states: HiddenStates, held_out: Tensor, where: torch.device
) -> list[float]:
    head.eval()
    right, tried = [0] * head.depth, [0] * head.depth
    for positions in held_out[:8192].split(512):
        ahead = positions[:, None] + torch.arange(1, head.depth + 2)
        following = states.token_ids[ahead.to(states.token_ids.device)].to(where)
        alive = torch.ones(len(positions), dtype=torch.bool, device=where)
        hidden = states.hidden[positions.to(states.hidden.device)].to(where).float()
        for depth, guess in enumerate(_guesses(head, vocabulary, hidden, following)):
            same = vocabulary.logits(guess).argmax(-1) == following[:, depth + 1]
            tried[depth] += int(alive.sum())
            alive &= same
            right[depth] += int(alive.sum())
    return [hits / max(1, count) for hits, count in zip(right, tried, strict=True)]


def _batches(positions: Tensor, plan: TrainingPlan, steps: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(plan.seed)
    for _ in range(steps):
        yield positions[torch.randint(len(positions), (min(plan.batch, len(positions)),), generator=generator)]


def _rate(step: int, steps: int) -> float:
    rising = max(1, int(steps * _WARM_UP))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1.0 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))
