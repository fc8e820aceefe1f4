"""An encoder put together: files, tokenizer, weights on a device, queue. Called by Embedder and the engine process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.checkpoint.configs.encoders import EncoderDescription
from tokenmill.checkpoint.embedding_files import EmbeddingSettings, read_encoder, read_settings
from tokenmill.checkpoint.sources import resolve
from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.checkpoint.tokenizer_files import load_tokenizer
from tokenmill.config import EngineConfig, ResolvedConfig
from tokenmill.engine.adapters.host import Payload
from tokenmill.engine.adapters.registry import AdapterRegistry, AdapterVersion
from tokenmill.engine.embedding.core import EncoderCore
from tokenmill.engine.messages import Ready
from tokenmill.engine.order import DISCIPLINES
from tokenmill.errors import UserError
from tokenmill.resolution import resolve as resolve_config
from tokenmill.resolution import settle
from tokenmill.runtime.build import find_facts
from tokenmill.types import Request

if TYPE_CHECKING:
    from tokenmill.runtime.encoding import EncoderRunner

_MAX_ROWS = 2048  # texts of a step, however short
_WARM_UP_LENGTHS = (8, 16, 16, 3)
# What only a model that generates can do anything with.
_GENERATING = (
    *("lora", "kv_budget_policy", "kv_disk", "kv_redis", "kv_host_memory", "kv_listen", "kv_peer"),
    *("quantization", "expert_memory"),
)


@dataclass(slots=True, eq=False)
class EncoderParts:
    """The counterpart of EngineParts."""

    core: EncoderCore
    runner: EncoderRunner
    tokenizer: Tokenizer
    description: EncoderDescription
    settings: EmbeddingSettings
    config: ResolvedConfig
    path: Path
    load_seconds: float
    grammars: None = None
    idle_work: tuple[Callable[[], bool], ...] = ()
    adapters: AdapterRegistry = field(default_factory=lambda: AdapterRegistry(_no_adapter, 0))

    def warm_up(self) -> None:
        """Compute a few texts, so that the first request finds everything in place."""
        from tokenmill.model.encoders.packed import Text

        token = min(5, self.description.vocab_size - 1)
        self.runner.run([Text([token] * min(length, self.config.context)) for length in _WARM_UP_LENGTHS])

    def close(self, _timeout: float = 0.0) -> None:
        self.adapters.close()


def _no_adapter(name: str, _path: str) -> tuple[AdapterVersion, Payload]:
    raise UserError(f"adapter '{name}': models for vectors and scores take none", "merge it")


class _Vectors:
    """A runner of requests over one of texts."""

    def __init__(self, runner: EncoderRunner) -> None:
        self._runner = runner

    def compute(self, requests: list[Request]) -> list[list[float]]:
        from tokenmill.model.encoders.packed import Text

        texts = [Text(request.prompt_ids, request.second) for request in requests]
        found: list[list[float]] = self._runner.run(texts).tolist()
        return found


def is_encoder(path: Path) -> bool:
    return read_encoder(path) is not None


def build_encoder(model: str | Path, options: EngineConfig) -> EncoderParts:
    started = time.perf_counter()
    path = resolve(str(model)).path
    description, settings = read_encoder(path), read_settings(path)
    if description is None or settings is None:
        raise UserError(f"{path.name} is not an encoder", "use LLM, or `tokenmill run`")
    _refuse_generating(options)
    trained = min(description.context_length, settings.max_tokens or description.context_length)
    facts, device = find_facts(options, trained, tensors=True)
    from tokenmill.runtime.encoding import EncoderRunner

    config = resolve_config(options, facts)
    runner = EncoderRunner(path, description, settings, config, device)
    config = settle(
        config,
        memory=(0, "an encoder keeps no KV cache"),
        kv_native_layers=(0, "an encoder keeps no KV cache"),
        dtype=(runner.dtype, "the weights' own where that is bfloat16"),
        executor=("packed", "texts of any length in one batch, without padding"),
        concurrency=(_MAX_ROWS, "batch_tokens bounds what is computed at once"),
    )
    discipline = DISCIPLINES.get(options.scheduling)(config.max_tenant_slowdown)
    core = EncoderCore(_Vectors(runner), discipline, config.batch_tokens, config.concurrency)
    seconds = time.perf_counter() - started
    return EncoderParts(core, runner, load_tokenizer(path), description, settings, config, path, seconds)


def describe_encoder_parts(parts: EncoderParts) -> Ready:
    return Ready(
        parts.description.vocab_size,
        list(parts.tokenizer.eos_ids),
        asdict(parts.config),
        parts.description.model_type,
        parts.path.name,
        parts.runner.stored_type,
        parts.runner.weight_bytes,
        parts.load_seconds,
        embedding=parts.settings,
        no_sleep="models for vectors are unloaded instead",
    )


def _refuse_generating(options: EngineConfig) -> None:
    for name in _GENERATING:
        if getattr(options, name):
            raise UserError(f"{name} is given, but the model is an encoder: it keeps no KV cache", f"leave {name} out")
    if options.speculate not in ("off", "auto"):  # nowhere does it pay here
        raise UserError("speculate is given, but the model is an encoder: it generates nothing", "leave it out")
    if options.tensor_parallel_size * options.pipeline_parallel_size * options.context_parallel_size > 1:
        raise UserError("several ranks are given, but the model is an encoder", "leave --tensor-parallel-size out")
    if options.load_format == "dummy":
        raise UserError("encoders have no load_format dummy", "give a model with weights")
