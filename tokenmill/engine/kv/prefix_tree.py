"""The prefix tree: which full pages of which token sequences are stored, at page granularity.

A node is one full page of token ids below its parent and names, for each KV group, the page that stores it (or none).
Where pages can leave for a tier, or a router asks, each node also has a name that is the same in every process: the
hash of the root's (model, KV dtype, layout), of the cache salt and of all tokens up to it. Requests of different salts
share nothing: each salt has a root of its own below the root. A model with recurrent layers can only go on from a node
with a snapshot of its states. It knows nothing of reference counts or requests; the manager attaches pages and
snapshots, the page pool evicts pages.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from hashlib import blake2b

from tokenmill.engine.kv.page_log import PageLog
from tokenmill.engine.kv.states import NO_STATE, StateSlots
from tokenmill.hardware.kv_layout import KVLayout

NO_PAGE = -1
UNBOUNDED = 2**30  # pages that a group without a window looks back


class PrefixNode:
    """`page_size` token ids (`key`) after those of `parent`; `cursors` counts requests that will commit below it."""

    __slots__ = ("children", "cursors", "key", "name", "pages", "parent", "snapshot")

    def __init__(self, parent: PrefixNode | None, key: tuple[int, ...], num_groups: int, name: bytes) -> None:
        self.parent = parent
        self.key = key
        self.name = name
        self.children: dict[tuple[int, ...], PrefixNode] = {}
        self.pages = [NO_PAGE] * num_groups
        self.snapshot = NO_STATE  # slot with the states after this page; only while the node has all its pages
        self.cursors = 0


def child_name(parent: bytes, key: tuple[int, ...]) -> bytes:
    """The name of the page of tokens `key` after `parent`; nothing has a name below a root without one."""
    return blake2b(parent + array("q", key).tobytes(), digest_size=16).digest() if parent else b""


def salt_key(salt: bytes) -> tuple[int, ...]:
    """The key of a salt's root: no token sequence, because token ids are not negative."""
    return (-1, *salt)


