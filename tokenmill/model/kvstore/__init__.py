"""KV dtypes by name (`--kv-cache-dtype`). Add one: a file here and a line in the table.

Names that vLLM users know mean what they mean there; several names may be one store.
"""

from tokenmill.registry import Registry

_HERE = "tokenmill.model.kvstore"
KV_STORES = Registry(
    "KV cache dtype",
    {
        "float32": f"{_HERE}.dense:Float32Store",
        "float16": f"{_HERE}.dense:Float16Store",
        "bfloat16": f"{_HERE}.dense:BFloat16Store",
        "fp8": f"{_HERE}.float8:Float8Store",
        "fp8_e4m3": f"{_HERE}.float8:Float8Store",
        "fp8_e5m2": f"{_HERE}.float8:Float8E5M2Store",
        "fp8_per_token_head": f"{_HERE}.float8:Float8PerTokenHeadStore",
        "int8": f"{_HERE}.int8:Int8Store",
        "int8_per_token_head": f"{_HERE}.int8:Int8PerTokenHeadStore",
        "int4": f"{_HERE}.int4:Int4Store",
        "int4_per_token_head": f"{_HERE}.int4:Int4PerTokenHeadStore",
        "kivi4": f"{_HERE}.kivi:Kivi4Store",
        "kivi2": f"{_HERE}.kivi:Kivi2Store",
        "kvquant_k3v4": f"{_HERE}.kvquant:KVQuantK3V4Store",
        "kvquant3": f"{_HERE}.kvquant:KVQuant3Store",
        "turboquant4": f"{_HERE}.turboquant:TurboQuant4Store",
        "turboquant3": f"{_HERE}.turboquant:TurboQuant3Store",
        "turboquant2": f"{_HERE}.turboquant:TurboQuant2Store",
        "turboquant4_prod": f"{_HERE}.turboquant:TurboQuant4ProductStore",
        "turboquant3_prod": f"{_HERE}.turboquant:TurboQuant3ProductStore",
        "turboquant2_prod": f"{_HERE}.turboquant:TurboQuant2ProductStore",
        "turboquant_k8v4": f"{_HERE}.turboquant_vllm:TurboQuantK8V4Store",
        "turboquant_4bit_nc": f"{_HERE}.turboquant_vllm:TurboQuant4BitStore",
        "turboquant_k3v4_nc": f"{_HERE}.turboquant_vllm:TurboQuantK3V4Store",
        "turboquant_3bit_nc": f"{_HERE}.turboquant_vllm:TurboQuant3BitStore",
    },
)
