"""The matrices [out, in] of all experts of a layer as one tensor on the GPU, in the layout that the kernels read.

Four kinds: "bf16"; "fp8" (E4M3 codes with a scale per expert, per row, or per block of 128 x 128); "int4" (signed codes
in groups, laid out as matmul/grouped.py says, all experts' rows one under the other); "mxfp4" (E2M1 codes with a power
of two for every 32). Rows of a stack whose halves gate each other are gate rows, then up rows. Knows no tokens. Made at
load; product.py and gemv.py read `tensors`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tokenmill.kernels.base import Declined
from tokenmill.kernels.triton.matmul.repack import pack_groups

SCALE_BLOCK = 128  # rows and columns that share a scale of "fp8"; columns that share one of its input
MX_GROUP = 32
ROWS_AT_ONCE = 1 << 14  # that packing holds unpacked
MX_WORDS = 16  # words of a row in a block of "mxfp4"
# Where the bits of four codes lie in 16: the sign, then the magnitude from its highest bit on. Three of them become
# bf16 (times 2^-126) by a shift and a mask: sign in bit 15, magnitude in bits 8 to 6.
_MX_BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))


class StackTensors(NamedTuple):
    """What the kernels read. R: rows of all experts, experts * rows."""

    codes: Tensor  # bf16, float8 [R, depth]; int32 [blocks, R, words]
    scales: Tensor | None  # fp8 [experts, row blocks, depth blocks], int4 float16 [groups, R], mxfp4 int32 [blocks, R]
    zeros: Tensor | None  # int4: bfloat16 [groups, R]
    row_scale: Tensor | None  # float32 [R]
    bias: Tensor | None  # float32 [R]


@dataclass(frozen=True, slots=True)
class GpuExpertStack:
    kind: str  # "bf16" | "fp8" | "int4" | "mxfp4"
    num_experts: int
    rows: int  # of one expert
    depth: int
    group: int  # values of a row that share a scale; 0: none
    tensors: StackTensors
    halves: int = 1  # 2: blocks of scales begin anew with the second half of the rows

    @property
    def expert_bytes(self) -> int:
        """What reading one expert moves."""
        return self.nbytes // self.num_experts

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors if tensor is not None)

    @property
    def words(self) -> int:
        """Words of a row in a block of codes; 0 for 8 and 16 bits."""
        return self.tensors.codes.shape[2] if self.tensors.codes.dtype == torch.int32 else 0

    @property
    def device(self) -> torch.device:
        return self.tensors.codes.device


def _slot_axes(stack: GpuExpertStack) -> tuple[int, ...]:
    """For each of `tensors`, the axis along which experts follow each other."""
    codes, scales = stack.tensors.codes, stack.tensors.scales
    return int(codes.dim() == 3), int(scales is not None and scales.dim() == 2), 1, 0, 0


def empty_slots(expert: GpuExpertStack, count: int, device: torch.device) -> GpuExpertStack:
    """Room for `count` experts like the one of this stack."""
    assert expert.num_experts == 1
    tensors: list[Tensor | None] = []
    for tensor, axis in zip(expert.tensors, _slot_axes(expert), strict=True):
        shape = () if tensor is None else (*tensor.shape[:axis], count * tensor.shape[axis], *tensor.shape[axis + 1 :])
        tensors.append(None if tensor is None else torch.empty(shape, dtype=tensor.dtype, device=device))
    return replace(expert, num_experts=count, tensors=StackTensors(*tensors))  # type: ignore[arg-type]


def fill_slot(slots: GpuExpertStack, slot: int, expert: GpuExpertStack) -> None:
    """Copy the expert of a stack of one into a slot, without waiting for it."""
    for target, source, axis in zip(slots.tensors, expert.tensors, _slot_axes(slots), strict=True):
        if target is not None and source is not None:
            size = source.shape[axis]
            target.narrow(axis, slot * size, size).copy_(source, non_blocking=True)


def _flat(values: Tensor | None, device: torch.device) -> Tensor | None:
    return None if values is None else values.to(device, torch.float32).reshape(-1).contiguous()


def bf16_stack(weights: Tensor, bias: Tensor | None = None) -> GpuExpertStack:
    """weights [experts, rows, depth]; bias [experts, rows]."""
    experts, rows, depth = weights.shape
    codes = weights.to(torch.bfloat16).contiguous().view(experts * rows, depth)
    return GpuExpertStack(
        "bf16", experts, rows, depth, 0, StackTensors(codes, None, None, None, _flat(bias, codes.device))
    )


def fp8_stack(codes: Tensor, scales: Tensor, bias: Tensor | None = None, halves: int = 1) -> GpuExpertStack:
    """codes float8_e4m3fn [experts, rows, depth]; scales [experts], [experts, rows], or [experts, halves * row blocks,
    depth blocks], where `halves` is 2 if gate and up rows have blocks of their own."""
    experts, rows, depth = codes.shape
    flat = codes.contiguous().view(experts * rows, depth)
    scales = scales.to(codes.device, torch.float32)
    kept, row_scale = None, None
    if scales.numel() == experts:
        row_scale = scales.reshape(experts, 1).expand(experts, rows).reshape(-1).contiguous()
    elif scales.numel() == experts * rows:
        row_scale = scales.reshape(-1).contiguous()
    else:
        blocks = halves * -(-rows // halves // SCALE_BLOCK), -(-depth // SCALE_BLOCK)
        if tuple(scales.shape) != (experts, *blocks):
            raise Declined(f"float8 experts with scales {list(scales.shape)} have no kernel")
        kept = scales.contiguous()
    tensors = StackTensors(flat, kept, None, row_scale, _flat(bias, codes.device))
    return GpuExpertStack("fp8", experts, rows, depth, SCALE_BLOCK if kept is not None else 0, tensors, halves)


def int4_stack(codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None = None) -> GpuExpertStack:
    """codes int8 [experts, rows, depth] in -8 .. 7, scales and zeros [experts, rows, groups]: scale * (code - zero)."""
    experts, rows, depth = codes.shape
    words = 32 if depth % 256 == 0 else 16
    packed = pack_groups(
        codes.reshape(experts * rows, depth),
        scales.float().reshape(experts * rows, -1),
        None if zeros is None else zeros.float().reshape(experts * rows, -1),
        4,
        words,
    )
    tensors = StackTensors(packed.codes, packed.scales, packed.zeros, packed.row_scale, _flat(bias, codes.device))
    return GpuExpertStack("int4", experts, rows, depth, packed.group, tensors)


def mxfp4_stack(blocks: Tensor, scales: Tensor, bias: Tensor | None = None) -> GpuExpertStack:
    """blocks uint8 [experts, rows, depth / 2], value 2i in the low half of a byte; scales uint8 [experts, rows, depth /
    32], 2^(scale - 127). Kept relative to the largest of a row, so that their products are bf16 whatever the scales."""
    experts, rows, _ = blocks.shape
    depth = blocks.shape[2] * 2
    if depth % MX_GROUP:
        raise Declined(f"mxfp4 experts with {depth} inputs, not a multiple of {MX_GROUP}, have no kernel")
    flat = blocks.reshape(experts * rows, depth // 2)
    exponents = scales.reshape(experts * rows, -1).int()
    highest = exponents.amax(1)
    relative = (exponents - highest[:, None] + 253).clamp(min=0).to(torch.uint8)
    padding = -depth % (8 * MX_WORDS)
    relative = torch.nn.functional.pad(relative, (0, padding // MX_GROUP))
    words = relative.contiguous().view(torch.int32).t().contiguous()  # [blocks, R]: a byte for each of four groups
    codes = torch.cat([_pack_e2m1(part, padding) for part in flat.split(ROWS_AT_ONCE)], 1)
    tensors = StackTensors(codes, words, None, torch.exp2(highest.float() - 127), _flat(bias, blocks.device))
    return GpuExpertStack("mxfp4", experts, rows, depth, MX_GROUP, tensors)


def _pack_e2m1(packed: Tensor, padding: int) -> Tensor:
    """uint8 [R, depth / 2] -> int32 [blocks, R, words]: part i of a word, as _MX_BITS has it in one of the word's
    halves, is place words * i + j of its block."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    codes = torch.nn.functional.pad(codes, (0, padding))
    places = codes.view(len(codes), -1, 8, MX_WORDS).permute(1, 0, 2, 3).int()  # [blocks, R, 8, words]
    words = torch.zeros(places.shape[0], places.shape[1], MX_WORDS, dtype=torch.int32, device=packed.device)
    for part in range(8):
        for number, bit in enumerate(_MX_BITS[part % 4]):
            words |= ((places[:, :, part] >> (3 - number)) & 1) << (bit + 16 * (part // 4))
    return words