class PrefixTree:
    """Page sequences by their tokens. `owner` names the node of every page in the tree."""

    def __init__(self, layout: KVLayout, root_name: bytes = b"", states: StateSlots | None = None) -> None:
        """`states`: of models with recurrent layers."""
        self._states = states
        self.page_size = layout.page_size
        # How many pages back from its own each group looks: the whole prefix, or what its window spans.
        self.spans = [layout.group_pages(group, UNBOUNDED * layout.page_size) for group in layout.groups]
        unbounded = [group for group, span in enumerate(self.spans) if span == UNBOUNDED]
        self._prefix_groups = unbounded or list(range(len(self.spans)))  # that a node must have to be worth telling of
        self._log: PageLog | None = None
        self.root = PrefixNode(None, (), len(layout.groups), root_name)
        self.owner: dict[int, PrefixNode] = {}
        # Salt, tokens and nodes of the last match, while it holds
        self._last: tuple[bytes, list[int], list[PrefixNode]] = (b"", [], [])

    def watch(self, root_name: bytes) -> PageLog:
        """Name all nodes below `root_name`, where they have no names yet, and log what is stored from now on; what is
        stored already comes first."""
        log = self._log = PageLog()
        self.root.name = self.root.name or root_name
        for node in self.nodes():
            assert node.parent is not None
            node.name = child_name(node.parent.name, node.key)
            if self._is_whole(node):
                log.stored(node.name, node.parent.name)
        return log

    def _is_whole(self, node: PrefixNode) -> bool:
        return all(node.pages[group] >= 0 for group in self._prefix_groups)

    def find_root(self, salt: bytes) -> PrefixNode | None:
        """The root of the prefixes under a salt, None if nothing is stored under it."""
        return self.root.children.get(salt_key(salt)) if salt else self.root

    def open_root(self, salt: bytes) -> PrefixNode:
        """The root of the prefixes under a salt, made if there is none. It is pruned like any other node."""
        return self.child(self.root, salt_key(salt)) if salt else self.root

    def root_name(self, salt: bytes) -> bytes:
        return child_name(self.root.name, salt_key(salt)) if salt else self.root.name

    def match(self, token_ids: list[int], max_pages: int, salt: bytes = b"") -> list[PrefixNode]:
        """The longest path of at most `max_pages` nodes after which every group has all the pages it looks at."""
        if self.spans == [UNBOUNDED]:
            return self._match_all(token_ids, max_pages, salt)
        path, valid = self._walk(token_ids, max_pages, salt)
        return path[:valid]

    def match_snapshot(self, token_ids: list[int], max_pages: int, salt: bytes = b"") -> tuple[list[PrefixNode], int]:
        """As `match`, up to the last snapshot; and the depth that `match` alone would reach."""
        path, valid = self._walk(token_ids, max_pages, salt)
        ends = (depth for depth in range(valid, 0, -1) if path[depth - 1].snapshot != NO_STATE)
        return path[: next((depth for depth in ends if self._is_usable(path, depth)), 0)], valid

    def _is_usable(self, path: list[PrefixNode], depth: int) -> bool:
        """Whether every group has all the pages that it looks at after this node."""
        return all(
            node.pages[group] >= 0
            for group, span in enumerate(self.spans)
            for node in path[max(0, depth - span) : depth]
        )

    def _walk(self, token_ids: list[int], max_pages: int, salt: bytes) -> tuple[list[PrefixNode], int]:
        """The nodes of these tokens, and the depth of the last after which every group has all its pages."""
        path: list[PrefixNode] = []
        runs = [0] * len(self.spans)  # per group: nodes with a page, counted back from here
        valid = 0
        node = self.find_root(salt)
        size = self.page_size
        for depth in range(1, max_pages + 1):
            node = node.children.get(tuple(token_ids[(depth - 1) * size : depth * size])) if node else None
            if node is None:
                break
            path.append(node)
            usable = True
            for group, page in enumerate(node.pages):
                run = runs[group] = runs[group] + 1 if page >= 0 else 0
                if run < depth and run < self.spans[group]:
                    usable = False
            if usable:
                valid = depth
        return path, valid

    def _match_all(self, token_ids: list[int], max_pages: int, salt: bytes) -> list[PrefixNode]:
        """`match` for a single group that looks at everything: up to the first node without a page. Requests that
        begin alike come in bursts: the path of the last one is taken whole where the tokens are the same."""
        size = self.page_size
        last_salt, tokens, path = self._last
        if not path or last_salt != salt or len(path) > max_pages or token_ids[: len(tokens)] != tokens:
            path = []
        known, path = len(path), list(path)
        root = path[-1] if path else self.find_root(salt)
        if root is None:
            return []
        children = root.children
        for begin in range(known * size, max_pages * size, size):
            node = children.get(tuple(token_ids[begin : begin + size]))
            if node is None or node.pages[0] < 0:
                break
            path.append(node)
            children = node.children
        if len(path) != known:
            self._last = (salt, token_ids[: len(path) * size], list(path))
        return path

    def child(self, node: PrefixNode, key: tuple[int, ...]) -> PrefixNode:
        """The child with these tokens, made if there is none."""
        child = node.children.get(key)
        if child is None:
            child = node.children[key] = PrefixNode(node, key, len(self.spans), child_name(node.name, key))
        return child

    def attach(self, node: PrefixNode, group: int, page: int) -> None:
        assert node.pages[group] == NO_PAGE
        assert page not in self.owner
        node.pages[group] = page
        self.owner[page] = node
        if self._log is not None and group in self._prefix_groups and self._is_whole(node):
            assert node.parent is not None
            self._log.stored(node.name, node.parent.name)

    def detach(self, page: int) -> list[tuple[int, bytes, int]]:
        """Take a page out and with it all that is of no use without it. Returns every page that left the tree, with
        the name of its node and its group.

        Nothing below a node can match once a page that groups without window need is gone, so its subtree goes too; a
        window can do without, so such a page goes alone.
        """
        self._last = (b"", [], [])
        node = self.owner[page]
        group = node.pages.index(page)
        if self.spans[group] == UNBOUNDED:
            return self._cut(node)
        if self._log is not None and group in self._prefix_groups:
            self._log.removed(node.name)
        node.pages[group] = NO_PAGE
        del self.owner[page]
        self._drop_snapshot(node)
        self.prune(node)
        return [(page, node.name, group)]

    def prune(self, node: PrefixNode) -> None:
        """Remove nodes that hold nothing and lead nowhere, from `node` upward."""
        while node.parent is not None and not node.children and not node.cursors and max(node.pages) == NO_PAGE:
            parent = node.parent
            del parent.children[node.key]
            node.parent = None
            node = parent

    def _drop_snapshot(self, node: PrefixNode) -> None:
        if self._states is not None:
            self._states.drop(node)

    def nodes(self) -> Iterator[PrefixNode]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self, cursors: dict[PrefixNode, int]) -> None:
        """Owner table, links and cursor counts agree with the tree; no dead branches."""
        seen = set()
        for node in self.nodes():
            parent = node.parent
            assert parent is not None
            assert parent.children.get(node.key) is node
            assert len(node.key) == self.page_size or (parent is self.root and node.key[0] == -1)
            assert node.cursors == cursors.get(node, 0), "cursor count wrong"
            assert node.children or node.cursors or max(node.pages) >= 0, "dead branch"
            assert node.snapshot == NO_STATE or min(node.pages) >= 0, "a snapshot without its pages"
            for group, page in enumerate(node.pages):
                assert page >= 0 or self.spans[group] != UNBOUNDED or not any(p >= 0 for p in node.pages), "hole"
                if page >= 0:
                    assert self.owner.get(page) is node, f"page {page} is not its node's"
                    seen.add(page)
        assert len(seen) == len(self.owner), "owner table names pages that are not in the tree"
        assert self.root.cursors == cursors.get(self.root, 0)

    def _cut(self, node: PrefixNode) -> list[tuple[int, bytes, int]]:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        removed = []
        stack = [node]
        while stack:
            node = stack.pop()
            assert not node.cursors, "a request that will commit below a node holds its pages"
            node.parent = None
            self._drop_snapshot(node)
            if self._log is not None and self._is_whole(node):
                self._log.removed(node.name)
            for group, page in enumerate(node.pages):
                if page >= 0:
                    del self.owner[page]
                    removed.append((page, node.name, group))
            stack.extend(node.children.values())
        self.prune(parent)
        return removed
