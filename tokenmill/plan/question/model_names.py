"""From what a user writes to a PlannedModel: a built-in name, a config.json or its folder, a GGUF, an alias.

Built-in names come from plan/data/models.toml, so that planning needs neither weights nor network. Reads metadata only,
never tensors. Called by every planning verb.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from tokenmill.checkpoint import hf_config
from tokenmill.checkpoint.gguf import GGUFCheckpoint
from tokenmill.checkpoint.gguf_description import ARCHITECTURES
from tokenmill.checkpoint.gguf_header import MAGIC, read_gguf_metadata
from tokenmill.checkpoint.gguf_metadata import Metadata
from tokenmill.checkpoint.sources import list_cached
from tokenmill.errors import CheckpointError, UserError
from tokenmill.plan.question.planned_model import PlannedModel
from tokenmill.plan.question.stored_format import stored_format

# GGUF metadata (after the architecture's prefix) -> config.json spelling.
_GGUF_FIELDS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "vocab_size": "vocab_size",
}
_GGUF_FILE_TYPES = {
    0: "fp32",
    1: "bf16",
    2: "q4_0",
    3: "q4_1",
    7: "q8_0",
    10: "q2_k",
    12: "q3_k_m",
    15: "q4_k_m",
    17: "q5_k_m",
}


def describe_for_planning(source: str | Path) -> PlannedModel:
    """The model behind a name, a path or an alias. Raises UserError with the nearest names."""
    text = str(source)
    if text.lower() in _names():
        return built_in(_names()[text.lower()])
    path = Path(text)
    if path.exists():
        return _from_path(path)
    cached = list_cached().get(text)
    if cached is not None:
        return _from_path(cached.path)
    bare = text.lower().rsplit("/", 1)[-1]
    if bare in _names():
        return built_in(_names()[bare])
    plain, stored = _plain_name(bare)
    if plain in _plain_names():
        found = built_in(_plain_names()[plain])
        return replace(found, stored_format=stored or found.stored_format)
    near = difflib.get_close_matches(bare, list(_names()), n=6, cutoff=0.45)
    names = list(dict.fromkeys(_names()[name] for name in near))[:4]
    hint = f"nearest: {', '.join(names)}; " if names else ""
    raise UserError(f"unknown model '{text}'", f"{hint}or give the path of its config.json or GGUF file")


# Words of a name that say how a checkpoint is stored, and those that change no shape.
_STORED = {
    "fp8": "fp8",
    "fp8dynamic": "fp8",
    "w8a8": "int8",
    "int8": "int8",
    "nvfp4": "nvfp4",
    "fp4": "nvfp4",
    "mxfp4": "mxfp4",
    "awq": "int4-g128",
    "gptq": "int4-g128",
    "int4": "int4-g128",
    "w4a16": "int4-g128",
}
_SHAPELESS = {
    *(
        "instruct",
        "chat",
        "it",
        "hf",
        "base",
        "pt",
        "thinking",
        "reasoning",
        "dynamic",
        "block",
        "modelopt",
        "quantized",
    ),
    *("meta", "bf16", "fp16", "bfloat16", "preview", "exp", "latest", "original", "text", "moe", "kv"),
}
_RELEASE = re.compile(r"v\d+(\.\d+)?|\d{4}|\d+k|\d{2}")  # v0.1, 2507, 128k, and months and days


def _plain_name(name: str) -> tuple[str, str]:
    """(the words that give a shape, the stored format): `Meta-Llama-3.1-70B-Instruct-FP8`, `LLAMA3_1_70B`, `QWEN3_235B`
    and `DEEPSEEK_V3` are written in many ways."""
    stored = ""
    kept: list[str] = []
    for word in re.split(r"[-_\s:]+|(?<=quantized)\.", name.lower()):
        if word in _STORED:
            stored = _STORED[word]
        elif (
            word and word not in _SHAPELESS and not (kept and _RELEASE.fullmatch(word) and not _is_version(kept, word))
        ):
            kept.append(word)
    return re.sub(r"[^a-z0-9]", "", "".join(kept)), stored


def _is_version(kept: list[str], word: str) -> bool:
    """`deepseek v3` is another model than `deepseek v2`; `mistral 7b v0.3` is the same as v0.2."""
    return word.startswith("v") and kept == ["deepseek"]


@cache
def _plain_names() -> Mapping[str, str]:
    """Plain words -> built-in name; also without the active parameters of a mixture (QWEN3_235B)."""
    names: dict[str, str] = {}
    for spelling, name in _names().items():
        plain, stored = _plain_name(spelling.rsplit("/", 1)[-1])
        if not stored:
            names.setdefault(plain, name)
            names.setdefault(re.sub(r"(?<=b)a\d+b", "", plain), name)
    return names


def built_in_names() -> list[str]:
    return sorted(_table())


@cache
def built_in(name: str) -> PlannedModel:
    row = _table()[name]
    return PlannedModel(hf_config.describe(row["config"]), name, row.get("format", "bf16"))


def from_config(config: Mapping[str, Any], name: str = "") -> PlannedModel:
    description = hf_config.describe(config)
    return PlannedModel(description, name or description.name or "config.json", stored_format(config))


@cache
def _table() -> Mapping[str, dict[str, Any]]:
    data = (resources.files("tokenmill.plan") / "data" / "models.toml").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = tomllib.loads(data)["model"]
    return table


@cache
def _names() -> Mapping[str, str]:
    """Every spelling, in lower case, with and without the organisation -> built-in name."""
    names: dict[str, str] = {}
    for name, row in _table().items():
        for spelling in row["names"]:
            names.setdefault(spelling.lower().rsplit("/", 1)[-1], name)
            names[spelling.lower()] = name
    return names | {name: name for name in _table()}


def _from_path(path: Path) -> PlannedModel:
    if path.is_dir():
        config = path / "config.json"
        if config.is_file():
            weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
            return replace(_from_json(config), name=path.name, stored_bytes=weights)
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return _from_gguf(ggufs[0])
        raise CheckpointError(f"{path} has no config.json", "give a folder with config.json, or a GGUF file")
    with path.open("rb") as file:
        head = file.read(4)
    return _from_gguf(path) if head == MAGIC else _from_json(path)


def _from_json(path: Path) -> PlannedModel:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a readable config.json: {error}", "give the model's config") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} does not hold an object", "give the model's config.json")
    return from_config(config, path.parent.name if path.name == "config.json" else path.stem)


def _from_gguf(path: Path) -> PlannedModel:
    metadata = read_gguf_metadata(path)
    architecture = str(metadata.get("general.architecture", ""))
    stored = _GGUF_FILE_TYPES.get(metadata.get("general.file_type", -1), "q4_k_m")
    if architecture in ARCHITECTURES:
        description = GGUFCheckpoint(path).description
    else:
        description = hf_config.describe(_config_of(metadata, architecture))
    name = str(metadata.get("general.name") or path.stem)
    return PlannedModel(description, name, stored, path.stat().st_size)


def _config_of(metadata: Metadata, architecture: str) -> dict[str, Any]:
    """The metadata of a GGUF that the engine does not run, in the spelling of a config.json."""
    config: dict[str, Any] = {"model_type": architecture}
    for stored, spelling in _GGUF_FIELDS.items():
        value = metadata.get(f"{architecture}.{stored}")
        if value is not None:
            config[spelling] = max(value, default=0) if isinstance(value, list) else value
    if "vocab_size" not in config:
        config["vocab_size"] = metadata.string_count("tokenizer.ggml.tokens")
    if config.get("kv_lora_rank"):
        key, value = (int(metadata.get(f"{architecture}.attention.{name}_length", 0)) for name in ("key", "value"))
        config |= {"qk_nope_head_dim": key - int(config["qk_rope_head_dim"]), "v_head_dim": value}
    return config
