"""bitsandbytes files: 4-bit codes of a table (nf4, fp4) in blocks of the flattened matrix, and LLM.int8() rows.

4 bit: weight uint8 [n / 2, 1] with the even element high, weight.absmax per block, weight.quant_map, and the rest as
JSON in weight.quant_state.bitsandbytes__nf4; with double quantization absmax itself is bytes of a second table.
int8: weight int8 [out, in] with SCB float32 [out], the largest magnitude of each row, which stands for 127.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import gcd

import torch
from torch import Tensor

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.errors import CheckpointError
from tokenmill.model.formats.base import WeightFormat
from tokenmill.model.formats.bits import pack_nibbles, unpack_nibbles
from tokenmill.model.formats.coded import CodedWeight, check_dimensions, scalar
from tokenmill.model.formats.quantized import NF4_VALUES, QuantizedMatrix, Scheme
from tokenmill.model.formats.settings import outlier_rounding

_STATE = "weight.quant_state.bitsandbytes__"
_ROW_FORMAT = 0  # of weight_format: plain rows, the only one that is still written
NESTED_BLOCK = 256


class FourBitWeight(CodedWeight):
    format_name = "bitsandbytes-4bit"

    def __init__(self, tensors: Mapping[str, Tensor], state: Mapping[str, object], prefix: str) -> None:
        self.packed = tensors["weight"]
        self.table = tensors["weight.quant_map"].float().flatten()
        self.absmax = tensors["weight.absmax"]
        shape, block = state.get("shape"), state.get("blocksize")
        if not isinstance(shape, list) or len(shape) != 2 or not isinstance(block, int) or block <= 0:
            raise CheckpointError(f"{prefix}: the quant_state has no shape or block size", "download it again")
        rows, columns = int(shape[0]), int(shape[1])
        doubled = "weight.nested_absmax" in tensors
        peaks = _nested(tensors, state, self.absmax) if doubled else self.absmax.float().flatten()
        if (
            self.table.numel() != 16
            or self.packed.numel() * 2 != rows * columns
            or peaks.numel() != -(-rows * columns // block)
        ):
            raise CheckpointError(f"{prefix}: weight and absmax do not fit shape {shape}", "download it again")
        # Blocks run over the flattened matrix. If a row is not a multiple of blocks, smaller groups are equivalent.
        group_size = gcd(block, columns)
        spread = peaks.repeat_interleave(block // group_size)[: rows * columns // group_size]
        self.peaks = spread.view(rows, columns // group_size)
        is_nf4 = state.get("quant_type") == "nf4" and torch.equal(self.table, torch.tensor(NF4_VALUES))
        scheme = Scheme("nf4" if is_nf4 else "codebook", 4, 0 if group_size == columns else group_size)
        self.describe(scheme, (rows, columns), torch.float32)

    def parts(self) -> dict[str, Tensor]:
        return {"packed": self.packed, "absmax": self.absmax, "table": self.table}

    def decode(self, begin: int = 0, end: int | None = None) -> QuantizedMatrix:
        last, columns = self.out_features if end is None else end, self.in_features
        first = begin * columns // 2
        codes = unpack_nibbles(self.packed.view(-1)[first : -(-last * columns // 2)], even_high=True)
        codes = codes[begin * columns - 2 * first :][: (last - begin) * columns].view(-1, columns)
        table = None if self.scheme.element == "nf4" else self.table
        return QuantizedMatrix(self.scheme, codes, self.peaks[begin:last], table=table)


class FourBitFormat(WeightFormat):
    name = "bitsandbytes-4bit"

    @classmethod
    def tensor_names(cls, checkpoint: Checkpoint, prefix: str) -> list[str]:
        for kind in ("nf4", "fp4"):
            suffixes = ["weight", "weight.absmax", "weight.quant_map", f"{_STATE}{kind}"]
            names = [f"{prefix}.{suffix}" for suffix in suffixes]
            if all(name in checkpoint for name in names) and checkpoint.tensor(names[0]).type_name == "U8":
                nested = [f"{prefix}.weight.nested_absmax", f"{prefix}.weight.nested_quant_map"]
                return names + [name for name in nested if name in checkpoint]
        return []

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str) -> FourBitWeight:
        names = cls.tensor_names(checkpoint, prefix)
        tensors = {name.removeprefix(f"{prefix}."): checkpoint.tensor(name).data for name in names}
        (state,) = (data for suffix, data in tensors.items() if suffix.startswith(_STATE))
        try:
            content = json.loads(bytes(state.flatten().tolist()))
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise CheckpointError(f"{prefix}: the quant_state is not JSON", "download it again")
        return FourBitWeight(tensors, content, prefix)

    @classmethod
    def encode(cls, matrix: QuantizedMatrix, double_quant: bool = False, dtype: str = "float16") -> dict[str, Tensor]:
        """`double_quant` stores absmax as bytes, rounding it by some 0.3 %; `dtype`: of the model it came from."""
        group_size = matrix.scheme.group_size or matrix.shape[1]
        state: dict[str, object] = {
            "quant_type": "nf4",
            "blocksize": group_size,
            "dtype": dtype,
            "shape": list(matrix.shape),
        }
        peaks = matrix.scales.float().flatten() * matrix.global_scale
        tensors = {
            "weight": pack_nibbles(matrix.codes.flatten(), even_high=True).unsqueeze(1),
            "weight.absmax": peaks,
            "weight.quant_map": torch.tensor(NF4_VALUES),
        }
        if double_quant:
            codes, nested, offset = double_quantize(peaks)
            tensors["weight.absmax"] = codes
            tensors["weight.nested_absmax"] = nested
            tensors["weight.nested_quant_map"] = dynamic_map()
            state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
        tensors[f"{_STATE}nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return tensors


class Int8RowWeight(CodedWeight):
    format_name = "bitsandbytes-int8"

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str, activations: str = "llm_int8") -> None:
        self.values, self.peaks = tensors["weight"], tensors["SCB"].view(-1, 1)
        if scalar(prefix, tensors, "weight_format") not in (None, _ROW_FORMAT):
            raise CheckpointError(
                f"{prefix}: int8 weights in tiles are not read", "save it again with bitsandbytes >= 0.45"
            )
        check_dimensions(prefix, tensors, weight=2)
        if self.peaks.shape[0] != self.values.shape[0]:
            raise CheckpointError(f"{prefix}: weight and SCB do not fit together", "download it again")
        rows, columns = self.values.shape
        self.describe(Scheme("int", 8, activations=activations), (rows, columns), torch.float32)

    def parts(self) -> dict[str, Tensor]:
        return {"values": self.values, "peaks": self.peaks}

    def decode(self, begin: int = 0, end: int | None = None) -> QuantizedMatrix:
        codes = self.values[begin:end].contiguous().view(torch.uint8) ^ 0x80
        return QuantizedMatrix(self.scheme, codes, self.peaks[begin:end].float() / 127)


class Int8RowFormat(WeightFormat):
    name = "bitsandbytes-int8"

    @classmethod
    def tensor_names(cls, checkpoint: Checkpoint, prefix: str) -> list[str]:
        names = [f"{prefix}.weight", f"{prefix}.SCB"]
        if any(name not in checkpoint for name in names) or checkpoint.tensor(names[0]).type_name != "I8":
            return []
        layout = f"{prefix}.weight_format"
        return [*names, layout] if layout in checkpoint else names

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str) -> Int8RowWeight:
        names = cls.tensor_names(checkpoint, prefix)
        tensors = {name.removeprefix(f"{prefix}."): checkpoint.tensor(name).data for name in names}
        return Int8RowWeight(tensors, prefix, outlier_rounding(checkpoint))

    @classmethod
    def encode(cls, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        scales = matrix.scales.flatten()
        peaks = (scales.double() * 127).float()
        for step in (-torch.inf, torch.inf):  # the neighbour, where rounding the product missed
            near = torch.nextafter(peaks, torch.full_like(peaks, step))
            peaks = torch.where((peaks / 127 != scales) & (near / 127 == scales), near, peaks)
        return {
            "weight": (matrix.codes ^ 0x80).view(torch.int8),
            "SCB": peaks,
            "weight_format": torch.tensor(_ROW_FORMAT, dtype=torch.uint8),
        }


def dynamic_map() -> Tensor:
    """The 256 values in [-1, 1] of the second table: seven decades, each twice as finely divided as the one below."""
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float32)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        values += means.tolist() + (-means).tolist()
    return torch.tensor(sorted(values))


def double_quantize(peaks: Tensor) -> tuple[Tensor, Tensor, float]:
    """(bytes, their largest magnitude per 256, offset) of block scales: what remains is about 0.3 % of each."""
    offset = float(peaks.mean())
    blocks = torch.nn.functional.pad(peaks - offset, (0, -peaks.numel() % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    nested = blocks.abs().amax(-1)
    table = dynamic_map()
    relative = blocks / torch.where(nested > 0, nested, torch.ones_like(nested)).unsqueeze(1)
    codes = torch.bucketize(relative, (table[:-1] + table[1:]) / 2)
    return codes.flatten()[: peaks.numel()].to(torch.uint8), nested, offset


def _nested(tensors: Mapping[str, Tensor], state: Mapping[str, object], codes: Tensor) -> Tensor:
    block, offset = state.get("nested_blocksize", NESTED_BLOCK), state.get("nested_offset", 0.0)
    table = tensors["weight.nested_quant_map"].float().flatten()
    if not isinstance(block, int) or not isinstance(offset, (int, float)) or block <= 0 or table.numel() != 256:
        raise CheckpointError("the nested quant_state is not one of bitsandbytes", "download it again")
    peaks = tensors["weight.nested_absmax"].float().repeat_interleave(block)[: codes.numel()]
    return table[codes.long()] * peaks + offset
