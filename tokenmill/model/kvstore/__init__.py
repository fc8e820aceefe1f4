"""KV dtypes by name (`--kv-cache-dtype`). Add one: a file here and a line in the table."""

from tokenmill.registry import Registry

KV_STORES = Registry(
    "KV cache dtype",
    {
        "float32": "tokenmill.model.kvstore.dense:Float32Store",
        "float16": "tokenmill.model.kvstore.dense:Float16Store",
        "bfloat16": "tokenmill.model.kvstore.dense:BFloat16Store",
        "fp8": "tokenmill.model.kvstore.float8:Float8Store",
    },
)
