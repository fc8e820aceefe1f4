"""How a model is divided among ranks: which rows, heads, experts and layers each has, and what a step must exchange.

Pure arithmetic over plain numbers, shared by the loader, the runtime and the planner, so that what is planned is what
runs. Ranks are numbered stage by stage: those of one pipeline stage follow each other and divide its matrices
(tensor parallelism); stages divide the layers. Imports no torch and knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tokenmill.errors import UserError

MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class Grid:
    """tp ranks that share every layer, pp stages that share the layers; with `experts` each rank of a stage holds whole
    experts instead of a part of every one. Or cp ranks with the whole model each that share the tokens of prompts."""

    tp: int = 1
    pp: int = 1
    experts: bool = False
    cp: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.cp) < 1 or self.size > MAX_RANKS:
            raise UserError(f"{self.tp} x {self.pp} x {self.cp} ranks cannot run", f"use 1 to {MAX_RANKS} ranks")
        if self.cp > 1 and self.tp * self.pp > 1:
            raise UserError(
                "ranks share either the tokens of prompts or the model",
                "leave out --context-parallel-size or the others",
            )

    @property
    def size(self) -> int:
        return self.tp * self.pp * self.cp

    def place(self, rank: int) -> Place:
        assert 0 <= rank < self.size, rank
        return Place(self, rank)


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of a grid."""

    grid: Grid
    rank: int

    @property
    def part(self) -> int:
        """Which of the tp parts of a matrix, or of the cp parts of a prompt, it has."""
        return self.rank % self.team_size

    @property
    def stage(self) -> int:
        return self.rank // self.team_size

    @property
    def team_size(self) -> int:
        return self.grid.tp * self.grid.cp

    @property
    def team(self) -> tuple[int, ...]:
        """The ranks that share its layers, or the tokens of its prompts."""
        if self.grid.cp > 1:
            return tuple(range(self.grid.cp))
        first = self.stage * self.grid.tp
        return tuple(range(first, first + self.grid.tp))

    @property
    def next_stage(self) -> int:
        """The rank that takes over what this one computed; behind the last stage the first, which has the head."""
        return (self.rank + self.grid.tp) % self.grid.size

    @property
    def previous_stage(self) -> int:
        return (self.rank - self.grid.tp) % self.grid.size


def share(total: int, parts: int, part: int, multiple: int = 1) -> range:
    """The part's range of `total` things, cut at multiples only: shares differ by at most one multiple, the last takes
    what remains of one. Ranges of all parts follow each other and cover everything."""
    units = -(-total // multiple)
    even, more = divmod(units, parts)
    first = part * even + min(part, more)
    last = first + even + (part < more)
    return range(min(total, first * multiple), min(total, last * multiple))


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The heads of one rank. Where there are more ranks than KV heads, several ranks hold the same one."""

    queries: range
    kv: range


def heads_of(num_heads: int, num_kv_heads: int, parts: int, part: int) -> HeadShare:
    """Legal sizes only, see `heads_problem`."""
    queries = share(num_heads, parts, part)
    if parts <= num_kv_heads:
        return HeadShare(queries, share(num_kv_heads, parts, part))
    own = part // (parts // num_kv_heads)
    return HeadShare(queries, range(own, own + 1))


def heads_problem(num_heads: int, num_kv_heads: int, parts: int) -> str:
    """Why the heads cannot be divided so; empty if they can."""
    if num_heads % parts:
        return f"{num_heads} query heads do not divide by {parts}"
    if num_kv_heads % parts and parts % num_kv_heads:
        return f"{num_kv_heads} KV heads can be neither divided nor copied among {parts} ranks"
    return ""


def width_problem(width: int, parts: int) -> str:
    """The same of an MLP's width."""
    return f"an MLP of width {width} does not divide by {parts}" if width % parts else ""


def experts_of(num_experts: int, parts: int, part: int) -> range:
    """Neighbouring experts; every rank has at least one."""
    return share(num_experts, parts, part)


def legal_sizes(num_heads: int, num_kv_heads: int, widths: Sequence[int], most: int = 16) -> list[int]:
    """Tensor-parallel sizes that the heads and the widths of the MLPs allow."""
    return [
        parts
        for parts in range(1, most + 1)
        if not heads_problem(num_heads, num_kv_heads, parts) and not any(width_problem(w, parts) for w in widths)
    ]


def stages(costs: Sequence[float], pp: int, edges: float = 0.0) -> list[range]:
    """Layers of each stage so that the most expensive one costs the least. `costs`: of each layer; `edges`: of what the
    first stage does besides (the head)."""
    count = len(costs)
    if pp > count:
        raise UserError(f"{count} layers cannot be divided among {pp} stages", f"use at most {count} stages")
    # best[s][i]: the least cost of the dearest of s stages that hold the first i layers, and where the last begins.
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best = [[(float("inf"), 0)] * (count + 1) for _ in range(pp + 1)]
    best[0][0] = (0.0, 0)
    for stage in range(1, pp + 1):
        for end in range(stage, count + 1):
            best[stage][end] = min(
                (max(best[stage - 1][begin][0], sums[end] - sums[begin] + (edges if stage == 1 else 0.0)), begin)
                for begin in range(stage - 1, end)
            )
    ends = [count]
    for stage in range(pp, 0, -1):
        ends.append(best[stage][ends[-1]][1])
    ends.reverse()
    return [range(begin, end) for begin, end in pairwise(ends)]


# --- what a step exchanges ---


@dataclass(frozen=True, slots=True)
class LayerTraffic:
    """The widths of one layer that ranks exchange: numbers per token, before they are divided."""

    hidden: int
    attended: int = 0  # what the output projection of attention reads; 0: every rank computes the mixer whole
    inner: int = 0  # what the second product of the MLP reads; 0: as above


@dataclass(frozen=True, slots=True)
class Traffic:
    calls: int  # collectives, or messages between stages
    nbytes: int  # that one rank receives


def gathered_bytes(tokens: int, width: int, parts: int, item: int = 4) -> int:
    """What the first rank receives when `parts` ranks put a row of `width` numbers together for each token."""
    return tokens * (width - len(share(width, parts, 0))) * item


def step_traffic(
    layers: Sequence[LayerTraffic],
    grid: Grid,
    tokens: int,
    logit_rows: int,
    vocabulary: int,
    exact: bool,
    item: int = 4,
) -> Traffic:
    """Of one rank of the first stage in one step: `layers` are its own. Sums are made by gathering all ranks' partial
    results and adding them in the order of ranks, so that every rank has the same bits."""
    calls = nbytes = 0
    if grid.tp > 1:
        for layer in layers:
            for inner in (layer.attended, layer.inner):
                if not inner:
                    continue
                if exact:
                    calls += 2
                    nbytes += gathered_bytes(tokens, inner, grid.tp, item)
                    nbytes += gathered_bytes(tokens, layer.hidden, grid.tp, item)
                else:
                    calls += 1
                    nbytes += tokens * layer.hidden * (grid.tp - 1) * item
        calls += 1
        nbytes += gathered_bytes(logit_rows, vocabulary, grid.tp, item)
    if grid.pp > 1:
        calls += 1
        nbytes += 2 * tokens * layers[0].hidden * item
    return Traffic(calls, nbytes)
