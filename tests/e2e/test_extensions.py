"""One file makes a new architecture, weight format or KV store run through `LLM`, on the CPU and on a GPU if any.

Each is compared with what it must equal: a forward pass written out here, the same weights in floats, float32 pages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import silu

from tests.e2e.plugins import toy_architecture, toy_format, toy_kv_store
from tokenmill import LLM, SamplingParams, UserError
from tokenmill.checkpoint.configs.families import FAMILIES
from tokenmill.model.architectures import ARCHITECTURES
from tokenmill.model.formats import FORMATS
from tokenmill.model.kvstore import KV_STORES

VOCABULARY, HIDDEN, HEADS, DIM, WIDTH, LAYERS = 97, 48, 3, 16, 80, 2
PROMPTS = [[5, 6, 7], [11, 12, 13, 14, 15, 16, 17, 18, 19], list(range(20, 60))]
# (device, kernels): the recorded program of the CPU, and the torch reference on every device.
PLACES = [("cpu", ""), ("cpu", "ref"), *([("cuda", "ref")] if torch.cuda.is_available() else [])]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
everywhere = pytest.mark.parametrize("place", PLACES, ids="-".join)


@pytest.fixture(scope="module", autouse=True)
def plugins() -> Iterator[None]:
    toy_architecture.register()
    toy_format.register()
    toy_kv_store.register()
    yield
    ARCHITECTURES.unregister(toy_architecture.NAME)
    del FAMILIES[toy_architecture.NAME]
    FORMATS.unregister("toy")
    KV_STORES.unregister("toy")


def _shapes(norms: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{norm}.weight": (HIDDEN,) for norm in norms}
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (HEADS * DIM, HIDDEN) for name in "qkv"}
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * DIM)
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (WIDTH, HIDDEN) for name in ("gate", "up")}
        shapes[f"{prefix}.mlp.down_proj.weight"] = (HIDDEN, WIDTH)
    return {**shapes, "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def _write(folder: Path, model_type: str, norms: tuple[str, ...]) -> dict[str, Tensor]:
    """A random model with a tokenizer of single characters; gives its tensors."""
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) == 2 else 0.2) + (len(shape) == 1)
        for name, shape in _shapes(norms).items()
    }
    config = {
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCABULARY]
    backend = Tokenizer(models.BPE({piece: place for place, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    return tensors


def _tokens(folder: Path, place: tuple[str, str], kv_cache_dtype: str = "float32") -> list[list[int]]:
    device, kernels = place
    options: dict[str, Any] = {"context": 128, "concurrency": 4, "kv_cache_dtype": kv_cache_dtype}
    with LLM(folder, device=device, kernels=kernels, **options) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def _rotated(x: Tensor) -> Tensor:
    """Rotary embedding of [tokens, heads, DIM], pairs (i, i + DIM / 2)."""
    frequencies = 10000.0 ** -(torch.arange(0, DIM, 2) / DIM)
    angles = torch.outer(torch.arange(x.shape[0]), frequencies)[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def _parallel_logits(tensors: dict[str, Tensor], ids: list[int]) -> Tensor:
    """What the toy architecture computes, written out: logits of the last token."""
    x = tensors["model.embed_tokens.weight"][ids]
    mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)
    for layer in range(LAYERS):

        def product(name: str, rows: Tensor, layer: int = layer) -> Tensor:
            return rows @ tensors[f"model.layers.{layer}.{name}_proj.weight"].T

        n = _norm(x, tensors[f"model.layers.{layer}.input_layernorm.weight"])
        q, k, v = (product(f"self_attn.{name}", n).view(-1, HEADS, DIM) for name in "qkv")
        scores = torch.einsum("qhd,khd->hqk", _rotated(q), _rotated(k)) * DIM**-0.5 + mask
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(ids), -1)
        x = x + product("self_attn.o", mixed) + product("mlp.down", silu(product("mlp.gate", n)) * product("mlp.up", n))
    return _norm(x[-1], tensors["model.norm.weight"]) @ tensors["lm_head.weight"].T


@everywhere
def test_an_architecture(tmp_path: Path, place: tuple[str, str]) -> None:
    tensors = _write(tmp_path, toy_architecture.NAME, ("input_layernorm",))
    expected = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(GREEDY.max_tokens):
            ids.append(int(_parallel_logits(tensors, ids).argmax()))
        expected.append(ids[len(prompt) :])
    assert _tokens(tmp_path, place) == expected


@everywhere
def test_a_weight_format(tmp_path: Path, place: tuple[str, str]) -> None:
    plain, coded = tmp_path / "plain", tmp_path / "coded"
    for folder in (plain, coded):
        _write(folder, "llama", ("input_layernorm", "post_attention_layernorm"))
    tensors = load_file(coded / "model.safetensors")
    stored, floats = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            codes, scale = toy_format.encode(stored.pop(name))
            stored |= {name.replace(".weight", ".toy_codes"): codes, name.replace(".weight", ".toy_scale"): scale}
            floats[name] = codes.float() * scale
            assert not torch.equal(floats[name], weight)
    save_file(stored, coded / "model.safetensors")
    save_file(floats, plain / "model.safetensors")
    assert _tokens(coded, place) == _tokens(plain, place)


@everywhere
def test_a_kv_store(tmp_path: Path, place: tuple[str, str]) -> None:
    _write(tmp_path, "llama", ("input_layernorm", "post_attention_layernorm"))
    assert _tokens(tmp_path, place, "toy") == _tokens(tmp_path, place)


def test_names_are_taken_once() -> None:
    with pytest.raises(UserError, match="already registered"):
        toy_kv_store.register()
