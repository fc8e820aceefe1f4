"""bitsandbytes files: nf4 and LLM.int8(), which transformers loads without conversion.

"bitsandbytes" keeps the scales of nf4 as float32 and loses nothing; "bitsandbytes_double" stores them as bytes under a
second scale (double quantization, 4.13 instead of 4.5 bits a weight), which rounds them by some 0.3 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from tokenmill.kernels.rounding import OUTLIER_THRESHOLD
from tokenmill.model.formats.bitsandbytes import FourBitFormat, Int8RowFormat
from tokenmill.model.formats.files.base import FileFormat, Shape, refuses_groups
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme

_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


class BitsAndBytesFile(FileFormat):
    name = "bitsandbytes"
    one_scheme = "its config states one for the model"
    double_quant = False

    @classmethod
    def refuses(cls, scheme: Scheme, shape: Shape) -> str | None:
        if scheme.element == "nf4":
            if scheme.activations != "none":
                return "its nf4 does not quantize activations; use a scheme without quantized activations"
            if scheme.group_size not in _BLOCKS or scheme.block_rows != 1:
                return f"its block sizes are {', '.join(map(str, _BLOCKS))}; use --group-size 64"
            return refuses_groups(scheme, shape)
        if scheme.element != "int" or scheme.bits != 8:
            return "it stores nf4 and 8-bit ints only; write it as compressed-tensors"
        if scheme.activations != "llm_int8" or scheme.group_size or scheme.block_rows != 1 or not scheme.symmetric:
            return "its ints are those of LLM.int8(), one scale per row; use the method llm_int8 or compressed-tensors"
        return None

    @classmethod
    def encode(cls, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        if matrix.scheme.element == "nf4":
            return FourBitFormat.encode(matrix, cls.double_quant)
        return Int8RowFormat.encode(matrix)

    @classmethod
    def quantization_config(cls, schemes: Mapping[str, Scheme], ignored: Sequence[str]) -> dict[str, object]:
        four_bit = next(iter(schemes.values())).element == "nf4"
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": four_bit,
            "load_in_8bit": not four_bit,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": cls.double_quant,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_threshold": OUTLIER_THRESHOLD,
            "llm_int8_skip_modules": list(ignored) or None,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_enable_fp32_cpu_offload": False,
        }


class BitsAndBytesDoubleFile(BitsAndBytesFile):
    name = "bitsandbytes_double"
    double_quant = True

    @classmethod
    def refuses(cls, scheme: Scheme, shape: Shape) -> str | None:
        if scheme.element != "nf4":
            return "double quantization applies to nf4 scales only; write it as bitsandbytes"
        return super().refuses(scheme, shape)
