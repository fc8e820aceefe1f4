"""Reads those regular expressions whose language is certain, in Rust's syntax, which the grammar library takes.

Literals, escaped punctuation, classes, groups, alternatives, counts. Of \\d, \\w, \\s, and of classes with members
beyond ASCII, only the ASCII half is known. All else (flags, named groups: one name means look-ahead there, anchors,
boundaries, properties, classes in classes) is refused. Called by states.py.
"""

from __future__ import annotations

import re
from string import ascii_letters, digits, punctuation

from tokenmill.grammar.regular import Node, Regular

_MAX_NESTING = 30
_ALL_ASCII = (1 << 128) - 1
_COUNT = re.compile(r"\{([0-9]{1,6})(?:(,)([0-9]{1,6})?)?\}")
_CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|[xuU]\{([0-9A-Fa-f]{1,8})\}")
_COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_NAMED = {"d": digits, "s": "\t\n\v\f\r ", "w": ascii_letters + digits + "_"}
_LITERAL_IF_ESCAPED = set(punctuation + " ") - set("<>")
_CONTINUATION = (0x80, 0xBF)
_BEYOND_ASCII = (  # UTF-8: what each byte of a character can be
    (((0xC2, 0xDF),), (_CONTINUATION,)),
    (((0xE0, 0xE0),), ((0xA0, 0xBF),), (_CONTINUATION,)),
    (((0xE1, 0xEC), (0xEE, 0xEF)), (_CONTINUATION,), (_CONTINUATION,)),
    (((0xED, 0xED),), ((0x80, 0x9F),), (_CONTINUATION,)),
    (((0xF0, 0xF0),), ((0x90, 0xBF),), (_CONTINUATION,), (_CONTINUATION,)),
    (((0xF1, 0xF3),), (_CONTINUATION,), (_CONTINUATION,), (_CONTINUATION,)),
    (((0xF4, 0xF4),), ((0x80, 0x8F),), (_CONTINUATION,), (_CONTINUATION,)),
)


class Unsupported(Exception):
    """Not of the syntax that is read here."""


def parse_regex(text: str, regular: Regular) -> Node:
    """Raises Unsupported, and TooLarge."""
    return _Parser(text, regular).parse()


class _Parser:
    def __init__(self, text: str, regular: Regular) -> None:
        self._text, self._at, self._regular = text, 0, regular

    def parse(self) -> Node:
        node = self._alternatives(0)
        if self._at < len(self._text):
            raise Unsupported
        return node

    def _alternatives(self, nesting: int) -> Node:
        if nesting > _MAX_NESTING:
            raise Unsupported
        members = [self._sequence(nesting)]
        while self._accept("|"):
            members.append(self._sequence(nesting))
        return self._regular.union(members)

    def _sequence(self, nesting: int) -> Node:
        nodes = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            nodes.append(self._repeated(self._item(nesting)))
        return self._regular.sequence(nodes)

    def _repeated(self, node: Node) -> Node:
        while self._at < len(self._text) and self._text[self._at] in "*+?{":
            sign = self._text[self._at]
            if sign == "{":
                match = _COUNT.match(self._text, self._at)
                if match is None:
                    raise Unsupported
                self._at = match.end()
                least = int(match[1])
                most = int(match[3]) if match[3] else None if match[2] else least
                if most is not None and most < least:
                    raise Unsupported
            else:
                self._at += 1
                least, most = _COUNTS[sign]
            node = self._regular.repeat(node, least, most)
            self._accept("?")  # lazy: the same language
        return node

    def _item(self, nesting: int) -> Node:
        sign = self._next()
        if sign == "(":
            if not self._accept("?:") and self._text.startswith("?", self._at):
                raise Unsupported
            node = self._alternatives(nesting + 1)
            if not self._accept(")"):
                raise Unsupported
            return node
        if sign == "[":
            return self._class()
        if sign == ".":
            return self._characters(_ALL_ASCII & ~(1 << ord("\n")), None)
        if sign in "^$*+?{":
            raise Unsupported
        member = self._escaped() if sign == "\\" else ord(sign)
        if isinstance(member, tuple):
            return self._regular.unknown(*member)
        return self._regular.sequence([self._regular.bytes(1 << byte) for byte in chr(member).encode()])

    def _class(self) -> Node:
        negated = self._accept("^")
        bits, names, first = 0, set(), True
        while first or not self._accept("]"):
            first = False
            if self._text.startswith(("&&", "--", "~~"), self._at):
                raise Unsupported
            member = self._member()
            is_range = self._text.startswith("-", self._at) and not self._text.startswith(("-]", "--"), self._at)
            if isinstance(member, tuple):
                if is_range:
                    raise Unsupported
                bits |= member[0]
                names.add(member[1])
                continue
            last = member
            if is_range:
                self._at += 1
                end = self._member()
                if isinstance(end, tuple) or end < member:
                    raise Unsupported
                last = end
            bits |= _bits((min(member, 128), min(last, 127)))
            if last >= 128:
                names.add(f"{max(member, 128):x}-{last:x}")
        name = " ".join(sorted(names))
        if not negated:
            return self._regular.unknown(bits, name) if name else self._regular.bytes(bits)
        bits ^= _ALL_ASCII
        if name and not bits:  # perhaps nothing
            raise Unsupported
        return self._characters(bits, f"^{name}" if name else None)

    def _member(self) -> int | tuple[int, str]:
        sign = self._next()
        if sign == "[":
            raise Unsupported
        return self._escaped() if sign == "\\" else ord(sign)

    def _escaped(self) -> int | tuple[int, str]:
        """A code point, or of a class: bits by ASCII character, and a name for the others."""
        match = _CODE.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
            code = int(match[match.lastindex or 0], 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise Unsupported
            return code
        sign = self._next()
        named = _NAMED.get(sign.lower())
        if named is not None:
            bits = sum(1 << ord(each) for each in named)
            return (bits if sign.islower() else bits ^ _ALL_ASCII), f"\\{sign}"
        if sign not in _CONTROLS and sign not in _LITERAL_IF_ESCAPED:
            raise Unsupported
        return ord(_CONTROLS.get(sign, sign))

    def _characters(self, bits: int, name: str | None) -> Node:
        """Some of ASCII, and those beyond: of a name, else all of them."""
        regular = self._regular
        if name is not None:
            return regular.unknown(bits, name)
        forms = [regular.sequence([regular.bytes(_bits(*each)) for each in form]) for form in _BEYOND_ASCII]
        return regular.union([regular.bytes(bits), *forms])

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise Unsupported
        self._at += 1
        return self._text[self._at - 1]

    def _accept(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found


def _bits(*ranges: tuple[int, int]) -> int:
    """One for each number, both ends included."""
    return sum((1 << last + 1) - (1 << first) for first, last in ranges if first <= last)
