"""The finished directory: shards, config.json with its quantization_config, tokenizer, generation settings.

Assembled inside the job's workspace and moved into place by one rename, so that the output is complete or absent.
Used by the job; card.py writes the model card.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.configs.tensor_names import naming_of, stored_name
from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.hf_export import export_config, export_tokenizer, generation_config
from tokenmill.checkpoint.hf_export_recurrent import taken_over
from tokenmill.checkpoint.safetensors import read_json
from tokenmill.errors import UserError
from tokenmill.model.formats.files.base import FileFormat
from tokenmill.quantize.kv_scales import KV_CACHE_SCHEME
from tokenmill.quantize.recipe import Recipe
from tokenmill.quantize.shards import join_files
from tokenmill.quantize.source import HEAD, SourceModel
from tokenmill.quantize.workspace import Workspace, full_disk_explained

CARD, REASON = "README.md", "reason.txt"
_CHUNK = 8 << 20


def assemble(
    workspace: Workspace,
    source: SourceModel,
    description: ModelDescription,
    recipe: Recipe,
    file_format: type[FileFormat],
    dtype: str,
    kv_scales: bool = False,
) -> dict[str, str]:
    """Every file but the card, in `workspace.result`; the SHA-256 of each file with weights."""
    directory, blocks = workspace.result, range(source.num_blocks)
    rename = partial(stored_name, naming_of(description.architecture))
    with full_disk_explained(workspace.path):
        directory.mkdir(exist_ok=True)
        files = [workspace.edges, *map(workspace.block, blocks)]
        digests = join_files(files, directory, rename=rename)
        config = float_config(source.checkpoint, description, dtype)
        schemes = {rename(name): scheme for name, scheme in recipe.scheme_of.items()}
        kept = [name for index in blocks for name in source.kept_names(index)]
        ignored = [rename(name) for name in (HEAD, *recipe.ignored, *kept)]
        settings = file_format.quantization_config(schemes, ignored)
        if kv_scales:
            settings["kv_cache_scheme"] = KV_CACHE_SCHEME
        if settings:
            config["quantization_config"] = settings
        _write_json(directory / "config.json", config)
        _write_json(directory / "generation_config.json", generation_config(description))
        export_tokenizer(source.checkpoint, directory)
    return digests


def float_config(checkpoint: Checkpoint, description: ModelDescription, dtype: str) -> dict[str, Any]:
    """config.json, but for how weights are quantized. Of models with recurrent layers the source's own, where it has
    one: no two families spell them alike."""
    stored = checkpoint.path / "config.json"
    if any(layer.states for layer in description.kv_layers()) and stored.is_file():
        return taken_over(read_json(stored), dtype, description.tie_embeddings)
    return export_config(description, dtype)


def move_into_place(workspace: Workspace, out: Path) -> None:
    os.rename(workspace.result, out)
    workspace.remove()


def directory_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())


def weight_files(path: Path) -> Sequence[Path]:
    """The files that hold the weights of a checkpoint."""
    return [path] if path.is_file() else sorted(path.glob("*.safetensors")) or sorted(path.glob("*.gguf"))


def file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_CHUNK):
            digest.update(data)
    return digest.hexdigest()


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def choose_dtype(name: str, source: SourceModel) -> torch.dtype:
    """The requested dtype; for auto bfloat16 where the source has it or needs its range, else float16."""
    known = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
    if name != "auto":
        if name not in known:
            raise UserError(f"--dtype {name} is not known", f"give auto, {', '.join(known)}")
        return known[name]
    stored = source.checkpoint.tensor(f"{source.final_norm}.weight").type_name
    wide = stored == "BF16" or source.description.overflows_float16
    return torch.bfloat16 if wide else torch.float16
