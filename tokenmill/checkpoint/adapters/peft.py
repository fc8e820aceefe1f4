"""Reads an adapter directory of PEFT: adapter_config.json and adapter_model.safetensors.

What the config may say and we do not compute is refused by name, and so are values that are not finite: an adapter that
loads does what its author trained. The scale of each matrix follows PEFT: alpha / rank, or alpha / sqrt(rank) with
rsLoRA, both after the patterns. Pickled weights are never opened. Names stay those of the file; fit.py translates.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tokenmill.checkpoint.adapters.adapter import Adapter, AdapterMatrix
from tokenmill.checkpoint.adapters.patterns import PatternError, matches_tail
from tokenmill.checkpoint.fields import Fields, shown
from tokenmill.checkpoint.safetensors import read_json
from tokenmill.errors import CheckpointError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
BASE_HASH = "base_sha256"  # in the metadata of the weights: which files the adapter was made for
PREFIX = "base_model.model."
_PICKLED = ("adapter_model.bin", "adapter_model.pt")
_AGAIN = "save it again with PEFT's save_pretrained"
# Keys whose effect on the result is not computed here: refused when they say anything.
_REFUSED = {
    "target_parameters": "adapters of parameters (expert stacks)",
    "trainable_token_indices": "single trained tokens",
    "alora_invocation_tokens": "activation by tokens (aLoRA)",
    "layer_replication": "replicated layers",
    "lora_bias": "biases of adapters",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "routing between adapters (Arrow)",
    "monteclora_config": "MonteCLoRA",
    "kasa_config": "KaSA",
}
# Starting values that leave the base as it is. The others (PiSSA, OLoRA, LoftQ, ...) change the base too.
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
_EDGES = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings", "embeddings")
_MAX_NAME = 256  # characters of a module in an error message
_FACTOR = re.compile(
    r"(?P<module>.+)\.(?:lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.weight)?"
    r"|(?P<magnitude>lora_magnitude_vector)(?:\.weight)?)"
)


def read_adapter(path: Path, name: str | None = None) -> Adapter:
    """The adapter in directory `path`, under `name` or the directory's own name."""
    path = Path(path)
    config_path, weights_path = path / CONFIG_FILE, path / WEIGHTS_FILE
    _check_files(path)
    config = read_json(config_path)
    fields = Fields(config, str(config_path), _AGAIN)
    _check_config(fields, path)
    tensors, metadata = _read_tensors(weights_path)
    factors: dict[str, dict[str, Tensor]] = {}
    saved: dict[str, Tensor] = {}
    for stored, tensor in tensors.items():
        key = stored.removeprefix(PREFIX)
        match = _FACTOR.fullmatch(key)
        if match is not None:
            part = match["magnitude"] or f"{match['embedding'] or ''}{match['side']}"
            factors.setdefault(match["module"], {})[part] = tensor
        elif "lora_" in key:
            raise CheckpointError(f"{weights_path}: tensor {_named(stored)} is not one that LoRA has", _AGAIN)
        elif ".base_layer." not in f".{key}":  # PEFT adds a copy of a base embedding that has an adapter
            saved[key] = tensor
    matrices = {module: _matrix(fields, module, parts) for module, parts in sorted(factors.items())}
    saved = _without_copies(fields, saved, matrices)
    if not matrices and not saved:
        raise CheckpointError(f"{weights_path} holds no adapter tensors", _AGAIN)
    return Adapter(
        name or path.resolve().name,
        matrices,
        saved,
        fields.text("base_model_name_or_path", ""),
        metadata.get(BASE_HASH, ""),
        _hash(config_path, weights_path),
    )


def _check_files(path: Path) -> None:
    if not path.is_dir():
        problem = "is not a directory" if path.exists() else "does not exist"
        raise CheckpointError(f"adapter {path} {problem}", f"give a directory with {CONFIG_FILE} and {WEIGHTS_FILE}")
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        if (path / file).is_file():
            continue
        if file == WEIGHTS_FILE and any((path / pickled).is_file() for pickled in _PICKLED):
            raise CheckpointError(f"{path} holds only pickled weights", f"{_AGAIN}, which writes safetensors")
        raise CheckpointError(f"{path / file} is missing", "download all files of the adapter")


