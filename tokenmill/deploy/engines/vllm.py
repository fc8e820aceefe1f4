"""vLLM: `vllm serve`. Split pools hand KV over with NIXL, behind vllm-router."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tokenmill.deploy.engines.base import COMPRESSED_TENSORS, Engine, Launch, Signals, quantized
from tokenmill.deploy.serving import Serving

_ONLINE = {"fp8": "fp8_per_tensor", "fp8-block": "fp8_per_block", "int8-weight-only": "int8_per_channel_weight_only"}
_SIDE_CHANNEL_PORT = 5600


class Vllm(Engine):
    name = "vllm"
    planner_name = "vllm"
    version = "0.32"
    image = "vllm/vllm-openai:v0.32.0"
    cpu_image = "vllm/vllm-openai-cpu:v0.32.0"
    signals = Signals(
        "/metrics",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:num_requests_running",
        "vllm:iteration_tokens_total_sum",
    )
    can_split = True
    key_variable = "VLLM_API_KEY"  # guards /v1; health and metrics stay open

    def launch(self, serving: Serving, role: str = "") -> Launch:
        online = serving.needs_quantizing and serving.weights in _ONLINE
        model, prepare = (serving.model, ()) if online else quantized(serving, COMPRESSED_TENSORS, self.name)
        command = ["vllm", "serve", model, "--host", "0.0.0.0", "--port", str(self.port)]
        command += ["--served-model-name", serving.name, "--max-model-len", str(serving.context)]
        command += ["--max-num-seqs", str(serving.sequences_per_copy)]
        command += ["--max-num-batched-tokens", str(serving.batch_tokens)]
        command += ["--kv-cache-dtype", kv_dtype(serving)]
        if serving.on_gpu:
            command += ["--gpu-memory-utilization", f"{serving.memory_share:g}"]
        if serving.tp > 1:
            command += ["--tensor-parallel-size", str(serving.tp)]
        if serving.pp > 1:
            command += ["--pipeline-parallel-size", str(serving.pp)]
        if serving.data_parallel > 1:
            command += ["--data-parallel-size", str(serving.data_parallel)]
        if serving.ep > 1:
            command.append("--enable-expert-parallel")
        if online:  # plain `fp8` is refused on an unquantized model since 0.32
            command += ["--quantization", _ONLINE[serving.weights]]
        environment: list[tuple[str, str]] = []
        if role:
            kind = "kv_producer" if role == "prefill" else "kv_consumer"
            transfer = {"kv_connector": "NixlConnector", "kv_role": kind, "kv_load_failure_policy": "fail"}
            command += ["--kv-transfer-config", json.dumps(transfer, separators=(",", ":"))]
            environment += [
                ("VLLM_NIXL_SIDE_CHANNEL_HOST", "$(POD_IP)"),
                ("VLLM_NIXL_SIDE_CHANNEL_PORT", str(_SIDE_CHANNEL_PORT)),
            ]
        return Launch(tuple(command), tuple(environment), prepare=prepare)

    def node_arguments(self, nodes: int, is_leader: bool) -> tuple[str, ...]:
        found = ("--nnodes", str(nodes), "--node-rank", "$(LWS_WORKER_INDEX)", "--master-addr", "$(LWS_LEADER_ADDRESS)")
        return found if is_leader else (*found, "--headless")

    def router(self, serving: Serving, prefill: Sequence[str], decode: Sequence[str]) -> tuple[str, Launch]:
        command = ["vllm-router", "--policy", "consistent_hash", "--vllm-pd-disaggregation"]
        for host in prefill:
            command += ["--prefill", f"http://{host}:{self.port}"]
        for host in decode:
            command += ["--decode", f"http://{host}:{self.port}"]
        command += ["--host", "0.0.0.0", "--port", str(self.port), "--intra-node-data-parallel-size", "1"]
        note = f"the router of {serving.name} must be built from vllm-project/router; pin the image that you built"
        return "vllm/vllm-router:v0.1.15", Launch(tuple(command), notes=(note,))


def kv_dtype(serving: Serving) -> str:
    """`int8` is no value of the flag; fp8 needs hardware that multiplies it, per-token int8 does not."""
    if serving.kv_bits >= 16:
        return "auto"
    if serving.kv_bits >= 8:
        return "fp8" if serving.device.supports("fp8") else "int8_per_token_head"
    return "int4_per_token_head"
