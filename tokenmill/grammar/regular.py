"""Regular languages over bytes, and what is left of one after a byte (Brzozowski derivatives).

Equal nodes are one object and forms are normalized, so that an output that comes back to where it was comes back to the
same node, and equal nodes mean equal continuations. Equal continuations may still be different nodes: that costs memory
only. What is built is counted, in time and memory alike, and refused beyond a limit. Used by
states.py and regex_parser.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

EMPTY, EPSILON, BYTES, UNKNOWN, CONCAT, UNION, REPEAT = range(7)
_MAX_WORK = 50_000  # parts of all nodes that are asked for: some 10 MB and 0.1 s at the very most
_MAX_DEPTH = 48  # of nodes in nodes: these functions recurse
_ASCII = 128


class TooLarge(Exception):
    """The language takes more than it may."""


class UnknownByte(Exception):
    """What comes after this byte cannot be said."""


class Node:
    """BYTES: (bits by byte); UNKNOWN: (bits by ASCII byte, name of characters beyond, of which only this is known);
    CONCAT: (first, rest); UNION: members; REPEAT: (node, least, most or None)."""

    __slots__ = ("depth", "kind", "nullable", "number", "parts")

    def __init__(self, number: int, kind: int, parts: tuple[Any, ...], nullable: bool, depth: int) -> None:
        self.number, self.kind, self.parts, self.nullable, self.depth = number, kind, parts, nullable, depth


class Regular:
    """All nodes of one language."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Node] = {}
        self._work_left = _MAX_WORK
        self.nodes: list[Node] = []  # by number
        self.empty = self._node(EMPTY, (), False)
        self.epsilon = self._node(EPSILON, (), True)

    # --- what languages are made of ---

    def bytes(self, bits: int) -> Node:
        return self._node(BYTES, (bits,), False) if bits else self.empty

    def unknown(self, bits: int, name: str) -> Node:
        """Single ASCII bytes, and some characters beyond; at least one of both."""
        return self._node(UNKNOWN, (bits, name), False)

    def sequence(self, nodes: Sequence[Node]) -> Node:
        result = self.epsilon
        for node in reversed(nodes):
            result = self.concat(node, result)
        return result

    def concat(self, first: Node, rest: Node) -> Node:
        if first is self.empty or rest is self.empty:
            return self.empty
        heads = []
        while first.kind == CONCAT:
            heads.append(first.parts[0])
            first = first.parts[1]
        for head in (first, *reversed(heads)):
            rest = self._joined(head, rest)
        return rest

    def repeat(self, node: Node, least: int, most: int | None) -> Node:
        if node is self.empty and least:
            return node
        if node in (self.empty, self.epsilon) or most == 0:
            return self.epsilon
        least = 0 if node.nullable else least
        if (least, most) == (1, 1):
            return node
        if node.kind == REPEAT and node.parts[1] <= 1:  # the counts that are possible have no gaps
            inner, inner_least, inner_most = node.parts
            product = None if most is None or inner_most is None else most * inner_most
            return self.repeat(inner, least * inner_least, product)
        return self._node(REPEAT, (node, least, most), least == 0, node.depth + 1)

    def union(self, nodes: Iterable[Node]) -> Node:
        """What has the same rest is put together first."""
        by_rest: dict[Node, dict[Node, None]] = {}
        nullable, left = False, list(nodes)
        while left:
            node = left.pop()
            if node.kind == UNION:
                left += node.parts
            elif node.kind == REPEAT and node.parts[1:] == (0, 1):
                left.append(node.parts[0])
                nullable = True
            elif node is self.epsilon:
                nullable = True
            elif node is not self.empty:
                first, rest = node.parts if node.kind == CONCAT else (node, self.epsilon)
                by_rest.setdefault(rest, {})[first] = None
            self._work(1)
        members: set[Node] = set()
        for rest, firsts in by_rest.items():
            if rest is self.epsilon:
                members.update(self._merged(firsts))
            else:
                members.add(self.concat(self.union(firsts) if len(firsts) > 1 else next(iter(firsts)), rest))
        if len(members) > 1:
            ordered = tuple(sorted(members, key=lambda node: node.number))
            depth = 1 + max(node.depth for node in ordered)
            result = self._node(UNION, ordered, any(node.nullable for node in ordered), depth)
        else:
            result = next(iter(members), self.empty)
        if not nullable or result.nullable:
            return result
        return self.epsilon if result is self.empty else self.repeat(result, 0, 1)

    # --- what is left of them ---

    def after(self, node: Node, byte: int) -> Node:
        """What may follow this byte. Raises UnknownByte and TooLarge."""
        self._work(1)
        if node.kind in (BYTES, UNKNOWN):
            if node.kind == UNKNOWN and byte >= _ASCII:
                raise UnknownByte
            return self.epsilon if node.parts[0] >> byte & 1 else self.empty
        if node.kind == UNION:
            return self.union([self.after(member, byte) for member in node.parts])
        if node.kind == REPEAT:
            inner, least, most = node.parts
            fewer = self.repeat(inner, max(0, least - 1), None if most is None else most - 1)
            return self.concat(self.after(inner, byte), fewer)
        found = []
        while node.kind == CONCAT:
            first, rest = node.parts
            found.append(self.concat(self.after(first, byte), rest))
            if not first.nullable:
                return self.union(found)
            node = rest
        return self.union([*found, self.after(node, byte)]) if found else self.empty

    def first_bytes(self, node: Node) -> int:
        """Bits of bytes that can come; of characters beyond ASCII that are not known, none. Raises TooLarge."""
        bits = 0
        while True:
            self._work(1)
            first, rest = node.parts if node.kind == CONCAT else (node, self.epsilon)
            if first.kind in (BYTES, UNKNOWN):
                bits |= first.parts[0]
            elif first.kind == REPEAT:
                bits |= self.first_bytes(first.parts[0])
            elif first.kind == UNION:
                for member in first.parts:
                    bits |= self.first_bytes(member)
            if not first.nullable or rest is self.epsilon:
                return bits
            node = rest

    def byte_sets(self) -> list[int]:
        """All that were asked for so far: what comes later are unions of them."""
        return [node.parts[0] for node in self.nodes if node.kind in (BYTES, UNKNOWN)]

    # --- inside ---

    def _joined(self, first: Node, rest: Node) -> Node:
        """The concatenation; `first` is none itself."""
        if first is self.epsilon or rest is self.epsilon:
            return rest if first is self.epsilon else first
        second, others = rest.parts if rest.kind == CONCAT else (rest, self.epsilon)
        (base, least, most), (other, more_least, more_most) = _counted(first), _counted(second)
        if base is other:
            total = None if most is None or more_most is None else most + more_most
            merged = self.repeat(base, least + more_least, total)
            return merged if others is self.epsilon else self._concat_node(merged, others)
        return self._concat_node(first, rest)

    def _concat_node(self, first: Node, rest: Node) -> Node:
        nullable = first.nullable and rest.nullable
        return self._node(CONCAT, (first, rest), nullable, max(first.depth + 1, rest.depth))

    def _merged(self, nodes: Iterable[Node]) -> list[Node]:
        """Members of a union that are no concatenations: sets of bytes become one, and repeats that overlap."""
        counts: dict[Node, list[tuple[int, int | None]]] = {}
        bits = 0
        for node in nodes:
            if node.kind == BYTES:
                bits |= node.parts[0]
            else:
                base, least, most = _counted(node)
                counts.setdefault(base, []).append((least, most))
        if bits:
            counts.setdefault(self.bytes(bits), []).append((1, 1))
        result = []
        for base, ranges in counts.items():
            ranges.sort(key=lambda each: each[0])
            least, most = ranges[0]
            for more_least, more_most in ranges[1:]:
                if most is None or more_least <= most + 1:
                    most = None if most is None or more_most is None else max(most, more_most)
                else:
                    result.append(self.repeat(base, least, most))
                    least, most = more_least, more_most
            result.append(self.repeat(base, least, most))
        return result

    def _node(self, kind: int, parts: tuple[Any, ...], nullable: bool, depth: int = 1) -> Node:
        self._work(1 + len(parts))
        node = self._known.get((kind, *parts))
        if node is None:
            if depth > _MAX_DEPTH:
                raise TooLarge
            node = Node(len(self.nodes), kind, parts, nullable, depth)
            self._known[kind, *parts] = node
            self.nodes.append(node)
        return node

    def _work(self, amount: int) -> None:
        self._work_left -= amount
        if self._work_left < 0:
            raise TooLarge


def _counted(node: Node) -> tuple[Node, int, int | None]:
    return node.parts if node.kind == REPEAT else (node, 1, 1)
