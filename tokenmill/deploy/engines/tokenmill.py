"""This engine: `tokenmill serve`. One CPU machine per replica; the health check fails when no tokens are generated."""

from __future__ import annotations

from tokenmill import __version__
from tokenmill.deploy.engines.base import GGUF_TYPES, Engine, Launch, Signals, quantized
from tokenmill.deploy.serving import SHUTDOWN_SECONDS, Serving
from tokenmill.errors import UserError
from tokenmill.model.kvstore import KV_STORES

_KV_NAMES = {16: ("bfloat16",), 8: ("fp8", "int8"), 4: ("int4",)}


class Tokenmill(Engine):
    name = "tokenmill"
    planner_name = "tokenmill"
    version = __version__
    image = f"tokenmill:{__version__}"  # built by the user from the repository's Dockerfile
    health_sees_progress = True
    ready, live = "/readyz", "/livez"
    keys_file_flag = "--api-keys-file"
    key_variable = "TOKENMILL_API_KEY"
    metrics_need_key = True
    signals = Signals(
        "/metrics",
        "tokenmill_requests_waiting",
        "tokenmill_kv_cache_usage_ratio",
        "tokenmill_requests_running",
        "tokenmill_generation_tokens_total",
    )

    def launch(self, serving: Serving, role: str = "") -> Launch:
        if role:
            self.router(serving, (), ())
        if serving.devices > 1 or serving.device.kind not in ("cpu", "soc"):
            raise UserError(
                f"tokenmill serves on one CPU machine, not on {serving.device.name} x{serving.devices}",
                "use --engine vllm, sglang or trtllm there, or plan for a CPU with --gpu",
            )
        model, prepare = quantized(serving, GGUF_TYPES, self.name)
        command = ["tokenmill", "serve", model, "--host", "0.0.0.0", "--port", str(self.port)]
        command += ["--served-model-name", serving.name, "--context", str(serving.context)]
        command += ["--concurrency", str(serving.max_sequences), "--batch-tokens", str(min(2048, serving.batch_tokens))]
        command += ["--kv-cache-dtype", _kv_name(serving.kv_bits)]
        command += ["--shutdown-timeout", str(SHUTDOWN_SECONDS)]
        return Launch(tuple(command), prepare=prepare)


def _kv_name(bits: float) -> str:
    """The store of this width that is registered."""
    for name in _KV_NAMES.get(round(bits), ()):
        if name in KV_STORES:
            return name
    raise UserError(f"tokenmill holds no {bits:g}-bit KV cache", "plan with --kv-cache-dtype bf16")
