"""What is known of a model before it is loaded: from its metadata, without reading a weight. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.checkpoint import hf_config
from tokenmill.checkpoint.configs.encoders import EncoderDescription
from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.embedding_files import read_encoder, read_settings
from tokenmill.checkpoint.gguf import GGUFCheckpoint
from tokenmill.checkpoint.sources import resolve
from tokenmill.checkpoint.sources.base import Resolved
from tokenmill.config import EngineConfig
from tokenmill.errors import CheckpointError
from tokenmill.hardware.kv_layout import build_layout
from tokenmill.hardware.machine import detect_machine
from tokenmill.hardware.memory import RuntimeCosts, activation_bytes
from tokenmill.resolution import DEVICE_DEFAULTS, MAX_AUTOMATIC_CONTEXT

_VALUE_BYTES = {"float32": 4}  # of KV; other types have at most two


@dataclass(frozen=True, slots=True)
class ModelFacts:
    path: Path
    architecture: str
    checkpoint: str  # what it calls itself
    weight_bytes: int  # as stored
    trained_context: int
    context: int  # that the engine would use
    device: str
    kv_one: int  # bytes of KV of one request of that length, and the recurrent states of all
    kv_all: int  # of as many as run at once
    step_bytes: int  # what a step takes besides


def find_facts(source: str, options: EngineConfig) -> ModelFacts:
    """Finds the model, and downloads it if it must be. Raises UserError."""
    found = resolve(source)
    encoder = read_encoder(found.path)
    if encoder is not None:
        return _encoder_facts(found, encoder, options)
    description = _describe(found.path)
    device = _device(options)
    defaults = DEVICE_DEFAULTS[device]
    context = options.context or min(description.context_length, MAX_AUTOMATIC_CONTEXT)
    concurrency = options.concurrency or defaults.concurrency
    layout = build_layout(description.kv_layers(), options.page_size or defaults.page_size)
    value_bytes = _VALUE_BYTES.get(options.kv_cache_dtype or defaults.kv_cache_dtype, 2)
    one, states = layout.peak_pages(context) * layout.values_per_page * value_bytes, layout.state_bytes * concurrency
    batch = options.batch_tokens or defaults.batch_tokens
    sizes = (description.hidden_size, description.intermediate_size, description.vocab_size)
    if device == "cuda":
        steps = activation_bytes(batch, *sizes, max_sequences=concurrency) + RuntimeCosts().total(1)
    else:  # float32; logits and their sorted copies for the sequences that choose a token
        steps = 2 * activation_bytes(batch, *sizes, max_sequences=0) + 3 * 4 * concurrency * description.vocab_size
    return ModelFacts(
        found.path,
        description.architecture,
        description.name,
        found.bytes,
        description.context_length,
        context,
        device,
        one + states,
        one * concurrency + states,
        int(steps),
    )


def _device(options: EngineConfig) -> str:
    return options.device if options.device in DEVICE_DEFAULTS else "cuda" if detect_machine().gpus else "cpu"


def _encoder_facts(found: Resolved, encoder: EncoderDescription, options: EngineConfig) -> ModelFacts:
    """Texts are computed whole and nothing is kept of them: no KV cache. On a CPU the weights are float32."""
    device, settings = _device(options), read_settings(found.path)
    trained = min(encoder.context_length, (settings.max_tokens if settings else 0) or encoder.context_length)
    batch = max(options.batch_tokens or DEVICE_DEFAULTS[device].batch_tokens, trained)
    stored = _read_config(found.path / "config.json").get("torch_dtype")
    widened = device == "cpu" and stored in ("float16", "bfloat16")
    # Float32, q, k and v among them; scores of one text at a time.
    steps = 4 * batch * (6 * encoder.hidden_size + 3 * encoder.intermediate_size) + 4 * encoder.num_heads * trained**2
    return ModelFacts(
        found.path,
        encoder.model_type,
        found.path.name,
        found.bytes * (2 if widened else 1),
        encoder.context_length,
        options.context or trained,
        device,
        kv_one=0,
        kv_all=0,
        step_bytes=steps,
    )


def _describe(path: Path) -> ModelDescription:
    """As the engine reads it; whether the weights are whole is the engine's to find out."""
    config = path / "config.json"
    if not config.is_file():
        files = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
        if len(files) != 1:
            raise CheckpointError(f"{path} has no config.json", "give a directory with one, or a .gguf file")
        return GGUFCheckpoint(files[0]).description
    return hf_config.describe(_read_config(config))


def _read_config(config: Path) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(config.read_text(encoding="utf-8"))
        return read
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {config}: {error}", "download the model again") from None
