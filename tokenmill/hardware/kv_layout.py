"""How KV memory is divided: layers -> groups -> pages. Pure arithmetic, shared by planner, KV manager and runtime.

Each layer declares what it keeps (`LayerKV`). Layers that keep the same form groups, and all groups draw from one pool
of pages: a page holds `page_size` tokens of the layers of one group, and a page of any group has the same number of
bytes. A page of a full or latent group is kept while its sequence lives, one of a sliding group only while the window
can see it. Recurrent layers have no pages but states of fixed size, kept in slots: one slot holds the states of all
layers for one sequence, or a snapshot of them. A layer that reads another's KV has nothing.

Layers of different shape in one model: the page size in tokens is the same for all groups, so a group has as many
layers as fit into a page, more of those with small rows. What is left over is padding (`KVLayout.padding`);
`build_layout` takes the page that leaves the least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

_WITHOUT_PAGES = ("recurrent", "none")
_STATE_ITEM_BYTES = 4  # states are float32: rounding them would add up over a sequence


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer keeps. `kind`: "full" | "sliding" | "latent" (pages), "recurrent" (a state) or "none"."""

    kind: str
    num_kv_heads: int = 0
    head_dim: int = 0  # of keys; latent: the whole row, of which values are a part
    window: int = 0  # sliding: a token sees itself and the window - 1 tokens before it
    value_dim: int | None = None  # None: as wide as keys
    states: tuple[tuple[int, ...], ...] = ()  # shapes of the arrays that are kept per sequence, beside the pages
    source: int | None = None  # "none": the earlier layer whose pages are read

    @property
    def state_bytes(self) -> int:
        """Per sequence, beside the pages."""
        return _STATE_ITEM_BYTES * sum(map(prod, self.states))

    @property
    def values_per_token(self) -> int:
        values = self.head_dim if self.value_dim is None else self.value_dim
        return self.num_kv_heads * (self.head_dim + values)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share page tables. `layers` are model layer numbers; slots of a page that they leave are padding."""

    kind: str
    window: int
    layers: tuple[int, ...]
    shape: LayerKV | None = None  # of its layers; None: that of the layout


@dataclass(frozen=True, slots=True)
class LayerState:
    """A recurrent layer's state: arrays of these shapes for every sequence, whatever its length."""

    layer: int
    shapes: tuple[tuple[int, ...], ...]

    @property
    def nbytes(self) -> int:
        return _STATE_ITEM_BYTES * sum(map(prod, self.shapes))


@dataclass(frozen=True, slots=True)
class KVLayout:
    """`num_kv_heads` and `head_dim` are those of all layers, or 0 where layers differ (`KVGroup.shape` then)."""

    page_size: int  # tokens
    layers_per_page: int  # in the largest group
    num_kv_heads: int
    head_dim: int
    groups: tuple[KVGroup, ...]
    value_dim: int | None = None  # None: as wide as keys
    row_values: int = 0  # numbers per token in a page, where layers differ; 0: follows from the shape
    states: tuple[LayerState, ...] = ()
    shared: tuple[tuple[int, int], ...] = ()  # (layer, the earlier layer whose KV it reads)

    def place(self, layer: int) -> tuple[int, int]:
        """(group, slot in page) of a model layer."""
        layer = dict(self.shared).get(layer, layer)
        for number, group in enumerate(self.groups):
            if layer in group.layers:
                return number, group.layers.index(layer)
        raise KeyError(layer)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that one sequence of this length holds, over all groups (its last step just done)."""
        return sum(self.group_pages(group, num_tokens) for group in self.groups)

    def group_pages(self, group: KVGroup, num_tokens: int) -> int:
        total = ceil(num_tokens / self.page_size)
        return total - self.first_live_page(group, num_tokens)

    def first_live_page(self, group: KVGroup, num_tokens: int) -> int:
        """The first page index that the token at position `num_tokens` can still see."""
        if group.kind != "sliding":
            return 0
        return max(0, num_tokens - group.window + 1) // self.page_size

    def peak_pages(self, num_tokens: int) -> int:
        """The most pages that one sequence needs at any moment while it grows to this length one token at a time.

        More than `pages_for` by what a window needs when it straddles one page more. Full groups only grow and sliding
        ones repeat every page, so the last page's worth of positions holds the maximum.
        """
        return max(
            (
                sum(position // self.page_size + 1 - self.first_live_page(group, position) for group in self.groups)
                for position in range(max(0, num_tokens - self.page_size), num_tokens)
            ),
            default=0,
        )

    @property
    def values_per_page(self) -> int:
        """Numbers stored in one page: K and V, all its layers."""
        return self.page_size * (self.row_values or self.layers_per_page * self._shape.values_per_token)

    def filled(self, group: KVGroup) -> float:
        """Of a page of this group, the fraction that belongs to a layer."""
        if not self.row_values:
            return len(group.layers) / self.layers_per_page
        assert group.shape is not None
        return len(group.layers) * group.shape.values_per_token / self.row_values

    @property
    def padding(self) -> float:
        """Of one page of every group, the fraction that belongs to no layer."""
        return 1 - sum(map(self.filled, self.groups)) / len(self.groups)

    @property
    def is_latent(self) -> bool:
        """Whether pages hold one row per token, whose beginning is the value, and no values besides."""
        return self.value_dim == 0

    @property
    def state_bytes(self) -> int:
        """Of one state slot: the states of one sequence, beside its pages."""
        return sum(state.nbytes for state in self.states)

    def features(self) -> tuple[str, ...]:
        """Names of the layout's features beyond K and V pages that are alike in all layers."""
        names = []
        if self.row_values:
            names.append("layers of different KV shapes")
        if self.is_latent:
            names.append("latent rows")
        elif self.value_dim is not None:
            names.append("keys and values of different widths")
        return tuple(names)

    @property
    def _shape(self) -> LayerKV:
        return LayerKV("full", self.num_kv_heads, self.head_dim, value_dim=self.value_dim)


