"""TensorRT-LLM: `trtllm-serve` with its PyTorch backend; what is no flag goes into a YAML file beside it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import yaml  # type: ignore[import-untyped]

from tokenmill.deploy.engines.base import WEIGHTS_FOLDER, Engine, Launch, Signals, checked_model
from tokenmill.deploy.serving import Serving
from tokenmill.errors import UserError

_FOLDER = "/etc/serving"
_MODELOPT = {"fp8": "fp8", "nvfp4": "nvfp4", "int4-g128": "int4_awq", "int8": "int8_sq"}  # what its own tool makes


class TensorRTLLM(Engine):
    name = "trtllm"
    planner_name = "trtllm"
    version = "1.2"
    image = "nvcr.io/nvidia/tensorrt-llm/release:1.2.0"
    signals = Signals(
        "/prometheus/metrics",
        "trtllm_num_requests_waiting",
        "trtllm_kv_cache_utilization",
        "trtllm_num_requests_running",
    )
    can_split = True

    def launch(self, serving: Serving, role: str = "") -> Launch:
        if serving.device.vendor != "nvidia" or not serving.on_gpu:
            raise UserError(f"TensorRT-LLM does not run on {serving.device.name}", "use --engine vllm or sglang")
        model, prepare = _model(serving)
        command = ["trtllm-serve", model, "--host", "0.0.0.0", "--port", str(self.port), "--backend", "pytorch"]
        command += ["--max_seq_len", str(serving.context), "--max_batch_size", str(serving.sequences_per_copy)]
        command += ["--max_num_tokens", str(serving.batch_tokens), "--tp_size", str(serving.group)]
        if serving.ep > 1:
            command += ["--ep_size", str(serving.ep)]
        command += ["--pp_size", str(serving.pp), "--extra_llm_api_options", f"{_FOLDER}/options.yaml"]
        return Launch(tuple(command), files={"options.yaml": yaml.safe_dump(_options(serving, role))}, prepare=prepare)

    def router(self, serving: Serving, prefill: Sequence[str], decode: Sequence[str]) -> tuple[str, Launch]:
        config = {
            "hostname": "0.0.0.0",
            "port": self.port,
            "backend": "pytorch",
            "context_servers": {"num_instances": len(prefill), "urls": [f"{host}:{self.port}" for host in prefill]},
            "generation_servers": {"num_instances": len(decode), "urls": [f"{host}:{self.port}" for host in decode]},
        }
        command = ("trtllm-serve", "disaggregated", "-c", f"{_FOLDER}/router.yaml")
        return self.image_for(serving), Launch(command, files={"router.yaml": yaml.safe_dump(config)})


def _model(serving: Serving) -> tuple[str, tuple[str, ...]]:
    if not serving.needs_quantizing:
        return serving.model, ()
    if serving.weights not in _MODELOPT:
        raise UserError(
            f"TensorRT-LLM cannot serve {serving.weights} weights of a {serving.stored} checkpoint",
            f"plan with --weights {', '.join(_MODELOPT)}",
        )
    path = f"{WEIGHTS_FOLDER}/{serving.name}-{serving.weights}"
    place, model = shlex.quote(path), shlex.quote(checked_model(serving.model))
    return path, (
        f"[ -e {place} ] || python3 hf_ptq.py --pyt_ckpt_path {model} --qformat {_MODELOPT[serving.weights]} "
        f"--export_path {place}  # examples/llm_ptq of NVIDIA's Model-Optimizer",
    )


def _options(serving: Serving, role: str) -> dict[str, Any]:
    if 8 < serving.kv_bits < 16 or serving.kv_bits < 4:
        raise UserError(f"TensorRT-LLM holds no {serving.kv_bits:g}-bit KV", "plan with --kv-cache-dtype fp8")
    names = {16: "auto", 8: "fp8", 4: "nvfp4"}
    cache: dict[str, Any] = {"dtype": names[round(serving.kv_bits)], "enable_block_reuse": True}
    cache["free_gpu_memory_fraction"] = round(serving.memory_share - 0.02, 2)  # of what the weights leave
    options: dict[str, Any] = {"kv_cache_config": cache, "return_perf_metrics": True, "enable_iter_perf_stats": True}
    if serving.data_parallel > 1:
        options["enable_attention_dp"] = True
    if role:
        options["cache_transceiver_config"] = {"backend": "NIXL"}
    if role == "prefill":
        options["disable_overlap_scheduler"] = True  # a context server must not free pages that are being sent
    return options
