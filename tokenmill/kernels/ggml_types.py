"""The storage types of ggml, by name and by the number that GGUF files use: values per block, bytes per block.

Only facts about layout; what the bits mean is in ref_ggml.py. Read by the GGUF reader, the weight formats and the
memory arithmetic. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GGMLType:
    name: str
    number: int  # type id in the file
    block_size: int  # values in a block; 1 for plain types
    block_bytes: int

    @property
    def is_block(self) -> bool:
        return self.block_size > 1

    @property
    def bits_per_value(self) -> float:
        return 8 * self.block_bytes / self.block_size

    def row_bytes(self, row_length: int) -> int:
        """Bytes of one row; its length must be a multiple of the block size."""
        assert row_length % self.block_size == 0, (self.name, row_length)
        return row_length // self.block_size * self.block_bytes


_TYPES = (
    GGMLType("F32", 0, 1, 4),
    GGMLType("F16", 1, 1, 2),
    GGMLType("Q4_0", 2, 32, 2 + 16),  # scale, 32 x 4 bits
    GGMLType("Q4_1", 3, 32, 2 + 2 + 16),  # scale, minimum, 32 x 4 bits
    GGMLType("Q5_0", 6, 32, 2 + 4 + 16),  # scale, 32 high bits, 32 x 4 bits
    GGMLType("Q5_1", 7, 32, 2 + 2 + 4 + 16),
    GGMLType("Q8_0", 8, 32, 2 + 32),  # scale, 32 x int8
    GGMLType("Q2_K", 10, 256, 16 + 64 + 2 + 2),  # 16 x (4-bit scale, 4-bit minimum), 256 x 2 bits, scale, minimum
    GGMLType("Q3_K", 11, 256, 32 + 64 + 12 + 2),  # 256 high bits, 256 x 2 bits, 16 x 6-bit scale, scale
    GGMLType("Q4_K", 12, 256, 2 + 2 + 12 + 128),  # scale, minimum, 8 x (6-bit scale, 6-bit minimum), 256 x 4 bits
    GGMLType("Q5_K", 13, 256, 2 + 2 + 12 + 32 + 128),  # as Q4_K, with 256 high bits
    GGMLType("Q6_K", 14, 256, 128 + 64 + 16 + 2),  # 256 x 4 bits, 256 x 2 bits, 16 x int8 scale, scale
    GGMLType("IQ2_XXS", 16, 256, 2 + 64),  # scale, 8 x (4 points, 4 x 7 signs, 4-bit scale)
    GGMLType("IQ2_XS", 17, 256, 2 + 64 + 8),  # scale, 32 x (9-bit point, 7 signs), 16 x 4-bit scale
    GGMLType("IQ3_XXS", 18, 256, 2 + 64 + 32),  # scale, 64 points, 8 x (4 x 7 signs, 4-bit scale)
    GGMLType("IQ1_S", 19, 256, 2 + 32 + 16),  # scale, 32 points, 8 x (4 x 3 high bits, 3-bit scale, shift)
    GGMLType("IQ4_NL", 20, 32, 2 + 16),  # scale, 32 x 4-bit index into a fixed table
    GGMLType("IQ3_S", 21, 256, 2 + 64 + 8 + 32 + 4),  # scale, 64 points, 64 high bits, 256 signs, 8 x 4-bit scale
    GGMLType("IQ2_S", 22, 256, 2 + 32 + 32 + 8 + 8),  # scale, 32 points, 256 signs, 32 x 2 high bits, 16 x 4-bit scale
    GGMLType("IQ4_XS", 23, 256, 2 + 2 + 4 + 128),  # scale, 8 x 6-bit scale, 256 x 4-bit index
    GGMLType("I8", 24, 1, 1),
    GGMLType("I16", 25, 1, 2),
    GGMLType("I32", 26, 1, 4),
    GGMLType("I64", 27, 1, 8),
    GGMLType("F64", 28, 1, 8),
    GGMLType("IQ1_M", 29, 256, 32 + 16 + 8),  # 32 points, 32 x (3 high bits, shift), 16 x 3-bit scale, scale
    GGMLType("BF16", 30, 1, 2),
    GGMLType("TQ1_0", 34, 256, 48 + 4 + 2),  # 240 digits of three by fives, 16 by fours, scale
    GGMLType("TQ2_0", 35, 256, 64 + 2),  # 256 x 2 bits, scale
    GGMLType("MXFP4", 39, 32, 1 + 16),  # power-of-two scale, 32 x 4-bit float
    GGMLType("NVFP4", 40, 64, 4 + 32),  # 4 x 8-bit float scale, 64 x 4-bit float
)

TYPES: dict[str, GGMLType] = {entry.name: entry for entry in _TYPES}
TYPES_BY_NUMBER: dict[int, GGMLType] = {entry.number: entry for entry in _TYPES}

# Types that ggml knows and we do not read: only to name them in an error.
UNREAD_TYPE_NAMES: dict[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    41: "Q1_0",
}