def build_layout(layers: Sequence[LayerKV], page_size: int) -> KVLayout:
    """Group the layers by what they keep.

    Where all rows have one shape, the smallest kind sets the size of a group; a kind that it does not divide pads its
    last group. Where shapes differ, see `_best_row`. A model whose layers have no pages gets one group of empty ones,
    so that the accounts of sequences and pages need no second case.
    """
    kinds: dict[LayerKV, list[int]] = {}
    for number, layer in enumerate(layers):
        if layer.kind not in _WITHOUT_PAGES:
            kinds.setdefault(replace(layer, states=()), []).append(number)
    states = tuple(LayerState(number, layer.states) for number, layer in enumerate(layers) if layer.states)
    shared = tuple((number, layer.source) for number, layer in enumerate(layers) if layer.source is not None)
    shapes = {(layer.num_kv_heads, layer.head_dim, layer.value_dim) for layer in kinds}
    if not shapes:
        empty = KVGroup("sliding", page_size, ())
        return KVLayout(page_size, 1, 0, 0, (empty,), states=states, shared=shared)
    if len(shapes) == 1:
        ((heads, head_dim, value_dim),) = shapes
        size = min(len(numbers) for numbers in kinds.values())
        groups = _groups(kinds, dict.fromkeys(kinds, size), with_shapes=False)
        return KVLayout(page_size, size, heads, head_dim, groups, value_dim, states=states, shared=shared)
    row = _best_row(kinds)
    groups = _groups(kinds, {layer: row // layer.values_per_token for layer in kinds}, with_shapes=True)
    largest = max(len(group.layers) for group in groups)
    return KVLayout(page_size, largest, 0, 0, groups, row_values=row, states=states, shared=shared)


def _groups(kinds: dict[LayerKV, list[int]], sizes: dict[LayerKV, int], with_shapes: bool) -> tuple[KVGroup, ...]:
    groups = [
        KVGroup(layer.kind, layer.window, tuple(numbers[i : i + sizes[layer]]), layer if with_shapes else None)
        for layer, numbers in kinds.items()
        for i in range(0, len(numbers), sizes[layer])
    ]
    return tuple(sorted(groups, key=lambda group: group.layers[0]))


def _best_row(kinds: dict[LayerKV, list[int]]) -> int:
    """Numbers per token in a page: some whole layers of one kind, at least one layer of each.

    Of all such pages the one with the least padding (bytes of a token, every group counted), of equals the largest.
    """
    widest = max(layer.values_per_token for layer in kinds)
    rows = {
        count * layer.values_per_token
        for layer, numbers in kinds.items()
        for count in range(1, len(numbers) + 1)
        if count * layer.values_per_token >= widest
    }

    def cost(row: int) -> int:
        return row * sum(ceil(len(numbers) / (row // layer.values_per_token)) for layer, numbers in kinds.items())

    return min(rows, key=lambda row: (cost(row), -row))
