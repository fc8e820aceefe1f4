"""A directory in Hugging Face layout: config.json and one or more .safetensors files, memory-mapped.

Parses the safetensors header itself and checks every offset, so a tensor that is listed can be read. Of a multimodal
model it gives the text model. Knows nothing about quantization beyond handing out `quantization_config`. Opened
through open.py.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.checkpoint import hf_config
from tokenmill.checkpoint.base import StoredTensor
from tokenmill.checkpoint.configs.tensor_names import canonical, naming_of
from tokenmill.checkpoint.fields import shown
from tokenmill.checkpoint.mapped_array import ARRAY_TYPES, view_array
from tokenmill.checkpoint.mapped_array import take_view as take_array
from tokenmill.checkpoint.mapped_file import DAMAGED, map_file, release_pages
from tokenmill.checkpoint.tensor_views import TensorView, split_fused
from tokenmill.errors import CheckpointError
from tokenmill.kernels.host import NeedsTorch
from tokenmill.log import get_logger

if TYPE_CHECKING:
    import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_log = get_logger(__name__)
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_DIMENSIONS = 8
_MAX_NAME_BYTES = 255  # of a file name, on common file systems
_DTYPES = {  # name in torch, bytes
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
# Where a multimodal wrapper keeps its text model (the first two: before transformers 4.52, the third: since).
_TEXT_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
_IMAGE_PARTS = ("vision_tower.", "multi_modal_projector.", "visual.")
_DRAFT_LAYERS = "mtp."  # Qwen's: they predict tokens further ahead, and nothing else
_DRAFT_NAMES = (  # in the layer behind the last one, as DeepSeek-V3 has it
    ("mtp.layers.0.", ""),
    ("mtp.fc.", "eh_proj."),
    ("mtp.pre_fc_norm_embedding.", "enorm."),
    ("mtp.pre_fc_norm_hidden.", "hnorm."),
    ("mtp.norm.", "shared_head.norm."),
)
_BARE_EMBEDDING = "embed_tokens.weight"
_QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json")  # ModelOpt's, AutoGPTQ's


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    buffer: mmap.mmap
    type_name: str
    shape: tuple[int, ...]
    start: int  # byte in the file


class SafetensorsCheckpoint:
    """A Checkpoint in a directory."""

    def __init__(self, path: Path, draft_layers: bool = False) -> None:
        """`draft_layers`: with Qwen's, under the names of a layer behind the last one."""
        self.path = path
        self._draft_layers = draft_layers
        self._config = read_json(path / "config.json")
        generation = path / "generation_config.json"
        description = hf_config.describe(self._config, read_json(generation) if generation.is_file() else None)
        self.description = replace(description, name=description.name or path.resolve().name)
        self._entries: dict[str, _TensorEntry] = {}  # by their name in the text model
        num_image_tensors = 0
        stored = _all_entries(path)
        prefix = "model." if _BARE_EMBEDDING in stored else ""  # saved without the head, as embedding models are
        if prefix and "lm_head.weight" not in stored:
            self.description = replace(self.description, tie_embeddings=True)
        for stored_name, entry in stored.items():
            name = self._text_name(stored_name if stored_name.startswith("lm_head.") else prefix + stored_name)
            if name:
                self._entries[name] = entry
            elif stored_name.removeprefix("model.").startswith(_IMAGE_PARTS):
                num_image_tensors += 1
        if num_image_tensors:
            _log.warning("%s: text only; %d tensors for images are not used", path.name, num_image_tensors)
        self._views = self._make_views()

    def _text_name(self, name: str) -> str:
        """The name in the text model; empty for what it does not compute with."""
        if "text_config" in self._config:
            if name.removeprefix("model.").startswith(_IMAGE_PARTS):
                return ""
            for prefix, ours in _TEXT_PREFIXES:
                if name.startswith(prefix):
                    name = ours + name.removeprefix(prefix)
                    break
        if name.startswith(_DRAFT_LAYERS):
            layer = f"model.layers.{self.description.num_layers}."
            found = [layer + own + name.removeprefix(part) for part, own in _DRAFT_NAMES if name.startswith(part)]
            return found[0] if found and self._draft_layers else ""
        if name.endswith(".rotary_emb.inv_freq"):  # old checkpoints store what follows from the config
            return ""
        if name == "lm_head.weight" and self.description.tie_embeddings:  # a second copy of the embedding
            return ""
        return name

    def _make_views(self) -> dict[str, TensorView]:
        """What each canonical tensor is made of."""
        naming = naming_of(self.description.architecture)
        views: dict[str, TensorView] = {}
        parts: dict[str, dict[int, str]] = {}
        for stored_name in self._entries:
            found = canonical(naming, stored_name)
            if found is None:
                continue
            if found.part is None:
                views[found.name] = TensorView((stored_name,), found.transposed)
            else:
                parts.setdefault(found.name, {})[found.part] = stored_name
        views |= {name: TensorView(tuple(each[number] for number in sorted(each))) for name, each in parts.items()}
        return split_fused(self.description, views, naming.grouped_qkv)

    @property
    def joined(self) -> dict[str, TensorView]:
        """Modules that the file keeps as rows of a larger matrix."""
        return {name.rpartition(".")[0]: view for name, view in self._views.items() if view.rows is not None}

    def names(self) -> Iterable[str]:
        return self._views.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._views

    def tensor(self, name: str) -> StoredTensor:
        if name not in self._views:
            raise CheckpointError(f"{self.path.name} has no tensor '{name}'", "config.json may be of another model")
        from tokenmill.checkpoint.mapped_tensor import take_view

        view = self._views[name]
        entries = [self._entries[source] for source in view.sources]
        data = take_view(view, [_tensor(entry) for entry in entries])
        return StoredTensor(name, tuple(data.shape), entries[0].type_name, data)

    def array(self, name: str) -> StoredTensor:
        """As `tensor`, without torch. Raises NeedsTorch for types that numpy does not have."""
        if name not in self._views:
            raise CheckpointError(f"{self.path.name} has no tensor '{name}'", "config.json may be of another model")
        view = self._views[name]
        entries = [self._entries[source] for source in view.sources]
        if missing := [entry.type_name for entry in entries if entry.type_name not in ARRAY_TYPES]:
            raise NeedsTorch(f"tensors of type {missing[0]} are read with it")
        data: Any = take_array(
            view, [view_array(e.buffer, ARRAY_TYPES[e.type_name], e.shape, e.start) for e in entries]
        )
        return StoredTensor(name, tuple(data.shape), entries[0].type_name, data)

    def release(self, name: str) -> None:
        for source in self._views[name].sources:
            entry = self._entries[source]
            count = math.prod(entry.shape) * _DTYPES[entry.type_name][1]
            release_pages(entry.buffer, entry.start, count)

    def float_type(self) -> str:
        stored = {_DTYPES[entry.type_name][0] for entry in self._entries.values()}
        widest = next((name for name in ("float32", "bfloat16", "float16") if name in stored), "")
        return float_type_of(self._config) or widest

    def is_quantized(self) -> bool:
        return bool(self.quantization())

    def stores_halves(self) -> bool:
        values = [(math.prod(entry.shape), _DTYPES[entry.type_name][0]) for entry in self._entries.values()]
        return 2 * sum(count for count, dtype in values if dtype == "float16") > sum(count for count, _dtype in values)

    def quantization(self) -> dict[str, object]:
        text = self._config.get("text_config")
        for config in (self._config, text if isinstance(text, dict) else {}):
            settings = config.get("quantization_config")
            if isinstance(settings, dict):
                return dict(settings)
        for name in _QUANTIZATION_FILES:  # older exporters keep the settings beside config.json
            if (self.path / name).is_file():
                settings = read_json(self.path / name)
                inner = settings.get("quantization")
                return inner if isinstance(inner, dict) else settings
        return {}


