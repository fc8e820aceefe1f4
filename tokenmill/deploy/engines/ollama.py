"""Ollama: a daemon that is set up by environment variables. For development: no metrics, so no autoscaling."""

from __future__ import annotations

import shlex

from tokenmill.deploy.engines.base import GGUF_TYPES, WEIGHTS_FOLDER, Engine, Launch, checked_model, quantized
from tokenmill.deploy.serving import Serving
from tokenmill.errors import UserError

_CACHE_TYPES = {16: "f16", 8: "q8_0", 4: "q4_0"}
_MAX_PARALLEL = 4


class Ollama(Engine):
    name = "ollama"
    planner_name = "llama.cpp"
    version = "0.13"
    image = "ollama/ollama:0.13.0"
    port = 11434
    health = "/api/version"
    health_tool = "ollama list"

    def launch(self, serving: Serving, role: str = "") -> Launch:
        if role:
            self.router(serving, (), ())
        model, prepare = quantized(serving, GGUF_TYPES, self.name)
        kind = _CACHE_TYPES.get(round(serving.kv_bits))
        if kind is None:
            raise UserError(f"Ollama holds no {serving.kv_bits:g}-bit KV", "plan with --kv-cache-dtype bf16 or int8")
        parallel = min(_MAX_PARALLEL, serving.max_sequences)
        environment = (
            ("OLLAMA_HOST", f"0.0.0.0:{self.port}"),
            ("OLLAMA_NUM_PARALLEL", str(parallel)),
            ("OLLAMA_CONTEXT_LENGTH", str(serving.context)),
            ("OLLAMA_FLASH_ATTENTION", "1"),
            ("OLLAMA_KV_CACHE_TYPE", kind),
            ("OLLAMA_KEEP_ALIVE", "-1"),
            ("OLLAMA_MODELS", f"{WEIGHTS_FOLDER}/ollama"),
        )
        word = shlex.quote(checked_model(model))
        if model.endswith(".gguf"):
            make = (f"printf 'FROM %s\\n' {word} > Modelfile", f"ollama create {serving.name} -f Modelfile")
        else:
            make = (f"ollama pull {word}", f"ollama cp {word} {serving.name}")
        notes = (f"{parallel} requests at once: a team needs llamacpp, vllm or tokenmill",)
        return Launch(("ollama", "serve"), environment, prepare=(*prepare, *make), notes=notes)
