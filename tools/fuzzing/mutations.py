"""Seeded damage to bytes, texts and JSON documents.

Every function takes a `random.Random` and a valid input (or several) and returns a changed one; the same seed gives the
same change. Knows nothing of what reads the result. Used by doors.py.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Sequence
from random import Random
from typing import Any

NUMBERS = [0, 1, 7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**48, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]
TEXTS = [
    "",
    " ",
    "\x00",
    "\u202e\u2066",  # direction overrides
    "e" + "\u0301" * 300,  # many combining marks on one letter
    "👩‍👩‍👧‍👦" * 20,
    "\ufffd\ufeff",
    "\\ud800",  # half a surrogate pair, as JSON writes it
    "'\"`\\",
    "%s%n{0}{{}}",
    "../../etc/passwd",
    "\n" * 500,
    "(" * 200,
    "[" * 3000,
    "9" * 400,
    "A" * 20_000,
]
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**53 + 1,
    2**63,
    -(2**63) - 1,
    10**30,
    0.5,
    -0.0,
    1e-320,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "x",
    "1",
    [],
    {},
    [None],
    [[]],
    [0] * 300,
    {"": None},
    {"type": []},
]


def mutate_bytes(random: Random, data: bytes, others: Sequence[bytes], head: int | None = None) -> bytes:
    """`head`: damage falls on the first so many bytes, where a header is."""
    end = max(9, min(head or len(data), len(data)))
    damaged = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        at = random.randrange(max(1, min(end, len(damaged)) - 8))
        kind = random.randrange(8)
        if kind == 0:
            damaged[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            damaged[at] = random.randrange(256)
        elif kind in (2, 3):  # a length, count, offset or type
            width = random.choice(("<I", "<Q", "<H"))
            size = struct.calcsize(width)
            if at + size <= len(damaged):
                struct.pack_into(width, damaged, at, random.choice(NUMBERS) % 2 ** (8 * size))
        elif kind == 4:
            other = random.choice(others)
            source = random.randrange(len(other))
            length = random.choice((4, 8, 16, 64, 256))
            damaged[at : at + length] = other[source : source + length]
        elif kind == 5:
            damaged[at:at] = damaged[at : at + random.choice((1, 8, 64))]
        elif kind == 6:
            del damaged[at : at + random.choice((1, 4, 8, 64))]
        else:
            del damaged[random.randrange(len(damaged)) :]
        if len(damaged) < 16:
            break
    return bytes(damaged)


def mutate_text(random: Random, text: str, others: Sequence[str]) -> str:
    for _ in range(random.choice((1, 1, 2, 3, 6))):
        at = random.randrange(len(text) + 1)
        until = min(len(text), at + random.choice((1, 2, 5, 20, 100)))
        kind = random.randrange(9)
        if kind == 0:
            text = text[:at] + text[until:]
        elif kind == 1:
            text = text[:at] + chr(random.randrange(32, 127)) + text[at:]
        elif kind == 2:
            text = text[:at] + random.choice(TEXTS) + text[at:]
        elif kind == 3:
            other = random.choice(others)
            start = random.randrange(len(other) + 1)
            text = text[:at] + other[start : start + random.choice((3, 20, 80))] + text[until:]
        elif kind == 4:
            text = text[:at] + text[at:until] * random.choice((2, 3, 50)) + text[until:]
        elif kind == 5:
            text = text[:at] + str(random.choice(NUMBERS)) + text[at:]
        elif kind == 6:
            text = text[:at]
        elif kind == 7:
            text = text[:at] + chr(random.choice((0xE9, 0x4E2D, 0x1F600, 0x7F, 0xFFFF, 0x300))) + text[until:]
        else:
            text = text[:at] + text[at:until][::-1] + text[until:]
        text = text[:40_000]
    return text


def mutate_json(random: Random, document: Any, others: Sequence[Any]) -> str:
    """The text of a changed document: usually valid JSON of a wrong shape, sometimes no JSON."""
    tree = {"root": copy.deepcopy(document)}
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        _change_node(random, tree, others)
    text = json.dumps(tree["root"], ensure_ascii=random.random() < 0.5)
    chance = random.random()
    if chance < 0.04:
        return mutate_text(random, text, [text])
    if chance < 0.08 and text.startswith("{") and len(text) > 2:  # every key of the object twice
        return text[:-1] + "," + text[1:]
    return text


def _change_node(random: Random, tree: dict[str, Any], others: Sequence[Any]) -> None:
    holder, key = random.choice(list(_places(tree)))
    kind = random.randrange(8)
    if kind in (0, 1):
        holder[key] = copy.deepcopy(random.choice(VALUES))
    elif kind == 2:
        holder[key] = random.choice(TEXTS)
    elif kind == 3:
        holder[key] = random.choice(NUMBERS) * random.choice((1, -1))
    elif kind == 4:  # a node of another place or document
        source, name = random.choice(list(_places({"root": random.choice(others)})))
        holder[key] = copy.deepcopy(source[name])
    elif kind == 5:
        holder[key] = _nested(random, holder[key])
    elif kind == 6 and isinstance(holder, dict) and holder is not tree:
        value = holder.pop(key)
        if random.random() < 0.5:
            holder[random.choice((*TEXTS, f"{key}s"))] = value
    elif isinstance(holder, list):
        holder[key : key + 1] = [] if random.random() < 0.5 else [holder[key]] * random.choice((2, 40))
    else:
        holder[key] = [holder[key]]


def _nested(random: Random, value: Any) -> Any:
    for _ in range(random.choice((1, 5, 100, 400))):
        value = [value] if random.random() < 0.7 else {"a": value}
    return value


def _places(node: Any) -> Any:
    """Every (holder, key) of a document, without descending further than a generator's stack should go."""
    stack = [node]
    while stack:
        holder = stack.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            yield holder, key
            if isinstance(holder[key], (dict, list)):
                stack.append(holder[key])