class StoredTensors:
    """The tensors of a directory under the names that they are stored with, for models that are not decoders."""

    def __init__(self, path: Path) -> None:
        self._entries = _all_entries(path)

    def names(self) -> Iterable[str]:
        return self._entries.keys()

    def tensor(self, name: str) -> torch.Tensor:
        return _tensor(self._entries[name])


def _tensor(entry: _TensorEntry) -> torch.Tensor:
    import torch

    from tokenmill.checkpoint.mapped_tensor import view_tensor

    dtype = getattr(torch, _DTYPES[entry.type_name][0])
    return view_tensor(entry.buffer, dtype, entry.shape, entry.start)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a CheckpointError that names it."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}", "check the directory") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is not valid JSON", DAMAGED) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object", DAMAGED)
    return value


def float_type_of(config: dict[str, Any]) -> str:
    """What config.json says the model computes in, or the part of it that describes the text model; empty: nothing."""
    text = config.get("text_config")
    for each in (config, text if isinstance(text, dict) else {}):
        named = str(each.get("dtype") or each.get("torch_dtype") or "").removeprefix("torch.")
        if named in ("float16", "bfloat16", "float32"):
            return named
    return ""


def _all_entries(path: Path) -> dict[str, _TensorEntry]:
    if (path / SINGLE_FILE).is_file():
        return _read_file(path / SINGLE_FILE)
    if (path / INDEX_FILE).is_file():
        return _read_shards(path)
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return _read_file(files[0])
    if not files:
        raise CheckpointError(f"{path} has no .safetensors file", "give a directory with the weights in safetensors")
    raise CheckpointError(f"{path} has {len(files)} .safetensors files and no {INDEX_FILE}", "download the index too")


