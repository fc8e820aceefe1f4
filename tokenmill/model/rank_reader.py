"""Reads the part of a checkpoint that one rank holds.

The architecture is built from the rank's own description (checkpoint/rank_description.py) and asks for matrices of its
sizes; here each is read whole, as the file has it (mapped, not copied), and cut: by the rows of the rank's heads and of
its part of an MLP, and the matrices behind those by columns where their format can be cut there ("sum"), else, and in
exact mode always, by rows ("gather"). Experts are cut once all are read. Used by the loader.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.description import LayerDescription, ModelDescription
from tokenmill.checkpoint.dummy import DummyCheckpoint
from tokenmill.checkpoint.mixers import Attention, LatentAttention
from tokenmill.checkpoint.rank_description import EMPTY_LAYER, head_share, is_divided, local_description
from tokenmill.hardware.sharding import Place, experts_of, share
from tokenmill.log import get_logger
from tokenmill.model.dummy_reader import DummyReader
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.formats.coded import CodedWeight
from tokenmill.model.formats.slices import columns_problem, cut_columns, cut_rows, pick
from tokenmill.model.formats.stacks import ExpertStacks, WeightStack
from tokenmill.model.reader import WeightReader

_log = get_logger(__name__)
_LAYERS = "model.layers."
_MLP_INPUTS, _MLP_OUTPUTS = ("gate_proj", "up_proj", "input_linear"), ("down_proj", "output_linear")


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank has of `whole` outputs or inputs of a matrix."""

    whole: int
    ranges: tuple[range, ...]
    of_inputs: bool = False


