"""llama.cpp's own HTTP server from the package xllamacpp, as a program that takes the flags of llama-server.

    python -m tokenmill.optimize.rivals.llamacpp_native --model FILE.gguf --port 8080 ...

Only the flags that `deploy` writes are known; any other is refused. Started by llamacpp.py.
"""

from __future__ import annotations

import argparse
import signal
from typing import Any


def main() -> None:
    import xllamacpp  # type: ignore[import-not-found, import-untyped, unused-ignore]

    flags = _parse()
    params = xllamacpp.CommonParams()
    params.model.path = flags.model
    params.hostnames = [flags.host]
    params.port = flags.port
    params.model_alias = {flags.alias} if flags.alias else set()
    params.n_parallel, params.n_ctx, params.n_batch = flags.parallel, flags.ctx_size, flags.batch_size
    params.n_ubatch = min(params.n_ubatch, flags.batch_size)
    params.endpoint_metrics = flags.metrics
    params.cache_type_k, params.cache_type_v = (_ggml_type(xllamacpp, each) for each in (flags.key, flags.value))
    kinds = xllamacpp.llama_flash_attn_type
    params.flash_attn_type = {
        "on": kinds.LLAMA_FLASH_ATTN_TYPE_ENABLED,
        "off": kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED,
        "auto": kinds.LLAMA_FLASH_ATTN_TYPE_AUTO,
    }[flags.flash_attn]
    if flags.n_gpu_layers is not None:
        params.n_gpu_layers = flags.n_gpu_layers
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="llama.cpp's server, from xllamacpp.", allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--alias", default="")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--ctx-size", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--cache-type-k", dest="key", default="f16")
    parser.add_argument("--cache-type-v", dest="value", default="f16")
    parser.add_argument("--flash-attn", choices=("on", "off", "auto"), default="auto")
    parser.add_argument("--n-gpu-layers", type=int)
    return parser.parse_args()


def _ggml_type(library: Any, name: str) -> Any:
    return getattr(library.ggml_type, f"GGML_TYPE_{name.upper()}")


if __name__ == "__main__":
    main()
