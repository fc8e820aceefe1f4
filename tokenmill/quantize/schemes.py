"""The table of method names (mxfp4, llm.int8, awq): the steps of each, its scheme, and whether `--bits` and
`--group-size` can be chosen. recipe.py turns a request into steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenmill.errors import UserError, unknown_name
from tokenmill.model.formats.quantized import Scheme

GROUP_SIZES = (128, 64, 32)  # tried in this order where the user does not choose


@dataclass(frozen=True, slots=True)
class Method:
    """`steps`: names in TRANSFORMS and SOLVERS. `free_bits`, `free_group`: the user may choose them.

    `group_open`: the default is the largest of GROUP_SIZES that divides every matrix.
    """

    steps: tuple[str, ...]
    scheme: Scheme
    free_bits: bool = False
    free_group: bool = False
    group_open: bool = False

    @property
    def free_symmetry(self) -> bool:
        return self.free_bits and self.scheme.element == "int"


def _integers(*steps: str, bits: int = 4, symmetric: bool = True) -> Method:
    return Method(
        steps, Scheme("int", bits, 128, symmetric=symmetric), free_bits=True, free_group=True, group_open=True
    )


_FLOAT = Scheme("float", 16)
_INT8_CHANNEL = Scheme("int", 8, 0, activations="int8_token")

METHODS: dict[str, Method] = {
    "rtn": _integers("rtn"),
    "gptq": _integers("gptq"),
    "autoround": _integers("autoround"),
    "qat": _integers("qat", bits=2),
    "hqq": Method(("hqq",), Scheme("int", 4, 64, symmetric=False), free_bits=True, free_group=True, group_open=True),
    "awq": _integers("awq", "rtn", symmetric=False),
    "omniquant": _integers("omniquant", "gptq"),
    "rotation": _integers("rotation", "rtn"),
    "spinquant": _integers("spinquant", "gptq"),
    "float": Method(("float",), _FLOAT),
    "magnitude": Method(("magnitude", "float"), _FLOAT),
    "wanda": Method(("wanda", "float"), _FLOAT),
    "sparsegpt": Method(("sparsegpt", "float"), _FLOAT),
    "smoothquant": Method(("smoothquant", "rtn"), _INT8_CHANNEL),
    "llm.int8": Method(("llm_int8",), Scheme("int", 8, 0, activations="llm_int8")),
    "fp8": Method(("fp8",), Scheme("e4m3", 8, 0, activations="fp8_token"), free_group=True),
    "mxfp4": Method(("mx",), Scheme("e2m1", 4, 32, scale_type="e8m0")),
    "mxfp8": Method(("mx",), Scheme("e4m3", 8, 32, scale_type="e8m0")),
    "nvfp4": Method(("nvfp4",), Scheme("e2m1", 4, 16, scale_type="e4m3")),
    "nf4": Method(("nf4",), Scheme("nf4", 4, 64), free_group=True),
    "turboquant": Method(("turboquant",), Scheme("codebook", 4, 0), free_bits=True),
}

FP8_SCALING = {
    "tensor": Scheme("e4m3", 8, 0, block_rows=0, activations="fp8_static"),
    "channel": Scheme("e4m3", 8, 0, activations="fp8_token"),
    "block": Scheme("e4m3", 8, 128, block_rows=128, activations="fp8_group128"),
}


# --activations -> the rounding of inputs, by the weights' element and type of scales.
ACTIVATIONS: dict[str, dict[tuple[str, str], str]] = {
    "none": {("int", "float"): "none", ("e4m3", "float"): "none", ("e2m1", "e8m0"): "none", ("e2m1", "e4m3"): "none"},
    "int8": {("int", "float"): "int8_token"},
    "fp8": {("int", "float"): "fp8_token", ("e4m3", "float"): "fp8_token"},
    "fp4": {("e2m1", "e8m0"): "mxfp4", ("e2m1", "e4m3"): "nvfp4"},
}


def with_activations(name: str, scheme: Scheme, activations: str) -> Scheme:
    """The scheme with inputs rounded as the user wants: W4A8 is 4-bit ints with int8 or fp8, W4A4 4-bit floats with
    fp4."""
    if not activations:
        return scheme
    if activations not in ACTIVATIONS:
        raise unknown_name("rounding of activations", activations, ACTIVATIONS)
    kind = ACTIVATIONS[activations].get((scheme.element, scheme.scale_type))
    if kind is None or scheme.activations == "llm_int8" or scheme.block_rows != 1:
        raise UserError(
            f"{name} does not go with --activations {activations}",
            "int8 and fp8 go with integers (gptq, rtn), fp4 with mxfp4 and nvfp4",
        )
    return replace(scheme, activations=kind)


def adjust(
    name: str, method: Method, bits: int | None, group_size: int | None, symmetric: bool | None, scaling: str
) -> Scheme:
    """The method's scheme with the user's choices, where the method allows them."""
    scheme = method.scheme
    if name == "fp8":
        scheme = FP8_SCALING[scaling or ("block" if group_size else "channel")]
    if bits is not None and bits != scheme.bits:
        if not method.free_bits:
            raise UserError(f"{name} has {scheme.bits} bits, not {bits}", "leave --bits out, or use gptq or rtn")
        scheme = replace(scheme, bits=bits)
    if group_size is not None and group_size < 0:
        raise UserError(f"groups of {group_size} weights cannot be", "give --group-size 0 for one scale per row")
    if group_size is not None and group_size != scheme.group_size:
        if not method.free_group:
            raise UserError(
                f"{name} has groups of {scheme.group_size or 'whole rows'}, not {group_size}", "leave --group-size out"
            )
        if name == "fp8":
            raise UserError(f"fp8 has blocks of 128 x 128, not {group_size}", "use --group-size 128, or leave it out")
        scheme = replace(scheme, group_size=group_size)
    if symmetric is not None and symmetric != scheme.symmetric:
        if not method.free_symmetry or (name == "hqq" and symmetric):
            raise UserError(
                f"{name} is always {'symmetric' if scheme.symmetric else 'asymmetric'}",
                "leave --symmetric/--asymmetric out",
            )
        scheme = replace(scheme, symmetric=symmetric)
    return scheme
