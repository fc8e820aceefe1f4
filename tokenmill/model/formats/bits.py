"""Packing of small codes into bytes and words, and nothing else: no scales, no names, no files.

A row of codes is one little-endian bit stream: code i takes bits [i * bits, (i + 1) * bits). GPTQ, AWQ and
compressed-tensors differ only in which axis is the row and in the order of the codes, which is theirs to say.
"""

from __future__ import annotations

import torch
from torch import Tensor


def words_for(count: int, bits: int) -> int:
    """32-bit words that a row of `count` codes takes."""
    return -(-count * bits // 32)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [..., n] below 2^bits -> int32 [..., ceil(n * bits / 32)], spare bits zero."""
    *outer, count = codes.shape
    padded = torch.zeros(*outer, -(-count // 8) * 8, dtype=torch.int16)
    padded[..., :count] = codes
    eights = padded.view(*outer, -1, 8)  # 8 codes fill exactly `bits` bytes
    streams = torch.zeros(*outer, eights.shape[-2], bits, dtype=torch.int16)
    for position in range(8):
        byte, shift = divmod(position * bits, 8)
        shifted = eights[..., position] << shift
        streams[..., byte] |= shifted & 255
        if shift + bits > 8:
            streams[..., byte + 1] |= shifted >> 8
    flat = streams.to(torch.uint8).flatten(-2)
    packed = torch.zeros(*outer, words_for(count, bits) * 4, dtype=torch.uint8)
    length = min(flat.shape[-1], packed.shape[-1])
    packed[..., :length] = flat[..., :length]
    return packed.view(torch.int32)


def unpack_bits(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [..., words] -> uint8 codes [..., count]."""
    data = words.contiguous().view(torch.uint8)
    if bits == 8:
        return data[..., :count].contiguous()
    if bits == 4:
        return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)[..., :count].contiguous()
    *outer, available = data.shape
    groups = -(-count // 8)
    streams = torch.zeros(*outer, groups * bits + 1, dtype=torch.int16)
    length = min(available, groups * bits)
    streams[..., :length] = data[..., :length]
    low, high = streams[..., :-1].unflatten(-1, (groups, bits)), streams[..., 1:].unflatten(-1, (groups, bits))
    codes = torch.empty(*outer, groups, 8, dtype=torch.uint8)
    for position in range(8):
        byte, shift = divmod(position * bits, 8)
        codes[..., position] = ((low[..., byte] | high[..., byte] << 8) >> shift) & (2**bits - 1)
    return codes.flatten(-2)[..., :count].contiguous()


def unpack_padded(words: Tensor, bits: int, count: int) -> Tensor:
    """The older layout of compressed-tensors: floor(32 / bits) codes in each word, the top bits unused."""
    shifts = torch.arange(32 // bits, dtype=torch.int32) * bits
    codes = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return codes.to(torch.uint8).flatten(-2)[..., :count].contiguous()


def pack_nibbles(codes: Tensor, even_high: bool = False) -> Tensor:
    """uint8 codes [..., n] below 16 -> uint8 [..., n / 2]; `even_high`: the even code in the high nibble."""
    even, odd = codes[..., 0::2], codes[..., 1::2]
    return even << 4 | odd if even_high else odd << 4 | even


def unpack_nibbles(data: Tensor, even_high: bool = False) -> Tensor:
    pair = (data >> 4, data & 15) if even_high else (data & 15, data >> 4)
    return torch.stack(pair, dim=-1).flatten(-2)