def _read_shards(path: Path) -> dict[str, _TensorEntry]:
    weight_map = read_json(path / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX_FILE} has no 'weight_map'", DAMAGED)
    shards: dict[str, dict[str, _TensorEntry]] = {}
    entries = {}
    for name, file_name in weight_map.items():
        if not _is_file_name(file_name):
            raise CheckpointError(f"{path / INDEX_FILE}: {shown(file_name)} is not a file name", DAMAGED)
        if file_name not in shards:
            if not (path / file_name).is_file():
                raise CheckpointError(f"{path / file_name} is missing", "download all files of the model")
            shards[file_name] = _read_file(path / file_name)
        if name not in shards[file_name]:
            raise CheckpointError(
                f"the index lists tensor {shown(name)} in {file_name}, which does not have it",
                "the files are of different versions: download them again",
            )
        entries[name] = shards[file_name][name]
    return entries


def _is_file_name(name: object) -> bool:
    """A name in the model's own folder that the system can look up."""
    if not isinstance(name, str) or Path(name).name != name or "\0" in name:
        return False
    return len(name.encode(errors="surrogatepass")) <= _MAX_NAME_BYTES and name.isprintable()


def _read_file(path: Path) -> dict[str, _TensorEntry]:
    """The tensor table of one file: 8 bytes of header length, a JSON header, then the data."""
    buffer = map_file(path, smallest=8 + 2)
    header_bytes = int.from_bytes(buffer[:8], "little")
    if header_bytes > min(len(buffer) - 8, _MAX_HEADER_BYTES):
        raise CheckpointError(f"{path.name}: a header of {header_bytes} bytes is impossible", DAMAGED)
    try:
        header = json.loads(buffer[8 : 8 + header_bytes])
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path.name}: the header is not valid JSON", DAMAGED) from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path.name}: the header is not a JSON object", DAMAGED)
    header.pop("__metadata__", None)
    return {name: _read_entry(path, buffer, 8 + header_bytes, name, info) for name, info in header.items()}


def _read_entry(path: Path, buffer: mmap.mmap, data_start: int, name: str, info: object) -> _TensorEntry:
    def damaged(problem: str) -> CheckpointError:
        return CheckpointError(f"{path.name}: tensor {shown(name)} {problem}", DAMAGED)

    if not isinstance(info, dict):
        raise damaged("has no description")
    type_name: Any = info.get("dtype")
    shape: Any = info.get("shape")
    offsets: Any = info.get("data_offsets")
    if not isinstance(type_name, str) or type_name not in _DTYPES:
        raise CheckpointError(
            f"{path.name}: tensor {shown(name)} has unsupported dtype {shown(type_name)}",
            f"supported: {', '.join(_DTYPES)}",
        )
    if not _is_counts(shape) or len(shape) > _MAX_DIMENSIONS or math.prod(max(size, 1) for size in shape) >= 2**62:
        raise damaged(f"has shape {shown(shape)}")
    if not _is_counts(offsets) or len(offsets) != 2:
        raise damaged(f"has offsets {shown(offsets)}")
    begin, end = offsets
    if end - begin != math.prod(shape) * _DTYPES[type_name][1]:
        raise damaged(f"of shape {shown(shape)} and type {type_name} cannot have {end - begin} bytes")
    if data_start + end > len(buffer):
        raise damaged(f"ends {data_start + end - len(buffer)} bytes past the end of the file")
    return _TensorEntry(buffer, type_name, tuple(shape), data_start + begin)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(entry) is int and 0 <= entry < 2**63 for entry in value)
