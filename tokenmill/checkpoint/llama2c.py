"""Imports a llama2.c model (version 0 `.bin` and its tokenizer.bin) as an ordinary Hugging Face llama directory.

Reorders q and k from llama2.c's interleaved rotary pairs to halves, and rebuilds the SentencePiece BPE merges from the
vocabulary's scores. The directory appears complete or not at all. Called by the sources, for models in that format.
"""

from __future__ import annotations

import json
import math
import mmap
import shutil
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from torch import Tensor

from tokenmill.checkpoint.mapped_file import DAMAGED, map_file
from tokenmill.checkpoint.mapped_tensor import view_tensor
from tokenmill.errors import CheckpointError

_HEADER = struct.Struct("<7i")
_TOKEN = struct.Struct("<fi")
_NORM_EPS = 1e-5
_ROPE_THETA = 10000.0
_SPECIAL = ("<unk>", "<s>", "</s>")  # ids 0, 1, 2
_BOS_ID, _EOS_ID = 1, 2
_SPACE = "▁"
_MAX_INT32 = 2**31 - 1
_GIVE_TOKENIZER = "give the tokenizer.bin of llama2.c that belongs to the weights"


@dataclass(frozen=True, slots=True)
class _Header:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    context_length: int
    shared_output: bool  # stored as the sign of the vocabulary size

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def convert(weights: Path, tokenizer: Path, out: Path) -> None:
    """Write the directory `out` (which must not exist, or be empty) from the two files."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} already exists", "remove it, or choose another output directory")
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        header, tensors = _read_weights(weights)
        vocabulary = _read_vocabulary(tokenizer, header.vocab_size)
        save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})
        _build_tokenizer(vocabulary).save(str(work / "tokenizer.json"))
        _write_json(work / "config.json", _config(header))
        _write_json(work / "generation_config.json", {"bos_token_id": _BOS_ID, "eos_token_id": _EOS_ID})
        _write_json(work / "tokenizer_config.json", _tokenizer_config(header))
        work.chmod(0o755)  # mkdtemp and save_file make theirs private
        (work / "model.safetensors").chmod(0o644)
        work.replace(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _read_weights(path: Path) -> tuple[_Header, dict[str, Tensor]]:
    buffer = map_file(path, _HEADER.size)
    header = _read_header(path, buffer)
    layers, hidden, ffn = header.num_layers, header.hidden_size, header.intermediate_size
    kv_size = header.num_kv_heads * header.head_dim
    parts: list[tuple[str, tuple[int, ...]]] = [  # in file order, all float32
        ("embed_tokens", (header.vocab_size, hidden)),
        ("input_layernorm", (layers, hidden)),
        ("self_attn.q_proj", (layers, hidden, hidden)),
        ("self_attn.k_proj", (layers, kv_size, hidden)),
        ("self_attn.v_proj", (layers, kv_size, hidden)),
        ("self_attn.o_proj", (layers, hidden, hidden)),
        ("post_attention_layernorm", (layers, hidden)),
        ("mlp.gate_proj", (layers, ffn, hidden)),
        ("mlp.down_proj", (layers, hidden, ffn)),
        ("mlp.up_proj", (layers, ffn, hidden)),
        ("norm", (hidden,)),
        ("rotary tables", (2, header.context_length, header.head_dim // 2)),  # follow from the config
    ]
    if not header.shared_output:
        parts.append(("lm_head", (header.vocab_size, hidden)))
    expected = _HEADER.size + 4 * sum(math.prod(shape) for _, shape in parts)
    if expected != len(buffer):
        raise CheckpointError(
            f"{path.name} has {len(buffer)} bytes, its header implies {expected}",
            "give a llama2.c version 0 file (float32), complete",
        )
    position = _HEADER.size
    stored = {}
    for name, shape in parts:
        stored[name] = view_tensor(buffer, torch.float32, shape, position)
        position += 4 * math.prod(shape)
    return header, _rename(header, stored)


def _read_header(path: Path, buffer: mmap.mmap) -> _Header:
    hidden, ffn, layers, heads, kv_heads, vocab, context = _HEADER.unpack_from(buffer)
    header = _Header(hidden, ffn, layers, heads, kv_heads, abs(vocab), context, vocab > 0)
    plausible = all(0 < value < _MAX_INT32 for value in (hidden, ffn, layers, heads, kv_heads, abs(vocab), context))
    if not plausible or hidden % heads or heads % kv_heads or header.head_dim % 2:
        raise CheckpointError(f"{path.name} is not a llama2.c version 0 model", "give the .bin file of llama2.c")
    return header


def _rename(header: _Header, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors = {
        "model.embed_tokens.weight": stored["embed_tokens"],
        "model.norm.weight": stored["norm"],
    }
    if "lm_head" in stored:
        tensors["lm_head.weight"] = stored["lm_head"]
    for name, stacked in stored.items():
        if "." not in name and not name.endswith("layernorm"):
            continue
        for layer in range(header.num_layers):
            weight = stacked[layer]
            if name.endswith(("q_proj", "k_proj")):
                weight = _interleaved_to_halves(weight, header.head_dim)
            tensors[f"model.layers.{layer}.{name}.weight"] = weight.contiguous()
    return tensors


def _interleaved_to_halves(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of each head from pairs (2i, 2i + 1) to pairs (i, i + head_dim / 2)."""
    rows, columns = weight.shape
    return weight.view(rows // head_dim, head_dim // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _read_vocabulary(path: Path, vocab_size: int) -> list[tuple[str, float]]:
    """(SentencePiece piece, score) by id. Special tokens come first, then 256 single bytes, then the rest."""
    stored = _read_tokens(path, vocab_size)
    num_special, num_fixed = len(_SPECIAL), len(_SPECIAL) + 256
    if tuple(piece.strip() for piece, _ in stored[:num_special]) != _SPECIAL:
        raise CheckpointError(f"{path.name} does not start with {', '.join(_SPECIAL)}", _GIVE_TOKENIZER)
    vocabulary = [(piece, 0.0) for piece in _SPECIAL]
    for byte, (piece, score) in enumerate(stored[num_special:num_fixed]):
        if piece not in (f"<0x{byte:02X}>", chr(byte)):  # older exports wrote the character itself
            raise CheckpointError(f"{path.name}: token {num_special + byte} is not byte {byte}", _GIVE_TOKENIZER)
        vocabulary.append((f"<0x{byte:02X}>", score))
    vocabulary += [(piece.replace(" ", _SPACE), score) for piece, score in stored[num_fixed:]]
    if len({piece for piece, _ in vocabulary}) != vocab_size:
        raise CheckpointError(f"{path.name} has the same token twice", DAMAGED)
    return vocabulary


def _read_tokens(path: Path, vocab_size: int) -> list[tuple[str, float]]:
    """(text, score) as in the file: for each token a score, a length and bytes."""
    buffer = map_file(path, 4)
    position = 4  # after the length of the longest token
    tokens: list[tuple[str, float]] = []
    while len(tokens) < vocab_size and position + _TOKEN.size <= len(buffer):
        score, length = _TOKEN.unpack_from(buffer, position)
        start = position + _TOKEN.size
        position = start + length
        if length < 0 or position > len(buffer):
            break
        try:
            tokens.append((buffer[start:position].decode(), score))
        except UnicodeDecodeError:
            break
    if len(tokens) != vocab_size or position != len(buffer) or vocab_size < len(_SPECIAL) + 256:
        raise CheckpointError(f"{path.name} is not a tokenizer of {vocab_size} tokens", _GIVE_TOKENIZER)
    return tokens


def _build_tokenizer(vocabulary: list[tuple[str, float]]) -> Tokenizer:
    ids = {piece: token_id for token_id, (piece, _) in enumerate(vocabulary)}
    model = models.BPE(
        vocab=ids, merges=_merges(vocabulary, ids), unk_token=_SPECIAL[0], fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_SPECIAL[_BOS_ID]} $A",
        pair=f"{_SPECIAL[_BOS_ID]} $A {_SPECIAL[_BOS_ID]}:1 $B:1",
        special_tokens=[(_SPECIAL[_BOS_ID], _BOS_ID)],
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in _SPECIAL])
    return tokenizer


def _merges(vocabulary: list[tuple[str, float]], ids: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose result scores best; so every way to make a token, in order of its score."""
    merges = []
    for token_id, (piece, score) in enumerate(vocabulary):
        if token_id < len(_SPECIAL) + 256:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                merges.append((-score, token_id, ids[left], ids[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _config(header: _Header) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": header.hidden_size,
        "intermediate_size": header.intermediate_size,
        "num_hidden_layers": header.num_layers,
        "num_attention_heads": header.num_heads,
        "num_key_value_heads": header.num_kv_heads,
        "vocab_size": header.vocab_size,
        "max_position_embeddings": header.context_length,
        "rms_norm_eps": _NORM_EPS,
        "rope_theta": _ROPE_THETA,
        "hidden_act": "silu",
        "tie_word_embeddings": header.shared_output,
        "bos_token_id": _BOS_ID,
        "eos_token_id": _EOS_ID,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def _tokenizer_config(header: _Header) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": _SPECIAL[_BOS_ID],
        "eos_token": _SPECIAL[_EOS_ID],
        "unk_token": _SPECIAL[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": header.context_length,
    }


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
