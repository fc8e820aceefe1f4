"""Quantization methods by name. A name stands for a list of steps: transforms, then one solver. Add one: a file here
and a line in a table."""

from tokenmill.registry import Registry

TRANSFORMS = Registry(
    "transform",
    {
        "smoothquant": "tokenmill.quantize.methods.smoothquant:SmoothQuant",
        "awq": "tokenmill.quantize.methods.awq:Awq",
        "omniquant": "tokenmill.quantize.methods.omniquant:OmniQuant",
        "magnitude": "tokenmill.quantize.methods.magnitude:Magnitude",
        "wanda": "tokenmill.quantize.methods.wanda:Wanda",
        "sparsegpt": "tokenmill.quantize.methods.sparsegpt:SparseGpt",
        "rotation": "tokenmill.quantize.methods.rotation:Rotation",
        "spinquant": "tokenmill.quantize.methods.spinquant:SpinQuant",
    },
)

SOLVERS = Registry(
    "solver",
    {
        "rtn": "tokenmill.quantize.methods.rtn:RoundToNearest",
        "gptq": "tokenmill.quantize.methods.gptq:Gptq",
        "autoround": "tokenmill.quantize.methods.autoround:AutoRound",
        "qat": "tokenmill.quantize.methods.qat:Qat",
        "hqq": "tokenmill.quantize.methods.hqq:Hqq",
        "turboquant": "tokenmill.quantize.methods.turboquant:TurboQuant",
        "fp8": "tokenmill.quantize.methods.fp8:Fp8",
        "mx": "tokenmill.quantize.methods.mx:Microscaling",
        "nvfp4": "tokenmill.quantize.methods.nvfp4:NvFp4",
        "nf4": "tokenmill.quantize.methods.nf4:NormalFloat",
        "float": "tokenmill.quantize.methods.floats:Floats",
        "llm_int8": "tokenmill.quantize.methods.llm_int8:LlmInt8",
    },
)
