"""How KV memory is divided: layers -> groups -> pages. Pure arithmetic, shared by planner, KV manager and runtime.

Each layer declares what it keeps (`LayerKV`). Layers of one kind form groups of equal size, so that one page holds
`page_size` tokens of `layers_per_page` layers whatever the group, and all groups draw from one pool of pages. A page of
a full group is kept while its sequence lives; one of a sliding group only while the window can see it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer keeps for each token. Latent and recurrent state will be further kinds of this same record."""

    kind: str  # "full" | "sliding"
    num_kv_heads: int
    head_dim: int
    window: int = 0  # sliding: a token sees itself and the window - 1 tokens before it


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share page tables. `layers` are model layer numbers, at most `layers_per_page` of them."""

    kind: str
    window: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVLayout:
    page_size: int  # tokens
    layers_per_page: int
    num_kv_heads: int
    head_dim: int
    groups: tuple[KVGroup, ...]

    def place(self, layer: int) -> tuple[int, int]:
        """(group, slot in page) of a model layer."""
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
        return 2 * self.layers_per_page * self.page_size * self.num_kv_heads * self.head_dim


def build_layout(layers: list[LayerKV], page_size: int) -> KVLayout:
    """Group the layers. The smallest kind sets the group size; a kind that it does not divide pads its last group."""
    kinds: dict[LayerKV, list[int]] = {}
    for number, layer in enumerate(layers):
        kinds.setdefault(layer, []).append(number)
    shapes = {(layer.num_kv_heads, layer.head_dim) for layer in kinds}
    if len(shapes) != 1:
        raise NotImplementedError(f"layers with different KV shapes in one model: {sorted(shapes)}")
    size = min(len(numbers) for numbers in kinds.values())
    groups = [
        KVGroup(layer.kind, layer.window, tuple(numbers[i : i + size]))
        for layer, numbers in kinds.items()
        for i in range(0, len(numbers), size)
    ]
    groups.sort(key=lambda group: group.layers[0])
    (heads, head_dim) = shapes.pop()
    return KVLayout(page_size, size, heads, head_dim, tuple(groups))
