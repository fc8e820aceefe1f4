"""llama.cpp: `llama-server` with a GGUF file. CPUs, Apple, edge; one machine per replica."""

from __future__ import annotations

from tokenmill.deploy.engines.base import GGUF_TYPES, Engine, Launch, Signals, quantized
from tokenmill.deploy.serving import Serving
from tokenmill.errors import UserError

_CACHE_TYPES = {16: "f16", 8: "q8_0", 4: "q4_0"}


class LlamaCpp(Engine):
    name = "llamacpp"
    planner_name = "llama.cpp"
    version = "b21e4de (2026-08)"
    image = "ghcr.io/ggml-org/llama.cpp:server-cuda"
    cpu_image = "ghcr.io/ggml-org/llama.cpp:server"
    port = 8080
    health_tool = "curl"  # the image has it, and no Python
    key_variable = "LLAMA_API_KEY"
    metrics_need_key = True
    signals = Signals(
        "/metrics",
        "llamacpp:requests_deferred",
        running="llamacpp:requests_processing",
        tokens="llamacpp:n_decode_total",
    )

    def launch(self, serving: Serving, role: str = "") -> Launch:
        if role:
            self.router(serving, (), ())
        model, prepare = quantized(serving, GGUF_TYPES, self.name)
        slots = min(serving.max_sequences, max(1, serving.users))  # every slot takes its context at start
        command = ["llama-server", "--model", model, "--host", "0.0.0.0", "--port", str(self.port)]
        command += ["--alias", serving.name, "--parallel", str(slots), "--ctx-size", str(slots * serving.context)]
        command += ["--batch-size", str(min(2048, serving.batch_tokens)), "--metrics"]
        kind = _CACHE_TYPES.get(round(serving.kv_bits))
        if kind is None:
            raise UserError(f"llama.cpp holds no {serving.kv_bits:g}-bit KV", "plan with --kv-cache-dtype bf16 or int8")
        command += ["--cache-type-k", kind, "--cache-type-v", kind, "--flash-attn", "on"]
        if serving.on_gpu or serving.device.kind == "soc":
            command += ["--n-gpu-layers", "999"]
        if serving.devices > 1:
            command += ["--split-mode", "row" if serving.tp > 1 else "layer"]
        return Launch(tuple(command), prepare=prepare)