def _check_config(fields: Fields, path: Path) -> None:
    kind = fields.text("peft_type", "")
    if kind.upper() != "LORA":
        raise CheckpointError(f"{path}: adapters of type {shown(kind)} are not supported", "supported: LORA")
    for key, feature in _REFUSED.items():
        if fields.raw(key):
            raise CheckpointError(f"{path}: {feature} are not supported ('{key}')", "train a plain LoRA adapter")
    if fields.text("bias", "none") != "none":
        raise CheckpointError(f"{path}: trained biases of the base are not supported", "train with bias='none'")
    start = fields.raw("init_lora_weights")
    if start not in _STARTS:
        raise CheckpointError(
            f"{path}: init_lora_weights {shown(start)} changes the base too",
            "save it with PEFT's path_initial_model_for_weight_conversion, which makes it a plain adapter",
        )


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                tensor = file.get_tensor(name)
                if not tensor.is_floating_point():
                    raise CheckpointError(f"{path}: tensor {_named(name)} is not of a float type", _AGAIN)
                tensors[name] = tensor.float()
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", "the file is damaged: download it again") from None
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"{path}: tensor {_named(name)} holds NaN or infinite values", "the training failed: use another step"
            )
    return tensors, metadata


def _matrix(fields: Fields, module: str, parts: Mapping[str, Tensor]) -> AdapterMatrix:
    def damaged(problem: str) -> CheckpointError:
        return fields.error(f"adapter of {_named(module)} {problem}", _AGAIN)

    embedding = "embedding_A" in parts or "embedding_B" in parts
    a, b = (parts.get(f"embedding_{side}" if embedding else side) for side in "AB")
    if a is None or b is None:
        raise damaged(f"has no lora_{'A' if a is None else 'B'}")
    if embedding:  # [r, vocab], [hidden, r]: turned so that b @ a has the shape of the table
        a, b = b.T.contiguous(), a.T.contiguous()
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or 0 in (*a.shape, *b.shape):
        raise damaged(f"has factors of shapes {list(a.shape)} and {list(b.shape)}")
    magnitude = parts.get("lora_magnitude_vector")
    if (magnitude is not None) != fields.flag("use_dora", False):
        raise damaged("has a DoRA magnitude, and use_dora is off" if magnitude is not None else "has no DoRA magnitude")
    if magnitude is not None:
        if embedding:
            raise damaged("is DoRA of an embedding, which is not supported")
        magnitude = magnitude.flatten()
        if magnitude.shape[0] != b.shape[0]:
            raise damaged(f"has a magnitude of {magnitude.shape[0]} rows for {b.shape[0]}")
    rank = _by_pattern(fields, "rank_pattern", module, fields.integer("r"))
    if rank != a.shape[0]:
        raise damaged(f"has rank {a.shape[0]}, the config says {rank:g}")
    alpha = _by_pattern(fields, "alpha_pattern", module, fields.number("lora_alpha"))
    scale = alpha / (math.sqrt(rank) if fields.flag("use_rslora", False) else rank)
    return AdapterMatrix(module, a, b, scale, magnitude)


def _by_pattern(fields: Fields, key: str, module: str, default: float) -> float:
    """The value of the first pattern that matches the tail of the module's name, as PEFT takes it."""
    for pattern, value in fields.mapping(key).items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise fields.error(f"'{key}' of {shown(pattern)} is {shown(value)}")
        try:
            if matches_tail(pattern, module):
                return float(value)
        except PatternError as error:
            raise fields.error(f"'{key}': {shown(pattern)} is not a valid pattern: {error}") from None
    return default


def _without_copies(
    fields: Fields, saved: dict[str, Tensor], matrices: Mapping[str, AdapterMatrix]
) -> dict[str, Tensor]:
    """Whole tensors without those that PEFT stores beside an adapter of the embedding, unchanged from the base."""
    listed: Any = fields.raw("modules_to_save") or []
    if not isinstance(listed, list):
        raise fields.wrong("modules_to_save", listed)
    targeted = any(module.rpartition(".")[2] in _EDGES for module in matrices)
    if targeted and fields.flag("ensure_weight_tying", False):
        raise fields.error("adapters tied between embedding and head are not supported", "train one of the two")

    def is_trained(name: str) -> bool:
        module = name.rpartition(".")[0]
        return any(module == each or module.endswith(f".{each}") for each in listed)

    return {name: tensor for name, tensor in saved.items() if is_trained(name) or not targeted}


def _named(name: str) -> str:
    """A module or tensor for an error message: the place that matters is at its end."""
    name = name.removeprefix(PREFIX)
    return f"'{name}'" if name.isprintable() and len(name) <= _MAX_NAME else shown(name)


def _hash(*files: Path) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as data:
            digest.update(hashlib.file_digest(data, "sha256").digest())
    return digest.hexdigest()
