"""Options of other engines, by the name their users type: what each means here, or why it is refused and what to use.

One table for command lines (cli/peer_flags.py), config files and Python keywords (config.py). An entry translates a
value into our options; an empty result means that this engine always behaves so. Knows no option of ours but by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.errors import UserError
from tokenmill.log import get_logger

_log = get_logger(__name__)
Translation = Callable[[str, Any], Mapping[str, Any]]  # (the peer's name, value) -> our options


@dataclass(frozen=True, slots=True)
class PeerOption:
    engine: str
    translate: Translation
    is_switch: bool = False  # a flag without a value, with a --no- form
    short: tuple[str, ...] = ()  # further spellings on the command line, with their dashes
    takes_several: bool = False  # all words up to the next flag are its values


def flag_text(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def means(ours: str) -> Translation:
    return lambda _name, value: {ours: value}


def inverted(ours: str) -> Translation:
    return lambda _name, value: {ours: not _is_true(value)}


def refused(reason: str, remedy: str) -> Translation:
    def translation(name: str, value: Any) -> Mapping[str, Any]:
        if value is None or value is False:  # the peer's own default, as configurations written out in full have it
            return {}
        raise UserError(f"{flag_text(name)} is an option of another engine: {reason}", remedy)

    return translation


def only(accepted: tuple[Any, ...], reason: str, remedy: str) -> Translation:
    """These values describe what this engine does anyway; others are refused."""
    texts = {str(each).lower() for each in accepted}

    def translation(name: str, value: Any) -> Mapping[str, Any]:
        if value is None or str(value).lower() in texts:
            return {}
        raise UserError(f"{flag_text(name)} {value}: {reason}", remedy)

    return translation


def without_effect(reason: str) -> Translation:
    def translation(name: str, _value: Any) -> Mapping[str, Any]:
        _log.info("%s has no effect: %s", flag_text(name), reason)
        return {}

    return translation


def _is_true(value: Any) -> bool:
    return value not in (False, None) and str(value).lower() not in ("0", "false", "no", "off")


def _gibibytes(ours: str) -> Translation:
    def translation(name: str, value: Any) -> Mapping[str, Any]:
        try:
            size = float(value)
            if not 0 <= size < 2**20:
                raise ValueError
        except (ValueError, TypeError):
            raise UserError(f"{flag_text(name)} is '{value}'", "give a number of GiB") from None
        return {ours: int(size * 2**30)} if size else {}

    return translation


def _eager(_name: str, value: Any) -> Mapping[str, Any]:
    return {"executor": "eager"} if _is_true(value) else {}


def _llama_kv_type(name: str, value: Any) -> Mapping[str, Any]:
    known = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}
    if not isinstance(value, str) or value not in known:
        raise UserError(
            f"{flag_text(name)} {value}: KV pages are not held in GGUF types", "use --kv-cache-dtype int8 or int4"
        )
    return {"kv_cache_dtype": known[value]}


def _load_format(name: str, value: Any) -> Mapping[str, Any]:
    if value in ("auto", "safetensors", "gguf", "hf"):
        return {}  # recognised by content
    if value == "dummy":
        return {"load_format": "dummy"}
    raise UserError(
        f"{flag_text(name)} {value}: this engine reads safetensors and GGUF", "convert the checkpoint first"
    )


def _quantization(name: str, value: Any) -> Mapping[str, Any]:
    if value is None or str(value).lower() in ("", "auto", "fp8", "int4"):
        return {"quantization": value}
    online = str(value).startswith(("fp8", "int8", "bitsandbytes", "mxfp"))
    raise UserError(
        f"{flag_text(name)} {value}: " + ("weights are rounded to fp8 or int4 here" if online else _BY_CONTENT),
        "use --quantization fp8 or int4" if online else "leave it out; `tokenmill inspect MODEL` shows the format",
    )


def _speculation(name: str, value: Any) -> Mapping[str, Any]:
    """vLLM's JSON object, such as {"method": "ngram", "num_speculative_tokens": 5}."""
    try:
        settings = dict(json.loads(value) if isinstance(value, str) else value or {})
    except (ValueError, TypeError):
        raise UserError(f"{flag_text(name)} is not a JSON object", "use --speculate and --draft-tokens") from None
    method, model = settings.pop("method", None), settings.pop("model", None)
    found: dict[str, Any] = {}
    if "num_speculative_tokens" in settings:
        found["draft_tokens"] = settings.pop("num_speculative_tokens")
    if method in ("ngram", "suffix"):
        found["speculate"] = method
    elif method in (None, "draft_model") and model:
        found["speculate"] = f"draft:{model}"
    elif method in ("eagle", "eagle3") and model:
        found["speculate"] = f"head:{model}"
    elif isinstance(method, str) and method.endswith("mtp"):  # vLLM has names by model type
        found["speculate"] = "mtp"
    elif method is not None:
        raise UserError(
            f"{flag_text(name)}: method '{method}' is not available here",
            "use --speculate head:DIR (an EAGLE head, or one of `tokenmill train-draft`), ngram, suffix or draft:MODEL",
        )
    if settings:
        raise UserError(
            f"{flag_text(name)}: {', '.join(sorted(settings))} cannot be set here", "leave it out; see --speculate"
        )
    return found


