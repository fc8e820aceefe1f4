"""SGLang: `sglang.launch_server`. Split pools hand KV over with NIXL, behind the SGLang router."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.deploy.engines.base import COMPRESSED_TENSORS, Engine, Launch, Signals, quantized
from tokenmill.deploy.serving import Serving
from tokenmill.errors import UserError

_BOOTSTRAP_PORT = 8998
_ONLINE = {"fp8": "fp8"}
_NODES_PORT = 20000


class SGLang(Engine):
    name = "sglang"
    planner_name = "sglang"
    version = "0.5"
    image = "lmsysorg/sglang:v0.5.18"
    port = 30000
    health = "/health_generate"  # makes a token, or sees others being made
    health_sees_progress = True
    key_variable, key_flag = "SGLANG_API_KEY", "--api-key"  # guards all but health and metrics
    signals = Signals(
        "/metrics",
        "sglang:num_queue_reqs",
        "sglang:token_usage",
        "sglang:num_running_reqs",
        "sglang:generation_tokens_total",
    )
    can_split = True

    def launch(self, serving: Serving, role: str = "") -> Launch:
        online = serving.needs_quantizing and serving.weights in _ONLINE
        model, prepare = (serving.model, ()) if online else quantized(serving, COMPRESSED_TENSORS, self.name)
        command = ["python3", "-m", "sglang.launch_server", "--model-path", model]
        command += ["--host", "0.0.0.0", "--port", str(self.port), "--served-model-name", serving.name]
        command += ["--context-length", str(serving.context), "--max-running-requests", str(serving.max_sequences)]
        command += ["--chunked-prefill-size", str(serving.batch_tokens)]
        command += ["--mem-fraction-static", f"{serving.memory_share - 0.04:.2f}"]  # graphs lie outside its share
        command += ["--kv-cache-dtype", _kv_dtype(serving), "--enable-metrics"]
        if serving.group > 1:
            command += ["--tp-size", str(serving.group)]
        if serving.data_parallel > 1:
            command += ["--dp-size", str(serving.data_parallel), "--enable-dp-attention"]
        if serving.ep > 1:
            command += ["--ep-size", str(serving.ep)]
        if serving.pp > 1:
            command += ["--pp-size", str(serving.pp)]
        if online:
            command += ["--quantization", _ONLINE[serving.weights]]
        if role:
            command += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", "nixl"]
        if role == "prefill":
            command += ["--disaggregation-bootstrap-port", str(_BOOTSTRAP_PORT)]
        return Launch(tuple(command), prepare=prepare)

    def node_arguments(self, nodes: int, is_leader: bool) -> tuple[str, ...]:  # noqa: ARG002
        meeting = f"$(LWS_LEADER_ADDRESS):{_NODES_PORT}"
        return ("--nnodes", str(nodes), "--node-rank", "$(LWS_WORKER_INDEX)", "--dist-init-addr", meeting)

    def router(self, serving: Serving, prefill: Sequence[str], decode: Sequence[str]) -> tuple[str, Launch]:
        command = ["python3", "-m", "sglang_router.launch_router", "--pd-disaggregation"]
        for host in prefill:
            command += ["--prefill", f"http://{host}:{self.port}", str(_BOOTSTRAP_PORT)]
        for host in decode:
            command += ["--decode", f"http://{host}:{self.port}"]
        command += ["--host", "0.0.0.0", "--port", str(self.port)]
        return self.image_for(serving), Launch(tuple(command))


def _kv_dtype(serving: Serving) -> str:
    if serving.kv_bits >= 16:
        return "auto"
    if serving.kv_bits >= 8:
        return "fp8_e4m3" if serving.device.supports("fp8") else "fp8_e5m2"
    if serving.device.supports("fp4"):
        return "fp4_e2m1"
    raise UserError(f"sglang holds no 4-bit KV on {serving.device.name}", "plan with --kv-cache-dtype fp8")
