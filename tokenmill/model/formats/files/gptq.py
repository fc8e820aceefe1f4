"""GPTQ files. Version 1 is the widespread one and sound for symmetric weights; version 2 also holds asymmetric
ones.

Matrices that differ from the most common scheme are listed under `dynamic`. vLLM loads 4 and 8 bits, symmetric.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor

from tokenmill.model.formats.files.base import FileFormat, Shape, refuses_integers
from tokenmill.model.formats.gptq import BITS, GptqFormat
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme


class GptqFile(FileFormat):
    name = "gptq"
    version = 1

    @classmethod
    def refuses(cls, scheme: Scheme, shape: Shape) -> str | None:
        reason = refuses_integers(scheme, shape, BITS)
        if reason is not None:
            return reason
        if cls.version == 1 and not scheme.symmetric:
            return "version 1 stores zero points minus one, which fails at 0; write gptq_v2 or a symmetric scheme"
        if shape[0] * scheme.bits % 32 or shape[1] * scheme.bits % 32:
            return f"{shape[0]} x {shape[1]} codes of {scheme.bits} bits do not fill words; write compressed-tensors"
        return None

    @classmethod
    def encode(cls, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        return GptqFormat.encode(matrix, version=cls.version)

    @classmethod
    def quantization_config(cls, schemes: Mapping[str, Scheme], ignored: Sequence[str]) -> dict[str, object]:
        common = Counter(schemes.values()).most_common(1)[0][0]
        dynamic: dict[str, dict[str, object]] = {
            f"+:^{re.escape(name)}$": _settings(scheme) for name, scheme in schemes.items() if scheme != common
        }
        dynamic |= {f"-:^{re.escape(name)}$": {} for name in ignored if name != "lm_head"}
        return {
            "quant_method": "gptq",
            **_settings(common),
            "desc_act": False,
            "lm_head": "lm_head" in schemes,
            "checkpoint_format": cls.name,
            "pack_dtype": "int32",
            **({"dynamic": dynamic} if dynamic else {}),
        }


class GptqV2File(GptqFile):
    name = "gptq_v2"
    version = 2


def _settings(scheme: Scheme) -> dict[str, object]:
    return {"bits": scheme.bits, "group_size": scheme.group_size or -1, "sym": scheme.symmetric}
