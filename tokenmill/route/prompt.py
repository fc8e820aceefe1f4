"""A prompt as a router sees it: token ids, and the names of its pages under each root that replicas have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenmill.engine.kv.page_names import page_names

PageRoot = tuple[bytes, int]  # what names of pages begin with, and the tokens of a page


class Prompt:
    def __init__(
        self,
        token_ids: Sequence[int],
        num_tokens: int | None = None,
        roots: Mapping[int, PageRoot] | None = None,
        session: str = "",
    ) -> None:
        """`num_tokens`: an estimate, where the tokens are not known. `roots`: by the number of a replica, where the
        pages of this caller and model do not hang from the root of its first model."""
        self.token_ids = token_ids
        self.num_tokens = len(token_ids) if num_tokens is None else num_tokens
        self.roots = roots or {}
        self.session = session
        self._names: dict[tuple[bytes, int], list[bytes]] = {}

    def names(self, root: bytes, page_size: int) -> list[bytes]:
        """Of its full pages, computed once for all replicas of a pool. None where the replica names no pages."""
        if not root or page_size <= 0:
            return []
        found = self._names.get((root, page_size))
        if found is None:
            found = self._names[root, page_size] = page_names(root, self.token_ids, page_size)
        return found