def _spec_method(name: str, value: Any) -> Mapping[str, Any]:
    return _speculation(name, {"method": value})


def _lora_modules(name: str, value: Any) -> Mapping[str, Any]:
    """NAME=DIR, vLLM's JSON object of one adapter, several of them, or a mapping of names to directories."""
    if isinstance(value, Mapping) and not {"name", "path"} <= set(value):
        return {"lora": tuple(f"{adapter}={path}" for adapter, path in value.items())}
    adapters = []
    given = [value] if isinstance(value, str | Mapping) else value or ()
    for each in given if isinstance(given, list | tuple) else (given,):
        try:
            found = json.loads(each) if isinstance(each, str) and each.startswith("{") else each
            adapters.append(f"{found['name']}={found['path']}" if not isinstance(found, str) else found)
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{flag_text(name)} is not NAME=DIR: {each}", "write it like sql=adapters/sql") from None
    return {"lora": tuple(adapters)}


def _gpu_layers(name: str, value: Any) -> Mapping[str, Any]:
    """llama.cpp: 0 keeps the model on the CPU; all layers (or more) is a GPU."""
    text = str(value).lower()
    if text in ("0", "none"):
        return {"device": "cpu"}
    if text in ("all", "auto", "-1") or (text.isdigit() and int(text) >= 99):
        return {} if text in ("auto", "-1") else {"device": "cuda"}
    raise UserError(f"{flag_text(name)} {value}: a model runs on one device as a whole", "use --device cuda or cpu")


def _switch(engine: str, translation: Translation) -> PeerOption:
    return PeerOption(engine, translation, is_switch=True)


_BY_CONTENT = "formats of quantized checkpoints are recognised by their content"
_NO_PARALLEL = "ranks share a model evenly, and its adapters as they share its matrices"
_USE_DEPLOY = "use --quantization or a smaller model, or `tokenmill deploy --engine vllm` for several devices"
_NO_MEDIA = "this version takes text only"
_OWN_CHOICE = "this engine chooses it by itself and says what it chose"
_SEE_INSPECT = "leave it out; `tokenmill inspect MODEL` shows the choice"