class RankCuts(WeightReader):
    """The cutting, over whichever reader reads the whole."""

    place: Place
    exact: bool
    _whole = False  # while a matrix is read whole: its bias is cut with it

    def divide(self, place: Place, exact: bool) -> None:
        self.place, self.exact = place, exact
        self._local = local_description(self.checkpoint.description, place)
        self._gathered: dict[str, str] = {}  # matrices behind others that are cut by rows -> why

    @property
    def description(self) -> ModelDescription:
        return self._local

    def linear(self, prefix: str, out_features: int, in_features: int, bias: bool = False) -> LinearWeight:
        cut = self._cut(prefix, out_features)
        if cut is None:
            return super().linear(prefix, out_features, in_features, bias)
        sizes = (out_features, cut.whole) if cut.of_inputs else (cut.whole, in_features)
        self._whole = True
        weight = super().linear(prefix, *sizes, bias)
        self._whole = False
        part = self._behind(prefix, weight, cut) if cut.of_inputs else cut_rows(weight, cut.ranges)
        if prefix == "lm_head":
            part.split, part.shares = "outputs", self._shares(cut.whole, 1)
        self.weights[prefix] = part
        return part

    def vector(self, name: str, size: int, offset: float = 0.0) -> Tensor:
        cut = None if self._whole else self._vector_cut(name)
        if cut is None:
            return super().vector(name, size, offset)
        return pick(super().vector(name, cut.whole, offset), cut.ranges).contiguous()

    def tied_head(self, embedding: LinearWeight) -> LinearWeight:
        self.ignore("lm_head.weight")
        if self.place.grid.tp == 1:
            return embedding
        d = self.description
        head = cut_rows(embedding, [self._own(d.vocab_size)])
        head.split, head.shares = "outputs", self._shares(d.vocab_size, 1)
        return self.add("lm_head", head, [])

    def experts(self, prefix: str, stacks: ExpertStacks) -> ExpertStacks:
        if self.place.grid.tp == 1:
            return stacks
        names = {id(weight): name for name, weight in self.weights.items() if name.startswith(f"{prefix}.")}
        parts = self._whole_experts(stacks) if self.place.grid.experts else self._cut_experts(prefix, stacks)
        kept = parts.blocks()
        if self.place.grid.experts:
            own = {id(weight) for weight in kept}
            for number, name in names.items():
                if number not in own:
                    del self.weights[name]
        else:
            for whole, part in zip(stacks.blocks(), kept, strict=True):
                self.weights[names[id(whole)]] = part
        return parts

    def finish(self) -> None:
        absent = tuple(
            f"{_LAYERS}{number}." for number, layer in enumerate(self.description.layers) if layer == EMPTY_LAYER
        )
        for name in self.checkpoint.names() if absent else ():
            if name.startswith(absent):
                self.ignore(name)
        if self.place.stage:  # the first stage looks tokens up and has the head
            for prefix in ("lm_head", "model.embed_tokens"):
                self.weights.pop(prefix, None)
        super().finish()
        if self._gathered and not self.exact:
            name, reason = next(iter(self._gathered.items()))
            _log.info(
                "%d matrices are cut by outputs, which takes a second exchange each: %s (%s)",
                len(self._gathered),
                name,
                reason,
            )

    # --- what belongs to this rank ---

    def _own(self, total: int, multiple: int = 1) -> range:
        return share(total, self.place.grid.tp, self.place.part, multiple)

    def _shares(self, total: int, multiple: int) -> tuple[int, ...]:
        tp = self.place.grid.tp
        return tuple(len(share(total, tp, part, multiple)) for part in range(tp))

    def _cut(self, prefix: str, out_features: int) -> Cut | None:
        """None: every rank has all of it."""
        if self.place.grid.tp == 1:
            return None
        if prefix == "lm_head":
            return Cut(out_features, (self._own(out_features),))
        if not prefix.startswith(_LAYERS) or ".experts." in prefix:
            return None
        number, _, name = prefix.removeprefix(_LAYERS).partition(".")
        layer = self.checkpoint.description.layers[int(number)]
        room, _, matrix = name.rpartition(".")
        return self._attention_cut(layer, matrix) if room == "self_attn" else self._mlp_cut(layer, room, matrix)

    def _attention_cut(self, layer: LayerDescription, matrix: str) -> Cut | None:
        mixer = next(each for each in layer.mixers if isinstance(each, Attention | LatentAttention))
        if not is_divided(mixer):
            return None
        heads = head_share(mixer, self.place)
        units: dict[str, int]
        if isinstance(mixer, Attention):
            if matrix in ("k_proj", "v_proj"):
                return _by_unit(mixer.num_kv_heads, heads.kv, mixer.head_dim)
            units = {"q_proj": mixer.head_dim * (1 + mixer.output_gate), "o_proj": mixer.value_dim}
        else:
            query = mixer.nope_dim + mixer.rope_dim
            units = {
                "q_proj": query,
                "q_b_proj": query,
                "kv_b_proj": mixer.nope_dim + mixer.value_dim,
                "k_b_proj": mixer.kv_rank,
                "v_b_proj": mixer.value_dim,
                "o_proj": mixer.value_dim,
            }
        if matrix not in units:
            return None
        return _by_unit(mixer.num_heads, heads.queries, units[matrix], matrix == "o_proj")

    def _mlp_cut(self, layer: LayerDescription, room: str, matrix: str) -> Cut | None:
        ffn = layer.feed_forward
        if ffn is None or room.split(".")[0] not in ("mlp", "feed_forward", "shared_mlp"):
            return None
        width = ffn.shared_size if "shared" in room else ffn.intermediate_size
        width = width or ffn.shared_size or ffn.intermediate_size
        own = self._own(width)
        if matrix == "input_linear":  # rows of the gate, then those of the other factor
            return Cut(2 * width, (own, range(width + own.start, width + own.stop)))
        if matrix in _MLP_INPUTS:
            return Cut(width, (own,))
        return Cut(width, (own,), of_inputs=True) if matrix in _MLP_OUTPUTS else None

    def _vector_cut(self, name: str) -> Cut | None:
        if self.place.grid.tp == 1:
            return None
        if name == "lm_head.bias":
            whole = self.description.vocab_size
            return Cut(whole, (self._own(whole),))
        if not name.startswith(_LAYERS) or ".self_attn." not in name:
            return None
        number, _, rest = name.removeprefix(_LAYERS).partition(".")
        layer = self.checkpoint.description.layers[int(number)]
        mixer = next((each for each in layer.mixers if isinstance(each, Attention)), None)
        if mixer is None or not is_divided(mixer):
            return None
        heads, what = head_share(mixer, self.place), rest.removeprefix("self_attn.")
        if what == "sinks":
            return _by_unit(mixer.num_heads, heads.queries, 1)
        if mixer.head_norms != "heads":
            return None
        if what.startswith("q_norm."):
            return _by_unit(mixer.num_heads, heads.queries, mixer.head_dim)
        return _by_unit(mixer.num_kv_heads, heads.kv, mixer.head_dim) if what.startswith("k_norm.") else None

    # --- matrices behind those that are cut by outputs ---

    def _behind(self, prefix: str, weight: LinearWeight, cut: Cut) -> LinearWeight:
        (columns,) = cut.ranges
        problem = "exact" if self.exact else columns_problem(weight, len(columns))
        if not problem:
            part = cut_columns(weight, columns)
            part.split = "sum"
            part.bias = weight.bias if self.place.part == 0 else None  # added once
            return part
        self._gathered[prefix] = problem
        multiple = _row_multiple(weight)
        part = cut_rows(weight, [self._own(weight.out_features, multiple)])
        part.split, part.shares = "gather", self._shares(weight.out_features, multiple)
        return part

    def _whole_experts(self, stacks: ExpertStacks) -> ExpertStacks:
        own = experts_of(len(stacks.gate_up), self.place.grid.tp, self.place.part)
        gate_up, down = (
            WeightStack(stack.experts[own.start : own.stop], own.start) for stack in (stacks.gate_up, stacks.down)
        )
        return ExpertStacks(gate_up, down, split="experts_in_order" if self.exact else "experts")

    def _cut_experts(self, prefix: str, stacks: ExpertStacks) -> ExpertStacks:
        own = self._own(stacks.down.in_features)
        cut = Cut(stacks.down.in_features, (own,), of_inputs=True)
        gate_up = [[cut_rows(block, cut.ranges) for block in blocks] for blocks in stacks.gate_up.experts]
        down = [[self._behind(prefix, block, cut) for block in blocks] for blocks in stacks.down.experts]
        first = down[0][0]
        assert all(block.split == first.split for blocks in down for block in blocks), "experts of several formats"
        return ExpertStacks(WeightStack(gate_up), WeightStack(down), split=first.split, shares=first.shares)


class RankReader(RankCuts):
    def __init__(self, checkpoint: Checkpoint, place: Place, exact: bool) -> None:
        super().__init__(checkpoint)
        self.divide(place, exact)


class RankDummyReader(RankCuts, DummyReader):
    """Random weights: of matrices that all ranks read, each takes its part of the same numbers."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, place: Place, exact: bool) -> None:
        super().__init__(checkpoint, device)
        self.divide(place, exact)


def rank_reader(checkpoint: Checkpoint, device: torch.device, place: Place, exact: bool) -> WeightReader:
    if isinstance(checkpoint, DummyCheckpoint):
        return RankDummyReader(checkpoint, device, place, exact)
    return RankReader(checkpoint, place, exact)


def _by_unit(count: int, own: range, unit: int, of_inputs: bool = False) -> Cut:
    return Cut(count * unit, (range(own.start * unit, own.stop * unit),), of_inputs)


def _row_multiple(weight: LinearWeight) -> int:
    """Cuts of outputs that keep whole blocks of scales together, where there are enough of them."""
    rows = weight.scheme.block_rows if isinstance(weight, CodedWeight) else 1
    return rows if rows > 1 and weight.out_features >= 16 * rows else 1
