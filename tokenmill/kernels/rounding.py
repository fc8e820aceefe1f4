"""How schemes with quantized activations round the input of a product: the spec, in plain torch.

Every kind is a function of one row, so that a token gives the same numbers alone and in a batch; where other engines
share a scale between the tokens of a batch, it is per token here. Knows nothing of weights. ref.py applies it; faster
backends apply the same rounding or decline.
"""

from __future__ import annotations

import torch
from torch import Tensor

OUTLIER_THRESHOLD = 6.0  # LLM.int8(): inputs this large stay in floating point
_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
# Halfway between neighbours of 0, .5, 1, 1.5, 2, 3, 4, 6. A tie goes to the even code: up at the 2nd, 4th and 6th.
_E2M1_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_E2M1_STEPS = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))

# kind -> description
INPUT_ROUNDINGS = {
    "none": "the input stays float",
    "int8_token": "int8, one scale per token",
    "int8_static": "int8, one calibrated scale",
    "llm_int8": f"int8 per token, inputs of {OUTLIER_THRESHOLD:g} and more stay float",
    "fp8_token": "float8, one scale per token",
    "fp8_static": "float8, one calibrated scale",
    "fp8_group128": "float8, a scale per token and 128 columns",
    "mxfp8": "float8, a power of two per token and 32 columns",
    "mxfp4": "float4, a power of two per token and 32 columns",
    "nvfp4": "float4, a float8 scale per token and 16 columns under one calibrated scale",
}
CALIBRATED = ("int8_static", "fp8_static", "nvfp4")  # need a scale from the file


def round_input(x: Tensor, kind: str, scale: float | None = None) -> Tensor:
    """float32 [tokens, width], each row rounded to what a product of this kind sees of it."""
    if kind == "none":
        return x
    if kind == "int8_token":
        return _int8(x, x.abs().amax(-1, keepdim=True) / 127)
    if kind == "llm_int8":
        outliers = x.abs() >= OUTLIER_THRESHOLD
        inner = x.masked_fill(outliers, 0.0)
        return torch.where(outliers, x, _int8(inner, inner.abs().amax(-1, keepdim=True) / 127))
    if kind == "fp8_token":
        return _float8(x, x.abs().amax(-1, keepdim=True) / _E4M3_MAX)
    if kind == "fp8_group128":
        return _grouped(x, 128, lambda groups, peak: _float8(groups, peak / _E4M3_MAX))
    if kind == "mxfp8":
        return _grouped(x, 32, lambda groups, peak: _float8(groups, power_of_two_scale(peak, 8)))
    if kind == "mxfp4":
        return _grouped(x, 32, lambda groups, peak: _float4(groups, power_of_two_scale(peak, 2)))
    assert scale is not None, kind
    if kind == "int8_static":
        return _int8(x, x.new_full((1, 1), scale))
    if kind == "fp8_static":
        return _float8(x, x.new_full((1, 1), scale))
    assert kind == "nvfp4", kind
    return _grouped(x, 16, lambda groups, peak: _float4(groups, _to_e4m3(peak / _E2M1_MAX / scale) * scale))


def nearest_e2m1(x: Tensor) -> Tensor:
    """Codes (uint8, bit 3 the sign) of the nearest 4-bit floats; ties to even, larger values to 6."""
    middles = torch.tensor(_E2M1_MIDDLES, dtype=x.dtype, device=x.device)
    middles[1::2] = torch.nextafter(middles[1::2], torch.zeros_like(middles[1::2]))
    magnitude = torch.bucketize(x.abs().contiguous(), middles)  # > middle, so a tie at an even boundary stays below
    return (magnitude + 8 * torch.signbit(x)).to(torch.uint8)


def power_of_two_scale(peak: Tensor, largest_exponent: int) -> Tensor:
    """The microscaling scale of groups with this largest magnitude, as compressed-tensors chooses it.

    2^(e - largest_exponent), where 2^e is the peak rounded to a power of two so that it seldom exceeds what the element
    type can hold (`largest_exponent`: 2 for e2m1, 8 for e4m3).
    """
    bits = peak.float().contiguous().view(torch.int32)
    return power_of_two(((bits + (1 << 21)) >> 23) - 127 - largest_exponent)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent (int32), exact on every device, within the normal numbers: some GPUs take smaller ones for zero."""
    return ((exponent.clamp(-126, 127) + 127) << 23).view(torch.float32)


def _grouped(x: Tensor, size: int, rounding: object) -> Tensor:
    assert callable(rounding)
    tokens, width = x.shape
    padded = torch.nn.functional.pad(x, (0, -width % size))  # a short last group is its own group
    groups = padded.view(tokens, -1, size)
    rounded: Tensor = rounding(groups, groups.abs().amax(-1, keepdim=True))
    return rounded.reshape(tokens, -1)[:, :width]


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _int8(x: Tensor, scale: Tensor) -> Tensor:
    step = _nonzero(scale)
    return (x / step).round().clamp(-128, 127) * step


def _to_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).float()


def _float8(x: Tensor, scale: Tensor) -> Tensor:
    step = _nonzero(scale)
    return _to_e4m3(x / step) * step


def _float4(x: Tensor, scale: Tensor) -> Tensor:
    step = _nonzero(scale)
    codes = nearest_e2m1(x / step).long()
    return torch.where(codes >= 8, -1.0, 1.0) * _E2M1_STEPS.to(x.device)[codes & 7] * step
