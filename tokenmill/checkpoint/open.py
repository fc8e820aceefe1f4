"""Opens a checkpoint of whatever format, by looking at the contents and never at the name.

Says what to do about the things people give by mistake: pickled weights, a lone safetensors file, a Git LFS pointer.
Called by the loader, the planner and `inspect`.
"""

from __future__ import annotations

from pathlib import Path

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.configs.encoders import is_encoder
from tokenmill.checkpoint.dummy import DummyCheckpoint
from tokenmill.checkpoint.gguf import GGUFCheckpoint
from tokenmill.checkpoint.gguf_header import MAGIC
from tokenmill.checkpoint.safetensors import INDEX_FILE, SafetensorsCheckpoint, read_json
from tokenmill.errors import CheckpointError

_GIVE = "give a .gguf file or a directory with config.json and .safetensors files"
_CONVERT = "convert the weights to safetensors first (transformers: save_pretrained(..., safe_serialization=True))"
_OLD_GGML = (b"lmgg", b"fmgg", b"tjgg", b"ggml", b"ggmf", b"ggjt")


def open_source(path: Path, load_format: str) -> Checkpoint:
    """The checkpoint as `--load-format` reads it: "dummy" needs a config.json only."""
    return DummyCheckpoint(path) if load_format == "dummy" else open_checkpoint(path)


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at a file or directory; a CheckpointError with the remedy where there is none."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist", "check the path, or give an alias or a Hugging Face id")
    if path.is_dir():
        return _open_directory(path)
    if not path.is_file():
        raise CheckpointError(f"{path} is neither a file nor a directory", _GIVE)
    head = _head(path)
    if head.startswith(MAGIC):
        return GGUFCheckpoint(path)
    raise _explain_file(path, head)


def _open_directory(path: Path) -> Checkpoint:
    files = [entry for entry in sorted(path.iterdir()) if entry.is_file()]
    if not files:
        raise CheckpointError(f"{path} has no files in it", _GIVE)
    has_safetensors = any(entry.suffix == ".safetensors" or entry.name == INDEX_FILE for entry in files)
    has_config = (path / "config.json").is_file()
    if has_config and is_encoder(read_json(path / "config.json")):
        raise CheckpointError(
            f"{path.name} is an encoder: it gives vectors or scores, and no text",
            "use Embedder, `tokenmill embed` or `tokenmill serve`",
        )
    if has_config and has_safetensors:
        return SafetensorsCheckpoint(path)
    ggufs = [entry for entry in files if _head(entry).startswith(MAGIC)]
    if len(ggufs) == 1:
        return GGUFCheckpoint(ggufs[0])
    if ggufs:
        names = ", ".join(entry.name for entry in ggufs)
        raise CheckpointError(f"{path} holds {len(ggufs)} GGUF files ({names})", "give the path of one of them")
    if has_safetensors:
        raise CheckpointError(f"{path} has no config.json", "download the whole model, not only its weights")
    if any(_is_pickle(_head(entry)) for entry in files):
        raise CheckpointError(f"{path} holds only pickled PyTorch weights", _CONVERT)
    if has_config:
        raise CheckpointError(f"{path} has a config.json but no weights", "download the .safetensors files too")
    raise CheckpointError(f"{path} holds no model", _GIVE)


def _explain_file(path: Path, head: bytes) -> CheckpointError:
    if not head:
        return CheckpointError(f"{path} is empty", _GIVE)
    if head.startswith(b"version https://git-lfs"):
        return CheckpointError(f"{path} is a Git LFS pointer, not the file itself", "run `git lfs pull` there")
    if head[:4] in _OLD_GGML:
        return CheckpointError(f"{path} is in a ggml format from before GGUF", "convert it with a current llama.cpp")
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size:
        return CheckpointError(f"{path} is a single safetensors file", "give its directory, with config.json in it")
    if _is_pickle(head):
        return CheckpointError(f"{path} holds pickled PyTorch weights", _CONVERT)
    return CheckpointError(f"{path} is not a checkpoint", _GIVE)


def _is_pickle(head: bytes) -> bool:
    """torch.save writes a zip archive, formerly a bare pickle (protocol 2 to 5)."""
    return head.startswith(b"PK\x03\x04") or (head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"))


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(32)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}", "check its permissions") from None
