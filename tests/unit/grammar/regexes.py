"""Random regular expressions of the syntax that states follow, and a vocabulary whose tokens overlap."""

from __future__ import annotations

import random

EOS = 0
_SPECIAL = 1
_PARTS = ["a", "b", "c", "0", "-", ",", " ", "é", "日", "\n", '"', "/"]


class MergedTokens:
    """Bytes, and random joined parts. A text is split into the longest tokens, but those after an odd number of bytes
    are single bytes: how a text is split depends on the token before it, as with real ones."""

    bos_id = None
    special_ids = frozenset({EOS, _SPECIAL})
    adds_leading_space = False

    def __init__(self) -> None:
        choice = random.Random(1)
        joined = {"".join(choice.choices(_PARTS, k=choice.randint(2, 4))).encode() for _ in range(300)}
        pieces = {text[: len(text) - 1] for text in joined if text[-1] >= 128}  # ends within a character
        self.tokens = [b"</s>", b"<s>", b"", *(bytes([byte]) for byte in range(256)), b"a", *sorted(joined | pieces)]
        self.tokens += [b"aa"] * (-len(self.tokens) % 32)  # no words of bits to spare
        self.vocab_size = len(self.tokens)
        self._ids = {text: token_id for token_id, text in enumerate(self.tokens) if text and token_id > _SPECIAL}

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:  # noqa: ARG002
        data, ids, length = text.encode(), list[int](), 0
        while data:
            most = 1 if length % 2 else len(data)
            length = next(each for each in range(min(16, most), 0, -1) if data[:each] in self._ids)
            ids.append(self._ids[data[:length]])
            data = data[length:]
        return ids


def random_regex(choice: random.Random, depth: int = 3) -> str:
    """Also valid, with the same meaning for ASCII texts, for Python's `re` with re.ASCII."""
    kind = choice.randrange(8 if depth else 3)
    if kind == 0:
        return choice.choice(["a", "b", "c", "ab", "ca", "0", r"\-", ",", " ", r"\n", '"', "/", r"\x61", "cab,"])
    if kind == 1:
        return choice.choice(["[abc]", "[^a]", "[a-c0]", "[^,\n]", "[-a]", "[]b]", r"[\d,]", "[^ab -]"])
    if kind == 2:
        return (
            choice.choice([r"\d", r"\w", r"\s", ".", "é", "[é日a]", r"\W", r"[^\w]"]) if choice.random() < 0.4 else "a"
        )
    inner = random_regex(choice, depth - 1)
    if kind in (3, 4):
        return inner + random_regex(choice, depth - 1)
    if kind == 5:
        return f"(?:{inner}|{random_regex(choice, depth - 1)})"
    count = choice.choice(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "*?", "{1,2}?"])
    return f"({inner}){count}" if kind == 6 else f"(?:{inner}){count}"
