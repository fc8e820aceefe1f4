"""The PTX that widens codes of quantized KV rows, executed here instruction by instruction over every element there is:
a CPU has no other way to run it, and Triton's interpreter takes another path."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from tokenmill.kernels.packed_pages import CODEBOOK_HALVES
from tokenmill.kernels.triton.attention.packed_widening import NIBBLES, OCTETS, codebook_lookup
from tokenmill.model.kvstore.codebook import normal_codebook

Words = np.ndarray  # uint32, one for each run


def prmt(a: Words, b: Words, selector: Words) -> Words:
    table = [(each >> np.uint32(8 * i)) & np.uint32(255) for each in (a, b) for i in range(4)]
    out = np.zeros_like(a)
    for place in range(4):
        nibble = (selector >> np.uint32(4 * place)) & np.uint32(15)
        byte = np.choose(nibble & np.uint32(7), table)
        signs = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        out |= np.where(nibble & np.uint32(8), signs, byte).astype(np.uint32) << np.uint32(8 * place)
    return out


def lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    out = np.zeros_like(a)
    for bits in range(8):
        matches = [each if bits >> shift & 1 else ~each for each, shift in ((a, 2), (b, 1), (c, 0))]
        out |= np.where((table >> np.uint32(bits)) & np.uint32(1), matches[0] & matches[1] & matches[2], np.uint32(0))
    return out


def halves(word: Words) -> np.ndarray:
    return np.ascontiguousarray(word).view(np.float16)


def fma(a: Words, b: Words, c: Words) -> Words:
    exact = halves(a).astype(np.float64) * halves(b) + halves(c)
    return exact.astype(np.float16).view(np.uint32)


INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "sub.u32": lambda a, b: a - b,
    "sub.f16x2": lambda a, b: (halves(a) - halves(b)).view(np.uint32),
    "fma.rn.f16x2": fma,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
}


def execute(ptx: str, outputs: int, source: Words) -> list[np.ndarray]:
    """The outputs $0... as float16, two for each word of the input, which is the register after them."""
    registers = {f"${outputs}": source}

    def value(operand: str) -> Words:
        if operand[0].isdigit():
            return np.full_like(source, int(operand, 0))
        return registers[operand]

    for line in ptx.splitlines():
        statement = line.strip()
        if statement in ("", "{", "}") or statement.startswith(".reg"):
            continue
        name, operands = re.fullmatch(r"(\S+) (.+);", statement).groups()  # type: ignore[union-attr]
        target, *others = (each.strip() for each in operands.split(","))
        assert target != f"${outputs}", "an input is not written"
        registers[target] = INSTRUCTIONS[name](*(value(each) for each in others)).astype(np.uint32)
    return [halves(registers[f"${number}"]) for number in range(outputs)]


def every_element() -> tuple[Words, np.ndarray]:
    """All elements of 16 bits, each beside another one, as words and one by one."""
    first = np.arange(1 << 16, dtype=np.uint16)
    both = np.stack((first, first * np.uint16(40503)), 1)  # odd: the second ones are all elements as well
    return both.reshape(-1).view(np.uint32), both.reshape(-1)


def test_int8() -> None:
    words, elements = every_element()
    low, high = execute(OCTETS, 2, words)
    pairs = elements.view(np.int8).reshape(-1, 2)
    assert np.array_equal(low, pairs[:, 0])
    assert np.array_equal(high, pairs[:, 1])


def test_four_bits() -> None:
    words, elements = every_element()
    for place, found in enumerate(execute(NIBBLES, 4, words)):
        assert np.array_equal(found, elements >> 4 * place & 15)


def test_codebook_is_exact() -> None:
    """The levels of the store in half precision, every bit."""
    levels = normal_codebook(4)[0].half().numpy()
    words, elements = every_element()
    for place, found in enumerate(execute(codebook_lookup(CODEBOOK_HALVES), 4, words)):
        assert np.array_equal(found.view(np.uint16), levels[elements >> 4 * place & 15].view(np.uint16))


def test_levels_are_those_of_the_store() -> None:
    levels = normal_codebook(4)[0]
    assert torch.equal(levels[:8].half(), -levels[8:].half().flip(0))
    assert tuple(levels[8:].half().view(torch.int16).tolist()) == CODEBOOK_HALVES
