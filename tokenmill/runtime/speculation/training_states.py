"""Training data of a draft head: the target's hidden states over sequences, and the keys and values it attends to.

The target computes every sequence once, in steps as large as it takes; batches of entire sequences then go to the
training loop. Knows no losses and no heads. Used by training.py and engine/draft_training.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tokenmill.kernels.ref import rope
from tokenmill.model.attention.base import AttentionSpec
from tokenmill.model.layers.rotary import RotaryTable
from tokenmill.runtime.build import Runtime
from tokenmill.runtime.executors.base import StepInput
from tokenmill.types import Request, SamplingParams, ScheduledTokens


@dataclass(slots=True)
class HiddenStates:
    """Of all sequences, concatenated: the token at each position, and the target's hidden state there."""

    token_ids: Tensor  # [N] int64
    hidden: Tensor  # [N, hidden] float16
    begins: Tensor  # [S] int64, on the host: where each sequence begins
    lengths: Tensor  # [S]
    firsts: Tensor  # [S]: the first position of each to train on, counted from its beginning
    # By requested layer: [N, kv_heads, head_dim] in the pages' dtype, with rotary positions applied.
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def learnable(self, ahead: int) -> Tensor:
        """[S]: the number of positions to train on, those with `ahead` tokens after them."""
        return (self.lengths - ahead - self.firsts).clamp(min=0)


@torch.inference_mode()
def read_hidden_states(
    runtime: Runtime,
    sequences: Sequence[Sequence[int]],
    max_tokens: int,
    max_sequences: int,
    firsts: Sequence[int] | None = None,
    layers: Sequence[int] = (),
) -> HiddenStates:
    """Run the target over the sequences, in steps as large as it takes. Overwrites KV pages: the engine must be idle.

    `firsts`: of each sequence, the first position to learn from (default: its beginning). `layers`: whose keys and
    values are kept."""
    size = runtime.layout.page_size
    hidden = []
    stored: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}
    max_pages = runtime.store.num_pages // len(runtime.layout.groups)
    for group in _steps(sequences, max_tokens, max_sequences, max_pages, size):
        rows = _rows(group, size, len(runtime.layout.groups))
        longest = max(row.count for row in rows)
        for start in range(0, longest, max_tokens):  # more than one round only for one sequence longer than a step
            cut = [replace(row, start=start, count=min(row.count - start, max_tokens)) for row in rows]
            output = runtime.executor.step(StepInput(cut, hidden=True))
            hidden.append(output.hidden(range(sum(row.count for row in cut))).to(torch.float16))
        for layer, pairs in stored.items():
            pairs.append(_stored(runtime, rows, layer))
    ids = torch.tensor([token for sequence in sequences for token in sequence])
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    states = torch.cat(hidden)
    return HiddenStates(
        ids.to(states.device),
        states,
        lengths.cumsum(0) - lengths,
        lengths,
        torch.zeros_like(lengths) if firsts is None else torch.tensor(firsts),
        {layer: torch.cat([k for k, _ in pairs]) for layer, pairs in stored.items()},
        {layer: torch.cat([v for _, v in pairs]) for layer, pairs in stored.items()},
    )


