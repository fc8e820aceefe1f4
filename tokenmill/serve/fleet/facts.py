"""What is known of a model before it is loaded: from its metadata, without reading a weight. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenmill.checkpoint import hf_config
from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.gguf import GGUFCheckpoint
from tokenmill.checkpoint.sources import resolve
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
    description = _describe(found.path)
    device = options.device if options.device in DEVICE_DEFAULTS else "cuda" if detect_machine().gpus else "cpu"
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


def _describe(path: Path) -> ModelDescription:
    """As the engine reads it; whether the weights are whole is the engine's to find out."""
    config = path / "config.json"
    if not config.is_file():
        files = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
        if len(files) != 1:
            raise CheckpointError(f"{path} has no config.json", "give a directory with one, or a .gguf file")
        return GGUFCheckpoint(files[0]).description
    try:
        return hf_config.describe(json.loads(config.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {config}: {error}", "download the model again") from None
