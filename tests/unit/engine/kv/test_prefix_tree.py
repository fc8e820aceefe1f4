"""The prefix tree: a match after others like it is the match a fresh look would find, also after pages left."""

from __future__ import annotations

import random

from tokenmill.engine.kv.prefix_tree import PrefixNode, PrefixTree
from tokenmill.hardware.kv_layout import LayerKV, build_layout

SIZE = 4


def _tree() -> PrefixTree:
    return PrefixTree(build_layout([LayerKV("full", 1, 8)], SIZE))


def _fresh(tree: PrefixTree, tokens: list[int], most: int) -> list[PrefixNode]:
    path, node = [], tree.root
    for begin in range(0, most * SIZE, SIZE):
        found = node.children.get(tuple(tokens[begin : begin + SIZE]))
        if found is None or found.pages[0] < 0:
            break
        path.append(found)
        node = found
    return path


def test_a_match_is_what_a_fresh_look_finds() -> None:
    rng, tree, page = random.Random(3), _tree(), 0
    texts: list[list[int]] = []
    lengths = []
    for _ in range(600):
        if rng.random() < 0.3 or not texts:
            start = rng.choice(texts)[: SIZE * rng.randrange(1, 8)] if texts and rng.random() < 0.8 else []
            texts.append(start + [rng.randrange(3) for _ in range(SIZE * rng.randrange(1, 6))])
            node = tree.root
            for begin in range(0, len(texts[-1]) // SIZE * SIZE, SIZE):
                node = tree.child(node, tuple(texts[-1][begin : begin + SIZE]))
                if node.pages[0] < 0:
                    tree.attach(node, 0, page)
                    page += 1
        elif rng.random() < 0.15 and tree.owner:
            tree.detach(rng.choice(list(tree.owner)))
        tokens = rng.choice(texts)
        most = rng.randrange(len(tokens) // SIZE + 1)
        got = tree.match(tokens, most)
        assert got == _fresh(tree, tokens, most)
        lengths.append(len(got))
    assert max(lengths) > 5
    tree.check({})


def test_salts_share_nothing_and_leave_nothing_behind() -> None:
    tree = PrefixTree(build_layout([LayerKV("full", 1, 8)], SIZE), b"r" * 16)
    tokens = list(range(2 * SIZE))
    names = set()
    for page, salt in enumerate((b"", b"a" * 16, b"b" * 16)):
        assert tree.match(tokens, 2, salt) == []
        node = tree.child(tree.open_root(salt), tuple(tokens[:SIZE]))
        tree.attach(node, 0, page)
        assert tree.match(tokens, 2, salt) == [node]
        assert node.parent is not None
        assert node.parent.name == tree.root_name(salt)
        names.add(node.name)
    tree.check({})
    assert len(names) == 3  # tiers know pages by these
    for page in range(3):
        tree.detach(page)
    assert not tree.root.children
    assert tree.find_root(b"a" * 16) is None