def _rows(sequences: Sequence[Sequence[int]], page_size: int, num_groups: int) -> list[ScheduledTokens]:
    """One row per sequence, with consecutive pages of its own."""
    rows, page = [], 0
    for sequence in sequences:
        pages = -(-len(sequence) // page_size)
        tables = []
        for _ in range(num_groups):
            tables.append(list(range(page, page + pages)))
            page += pages
        request = Request("training", list(sequence), SamplingParams())
        rows.append(ScheduledTokens(request, 0, len(sequence), tuple(tables), False))
    return rows


def _stored(runtime: Runtime, rows: Sequence[ScheduledTokens], layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values [T, kv_heads, head_dim] of the rows' tokens, one row after the other."""
    group, slot = runtime.layout.place(layer)
    size, device = runtime.layout.page_size, runtime.store.device
    pages = torch.tensor([page for row in rows for page in row.block_tables[group]], device=device)
    offsets = torch.tensor([n for row in rows for n in _padded(row.count, size)], device=device)
    k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in runtime.store.read(slot, pages))
    return k[offsets >= 0], v[offsets >= 0]


def _padded(count: int, page_size: int) -> list[int]:
    """Token offsets, padded to full pages with -1."""
    return [*range(count), *[-1] * (-count % page_size)]


def _steps(
    sequences: Sequence[Sequence[int]], max_tokens: int, max_sequences: int, num_pages: int, page_size: int
) -> Iterator[list[Sequence[int]]]:
    """Consecutive sequences that together fit a step and the pages."""
    run: list[Sequence[int]] = []
    tokens = pages = 0
    for sequence in sequences:
        needed = -(-len(sequence) // page_size)
        full = len(run) == max_sequences or tokens + len(sequence) > max_tokens or pages + needed > num_pages
        if run and full:
            yield run
            run, tokens, pages = [], 0, 0
        run.append(sequence)
        tokens, pages = tokens + len(sequence), pages + needed
    if run:
        yield run


class SequenceBatch:
    """Entire sequences: all their positions to train on, P in total, and the context of each. All indices are computed
    on the host beforehand, so that training never waits for the device."""

    def __init__(self, states: HiddenStates, chosen: Tensor, ahead: int, device: torch.device) -> None:
        """`chosen`: numbers of sequences; `ahead`: tokens that must follow a position."""
        self.states = states
        counts, firsts, begins = states.learnable(ahead)[chosen], states.firsts[chosen], states.begins[chosen]
        grid = torch.arange(int(counts.max()))
        offsets = firsts[:, None] + grid  # [B, Q]: in their sequences
        keys = torch.arange(int((firsts + counts).max()))
        trained = (grid < counts[:, None]).flatten().nonzero().flatten()
        self._shape = offsets.shape
        self._trained = trained.to(device)  # [P]: in the grid
        self._offsets = offsets.flatten()[trained].to(device)  # [P]
        self.positions = (begins[:, None] + offsets).flatten()[trained].to(device)  # [P]: in `states`
        self._mask = (keys <= offsets[:, :, None])[:, None].to(device)  # [B, 1, Q, K]
        self._keys = (begins[:, None] + keys).clamp(max=len(states.token_ids) - 1).to(device)  # [B, K]: in `states`

    def tokens(self, ahead: int) -> Tensor:
        """[P]: the tokens `ahead` positions after these."""
        return self.states.token_ids[self.positions + ahead]

    def hidden(self, ahead: int = 0) -> Tensor:
        """[P, hidden] float32."""
        return self.states.hidden[self.positions + ahead].float()

    def attend(self, queries: Tensor, layers: Sequence[int], specs: list[AttentionSpec], table: RotaryTable) -> Tensor:
        """Attention of queries [P, layers * heads * head_dim] over the keys up to their positions, as page_views.py."""
        head_dim = specs[0].head_dim
        rotated = rope(queries, self._offsets, table.cos, table.sin, head_dim, table.interleaved)
        outputs = []
        for layer, spec, part in zip(layers, specs, rotated.chunk(len(specs), 1), strict=True):
            padded = part.new_zeros(self._shape.numel(), part.shape[1]).index_copy(0, self._trained, part)
            heads = padded.view(*self._shape, spec.num_heads, head_dim).transpose(1, 2)
            k, v = (by_layer[layer][self._keys].to(part.dtype) for by_layer in (self.states.keys, self.states.values))
            group = spec.num_heads // spec.num_kv_heads
            k, v = (tensor.transpose(1, 2).repeat_interleave(group, 1) for tensor in (k, v))
            attended = scaled_dot_product_attention(heads, k, v, attn_mask=self._mask, scale=spec.scale)
            outputs.append(attended.transpose(1, 2).reshape(-1, part.shape[1]).index_select(0, self._trained))
        return torch.cat(outputs, 1)


def shuffled_batches(counts: Tensor, numbers: Tensor, positions: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Endless batches of sequence numbers from `numbers`, of at least `positions` positions each, reshuffled every
    epoch."""
    while True:
        batch: list[int] = []
        total = 0
        for number in numbers[torch.randperm(len(numbers), generator=generator)].tolist():
            batch.append(number)
            total += int(counts[number])
            if total >= positions:
                yield torch.tensor(batch)
                batch, total = [], 0
        if batch:
            yield torch.tensor(batch)