_VLLM: dict[str, PeerOption] = {
    # What we have under another name.
    "max_model_len": PeerOption("vLLM", means("context")),
    "max_num_seqs": PeerOption("vLLM", means("concurrency")),
    "max_num_batched_tokens": PeerOption("vLLM", means("batch_tokens")),
    "block_size": PeerOption("vLLM", means("page_size")),
    "kv_cache_memory_bytes": PeerOption("vLLM", means("memory")),
    "enable_prefix_caching": _switch("vLLM", means("prefix_caching")),
    "scheduling_policy": PeerOption("vLLM", means("scheduling")),
    "num_speculative_tokens": PeerOption("vLLM", means("draft_tokens")),
    "spec_tokens": PeerOption("vLLM", means("draft_tokens")),
    "spec_method": PeerOption("vLLM", _spec_method),
    "spec_model": PeerOption("vLLM", lambda _name, value: {"speculate": f"draft:{value}"}),
    "speculative_model": PeerOption("vLLM", lambda _name, value: {"speculate": f"draft:{value}"}),
    "speculative_config": PeerOption("vLLM", _speculation, short=("-sc",)),
    "swap_space": PeerOption("vLLM", _gibibytes("kv_host_memory")),
    "kv_offloading_size": PeerOption("vLLM", _gibibytes("kv_host_memory")),
    "enforce_eager": _switch("vLLM", _eager),
    "enable_sleep_mode": _switch("vLLM", only((True, False), "a model can always sleep", "leave it out")),
    "allowed_origins": PeerOption("vLLM", means("cors_origin")),
    "h11_max_incomplete_event_size": PeerOption("vLLM", means("max_header_bytes")),
    "h11_max_header_count": PeerOption("vLLM", means("max_header_count")),
    "ssl_ciphers": PeerOption(
        "vLLM", refused("cipher suites are those of the TLS library, from TLS 1.2", "configure OpenSSL, or use a proxy")
    ),
    "enable_ssl_refresh": _switch("vLLM", only((False,), "certificates are read again on SIGHUP", "send SIGHUP")),
    "max_num_queued_reqs": PeerOption("vLLM", means("max_queued_requests")),
    "max_num_queued_tokens": PeerOption("vLLM", means("max_queued_tokens")),
    "disable_uvicorn_access_log": _switch("vLLM", inverted("access_log")),
    # What this engine always does.
    "enable_chunked_prefill": _switch(
        "vLLM", only((True,), "prompts are always computed in chunks", "set the chunk with --batch-tokens")
    ),
    "async_scheduling": _switch("vLLM", only((True,), "the next step is always scheduled ahead", "leave it out")),
    "enable_auto_tool_choice": _switch(
        "vLLM", only((True,), "tools are offered where a request has them", "leave tools out of the request")
    ),
    "disable_log_stats": _switch("vLLM", without_effect("statistics cost nothing here")),
    "disable_log_requests": _switch("vLLM", only((True,), "prompts are never logged", "leave it out")),
    "enable_log_requests": _switch(
        "vLLM", only((False,), "prompts are never logged", "leave it out; see --access-log")
    ),
    "use_tqdm_on_load": _switch("vLLM", without_effect("a progress bar is shown on a terminal")),
    "disable_custom_all_reduce": _switch("vLLM", without_effect("there is one device")),
    "disable_hybrid_kv_cache_manager": _switch(
        "vLLM", only((False,), "layers of different kinds always have pages of their own", "leave it out")
    ),
    "runner": PeerOption("vLLM", only(("auto", "generate"), "this version generates text", "leave it out")),
    "task": PeerOption("vLLM", only(("auto", "generate"), "this version generates text", "leave it out")),
    "model_impl": PeerOption("vLLM", only(("auto", "vllm"), "there is one implementation", "leave it out")),
    "tokenizer_mode": PeerOption("vLLM", only(("auto", "hf"), "tokenizers are read in one way", "leave it out")),
    "config_format": PeerOption("vLLM", only(("auto", "hf"), "config.json and GGUF metadata are read", "leave it out")),
    # What is refused, or accepted with the one value that this engine has.
    "enable_expert_parallel": _switch("vLLM", means("expert_parallel")),
    "distributed_executor_backend": PeerOption(
        "vLLM", only(("uni", "mp"), "ranks are processes of one host", "leave it out")
    ),
    "nnodes": PeerOption("vLLM", only((1,), "ranks are processes of one host", _USE_DEPLOY)),
    "cpu_offload_gb": PeerOption(
        "vLLM",
        only(
            (0, 0.0), "weights stay on the device that computes", "use --quantization, or --kv-host-memory for KV pages"
        ),
    ),
    "trust_remote_code": _switch(
        "vLLM", refused("code from a checkpoint is never run, and never needed", "leave it out")
    ),
    "tokenizer": PeerOption(
        "vLLM", refused("the tokenizer is the checkpoint's own", "put tokenizer.json beside the weights")
    ),
    "skip_tokenizer_init": _switch(
        "vLLM", refused("a tokenizer is always loaded", "leave it out; prompts may be token ids")
    ),
    "model": PeerOption("vLLM", refused("MODEL is the first argument", "write it before the flags, without --model")),
    "revision": PeerOption(
        "vLLM", refused("revisions cannot be chosen", "download that revision and give its directory")
    ),
    "tokenizer_revision": PeerOption(
        "vLLM", refused("revisions cannot be chosen", "download that revision and give its directory")
    ),
    "download_dir": PeerOption("vLLM", refused("models are kept in one cache", "set TOKENMILL_CACHE to a directory")),
    "hf_token": PeerOption(
        "vLLM", refused("tokens are not taken on the command line", "set HF_TOKEN in the environment")
    ),
    "hf_overrides": PeerOption("vLLM", refused("the model's shape is the checkpoint's", "edit config.json")),
    "rope_scaling": PeerOption("vLLM", refused("the model's shape is the checkpoint's", "edit config.json")),
    "rope_theta": PeerOption("vLLM", refused("the model's shape is the checkpoint's", "edit config.json")),
    "num_gpu_blocks_override": PeerOption("vLLM", refused("KV pages are counted in bytes", "use --memory")),
    "lora_modules": PeerOption("vLLM", _lora_modules, takes_several=True),
    "loras": PeerOption("vLLM", _lora_modules, takes_several=True),
    "lora_dtype": PeerOption("vLLM", only(("auto",), "adapters are held in the dtype of the steps", "leave it out")),
    "fully_sharded_loras": _switch("vLLM", only((False,), _NO_PARALLEL, "leave it out")),
    "limit_mm_per_prompt": PeerOption("vLLM", refused(_NO_MEDIA, "leave it out")),
    "mm_processor_kwargs": PeerOption("vLLM", refused(_NO_MEDIA, "leave it out")),
    "allowed_local_media_path": PeerOption("vLLM", refused(_NO_MEDIA, "leave it out")),
    "response_role": PeerOption("vLLM", only(("assistant",), "answers have the role assistant", "leave it out")),
    "structured_outputs_config": PeerOption(
        "vLLM", refused("there is one grammar backend, llguidance", "leave it out")
    ),
    "guided_decoding_backend": PeerOption(
        "vLLM", only(("auto", "guidance"), "there is one grammar backend, llguidance", "leave it out")
    ),
    "compilation_config": PeerOption("vLLM", refused(_OWN_CHOICE, "use --executor"), short=("-O", "-cc")),
    "optimization_level": PeerOption("vLLM", refused(_OWN_CHOICE, "use --executor")),
    "cudagraph_capture_sizes": PeerOption("vLLM", refused(_OWN_CHOICE, "use --executor cuda_graph or cuda_eager")),
    "attention_backend": PeerOption("vLLM", refused(_OWN_CHOICE, "use --kernels, or leave it out")),
    "moe_backend": PeerOption("vLLM", refused(_OWN_CHOICE, _SEE_INSPECT)),
    "linear_backend": PeerOption("vLLM", refused(_OWN_CHOICE, _SEE_INSPECT)),
    "max_seq_len_to_capture": PeerOption("vLLM", refused(_OWN_CHOICE, "use --executor")),
    "long_prefill_token_threshold": PeerOption(
        "vLLM", refused("chunks share a step by --scheduling", "use --batch-tokens")
    ),
    "kv_transfer_config": PeerOption(
        "vLLM", refused("KV pages are shared in another way", "use --kv-redis, --kv-disk or --kv-host-memory")
    ),
    "kv_cache_dtype_skip_layers": PeerOption(
        "vLLM", refused("layers are kept in 16 bits by number from each end", "use --kv-native-layers")
    ),
    "calculate_kv_scales": _switch("vLLM", refused("scales come from the checkpoint or per page", "leave it out")),
    "otlp_traces_endpoint": PeerOption(
        "vLLM", refused("the exporter is configured by its own variables", "set OTEL_EXPORTER_OTLP_ENDPOINT")
    ),
    "api_server_count": PeerOption("vLLM", only((1,), "one process serves HTTP", "leave it out")),
}

