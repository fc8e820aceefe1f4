"""Keeps weights as the transforms before left them: what pruning without rounding ends with."""

from __future__ import annotations

from collections.abc import Mapping

from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.quantize.base import BlockView, Solver


class Floats(Solver):
    name = "float"
    keeps_zeros = True

    def check(self, name: str, shape: tuple[int, int], scheme: Scheme) -> None:  # noqa: ARG002
        if scheme.element != "float":
            raise UserError(f"{name} is to be {scheme.element}, which nothing rounds it to", "add +gptq or +rtn")

    def solve(self, block: BlockView, scheme_of: Mapping[str, Scheme]) -> dict[str, QuantizedMatrix]:
        matrices = {}
        for name, scheme in scheme_of.items():
            weight = block.weight(name)
            matrices[name] = QuantizedMatrix(scheme, weight, weight.new_ones(weight.shape[0], 1))
            block.replace(name, weight)
        return matrices
