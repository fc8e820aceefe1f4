"""This engine: `tokenmill serve`, on CPU machines or NVIDIA GPUs; the ranks of a replica share one node.

Split pools: who decodes fetches pages from who computed the prompt, and asks for that itself, so its router knows only
the pool that decodes. Its health check fails when no tokens are generated; its images are built from the repository's
Dockerfiles.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill import __version__
from tokenmill.deploy.engines.base import (
    COMPRESSED_TENSORS,
    GGUF_TYPES,
    METRICS_KEY,
    PEER_KEY,
    Engine,
    Launch,
    Signals,
    quantized,
)
from tokenmill.deploy.serving import SHUTDOWN_SECONDS, Serving
from tokenmill.errors import UserError
from tokenmill.model.kvstore import KV_STORES

_KV_NAMES = {16: ("bfloat16",), 8: ("fp8", "int8"), 4: ("int4",)}
_AT_LOAD = {
    "fp8": "fp8"
}  # --quantization: one scale per channel needs no calibration; groups of four bits are made first
_MADE_FOR_GPU = {name: line for name, line in COMPRESSED_TENSORS.items() if name != "nvfp4"} | GGUF_TYPES
_CPU_BATCH_TOKENS = 2048
_PAGES_PORT = 7800


class Tokenmill(Engine):
    name = "tokenmill"
    planner_name = "tokenmill"
    version = __version__
    image = f"tokenmill:{__version__}-cuda"  # built by the user: Dockerfile.cuda and Dockerfile of the repository
    cpu_image = f"tokenmill:{__version__}"
    health_sees_progress = True
    ready, live = "/readyz", "/livez"
    keys_file_flag = "--api-keys-file"
    key_variable = "TOKENMILL_API_KEY"
    metrics_need_key = True
    max_tp = 1  # unless asked for
    can_split = can_route = True
    signals = Signals(
        "/metrics",
        "tokenmill_requests_waiting",
        "tokenmill_kv_cache_usage_ratio",
        "tokenmill_requests_running",
        "tokenmill_generation_tokens_total",
    )

    def launch(self, serving: Serving, role: str = "") -> Launch:
        _check_device(serving)
        gpu = serving.on_gpu
        at_load = _AT_LOAD.get(serving.weights, "") if gpu and serving.needs_quantizing else ""
        recipes = _MADE_FOR_GPU if gpu else GGUF_TYPES
        model, prepare = (serving.model, ()) if at_load else quantized(serving, recipes, self.name)
        command = ["tokenmill", "serve", model, "--device", "cuda" if gpu else "cpu"]
        command += ["--host", "0.0.0.0", "--port", str(self.port)]
        command += ["--served-model-name", serving.name, "--context", str(serving.context)]
        tokens = serving.batch_tokens if gpu else min(_CPU_BATCH_TOKENS, serving.batch_tokens)
        command += ["--concurrency", str(serving.max_sequences), "--batch-tokens", str(tokens)]
        command += ["--kv-cache-dtype", _kv_name(serving)]
        if gpu:
            command += ["--gpu-memory-utilization", f"{serving.memory_share:g}"]
        if at_load:
            command += ["--quantization", at_load]
        if serving.tp > 1:
            command += ["--tensor-parallel-size", str(serving.tp)]
        if serving.pp > 1:
            command += ["--pipeline-parallel-size", str(serving.pp)]
        if serving.ep > 1:
            command.append("--expert-parallel")
        if role:
            command += ["--role", role]
        if role == "prefill":
            command += ["--kv-listen", f"$(POD_IP):{_PAGES_PORT}"]
        command += ["--shutdown-timeout", str(SHUTDOWN_SECONDS)]
        secrets = (("TOKENMILL_PREFILL_API_KEY", PEER_KEY),) if role == "decode" else ()
        return Launch(tuple(command), prepare=prepare, notes=(self._image_note(serving),), secrets=secrets)

    def peers(self, prefill: Sequence[str]) -> tuple[str, ...]:
        words: list[str] = []
        for host in prefill:
            words += ["--kv-peer", f"{host}:{_PAGES_PORT}", "--prefill-url", f"http://{host}:{self.port}"]
        return tuple(words)

    def router(self, serving: Serving, prefill: Sequence[str], decode: Sequence[str]) -> tuple[str, Launch]:  # noqa: ARG002
        command = ["tokenmill", "route", "--host", "0.0.0.0", "--port", str(self.port)]
        for host in decode:
            command += ["--replica", f"http://{host}:{self.port}"]
        command += ["--shutdown-timeout", str(SHUTDOWN_SECONDS)]
        secrets = (("TOKENMILL_REPLICA_KEY", PEER_KEY), ("TOKENMILL_ADMIN_KEY", METRICS_KEY))
        return self.cpu_image, Launch(tuple(command), secrets=secrets)

    def _image_note(self, serving: Serving) -> str:
        dockerfile = "Dockerfile.cuda" if serving.on_gpu else "Dockerfile"
        return f"containers need the image: docker build -f {dockerfile} -t {self.image_for(serving)} ."


def _check_device(serving: Serving) -> None:
    device = serving.device
    runs = device.kind in ("cpu", "soc") or (serving.on_gpu and device.vendor == "nvidia")
    if not runs:
        raise UserError(
            f"tokenmill serves on CPUs and NVIDIA GPUs, not on {device.name}",
            "use --engine vllm, sglang or trtllm there",
        )
    if serving.data_parallel > 1:
        raise UserError(
            f"a replica of tokenmill has one copy of attention, not {serving.data_parallel}",
            "plan for more replicas instead, or use --engine vllm, sglang or trtllm",
        )
    if serving.on_gpu and serving.devices > 1:
        raise UserError(
            f"a replica of tokenmill has one GPU, not {device.name} x{serving.devices}: its ranks are processes of one "
            "CPU host",
            "plan with --tp 1 (more devices are more replicas), or use --engine vllm, sglang or trtllm",
        )


def _kv_name(serving: Serving) -> str:
    """The registered store of this width. FP8 is chosen where the device multiplies it, else INT8."""
    names = _KV_NAMES.get(round(serving.kv_bits), ())
    if serving.on_gpu and not serving.device.supports("fp8"):
        names = tuple(reversed(names))
    for name in names:
        if name in KV_STORES:
            return name
    raise UserError(f"tokenmill holds no {serving.kv_bits:g}-bit KV cache", "plan with --kv-cache-dtype bf16")