_OTHERS: dict[str, PeerOption] = {
    # llama.cpp
    "ctx_size": PeerOption("llama.cpp", means("context"), short=("-c",)),
    "parallel": PeerOption("llama.cpp", means("concurrency"), short=("-np",)),
    "batch_size": PeerOption(
        "llama.cpp",
        refused("tokens per step and requests at a time are two options", "use --batch-tokens or --concurrency"),
    ),
    "n_gpu_layers": PeerOption("llama.cpp", _gpu_layers, short=("-ngl", "--gpu-layers")),
    "n_predict": PeerOption("llama.cpp", means("max_tokens"), short=("-n",)),
    "predict": PeerOption("llama.cpp", means("max_tokens")),
    "temp": PeerOption("llama.cpp", means("temperature")),
    "repeat_penalty": PeerOption("llama.cpp", means("repetition_penalty")),
    "cache_type_k": PeerOption("llama.cpp", _llama_kv_type, short=("-ctk",)),
    "cache_type_v": PeerOption(
        "llama.cpp", refused("keys and values have one type", "use --kv-cache-dtype"), short=("-ctv",)
    ),
    "alias": PeerOption("llama.cpp", means("served_model_name")),
    "model_draft": PeerOption("llama.cpp", lambda _name, value: {"speculate": f"draft:{value}"}, short=("-md",)),
    "draft_max": PeerOption("llama.cpp", means("draft_tokens")),
    "flash_attn": PeerOption("llama.cpp", only(("on", "auto"), _OWN_CHOICE, _SEE_INSPECT), short=("-fa",)),
    "cont_batching": _switch("llama.cpp", only((True,), "requests are always batched continuously", "leave it out")),
    "mlock": _switch("llama.cpp", refused("weights are not locked in memory", "leave it out")),
    "no_mmap": _switch("llama.cpp", refused(_OWN_CHOICE, "leave it out")),
    "tensor_split": PeerOption("llama.cpp", refused(_NO_PARALLEL, _USE_DEPLOY), short=("-ts",)),
    # SGLang
    "context_length": PeerOption("SGLang", means("context")),
    "max_running_requests": PeerOption("SGLang", means("concurrency")),
    "chunked_prefill_size": PeerOption("SGLang", means("batch_tokens")),
    "mem_fraction_static": PeerOption("SGLang", means("gpu_memory_utilization")),
    "disable_radix_cache": _switch("SGLang", inverted("prefix_caching")),
    "tp_size": PeerOption("SGLang", means("tensor_parallel_size"), short=("--tp", "-tp")),
    "dp_size": PeerOption("SGLang", means("data_parallel_size"), short=("--dp", "-dp")),
    "pp_size": PeerOption("SGLang", means("pipeline_parallel_size"), short=("--pp", "-pp")),
    # Ollama's Modelfile parameters
    "num_ctx": PeerOption("Ollama", means("context")),
    "num_predict": PeerOption("Ollama", means("max_tokens")),
    "num_thread": PeerOption("Ollama", means("threads")),
    "num_gpu": PeerOption("Ollama", _gpu_layers),
}

PEER_OPTIONS: Mapping[str, PeerOption] = _VLLM | _OTHERS

# One-letter flags of options that have the same name here.
SHORT_FLAGS: Mapping[str, str] = {"-t": "threads", "-q": "quantization"}

# Options that have the same name here, with values of their own.
_VALUES: Mapping[str, Translation] = {"load_format": _load_format, "quantization": _quantization}


def translate(name: str, value: Any) -> Mapping[str, Any] | None:
    """Our options for another engine's, or for another engine's value of ours; None: this table knows no such name."""
    peer = PEER_OPTIONS.get(name)
    if peer is not None:
        return peer.translate(name, value)
    return _VALUES[name](name, value) if name in _VALUES else None
