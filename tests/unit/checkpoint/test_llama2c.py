"""llama2.c import: a tiny model built here, and the real stories15m through transformers."""

from __future__ import annotations

import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tokenmill.checkpoint.llama2c import convert
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import CheckpointError

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, CONTEXT = 16, 24, 2, 4, 2, 32
PIECES = [" ", "a", "b", "ab", " ab", "abb", " b", " a"]  # after specials and bytes; later ones score lower
VOCAB = 3 + 256 + len(PIECES)


def write_weights(path: Path, shared: bool) -> dict[str, np.ndarray]:
    head = HIDDEN // HEADS
    shapes = {
        "embedding": (VOCAB, HIDDEN),
        "attention_norm": (LAYERS, HIDDEN),
        "q": (LAYERS, HIDDEN, HIDDEN),
        "k": (LAYERS, KV_HEADS * head, HIDDEN),
        "v": (LAYERS, KV_HEADS * head, HIDDEN),
        "o": (LAYERS, HIDDEN, HIDDEN),
        "ffn_norm": (LAYERS, HIDDEN),
        "gate": (LAYERS, FFN, HIDDEN),
        "down": (LAYERS, HIDDEN, FFN),
        "up": (LAYERS, FFN, HIDDEN),
        "norm": (HIDDEN,),
        "tables": (CONTEXT, head),
    } | ({} if shared else {"output": (VOCAB, HIDDEN)})
    generator = np.random.default_rng(0)
    values = {name: generator.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    header = struct.pack("<7i", HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, VOCAB if shared else -VOCAB, CONTEXT)
    path.write_bytes(header + b"".join(value.tobytes() for value in values.values()))
    return values


def write_tokenizer(path: Path, old_bytes: bool) -> None:
    single = [chr(byte) if old_bytes else f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", "\n<s>\n", "\n</s>\n", *single, *PIECES]
    data = struct.pack("<i", 27)
    for index, piece in enumerate(pieces):
        raw = piece.encode()
        data += struct.pack("<fi", -float(max(index - 259, 0)), len(raw)) + raw
    path.write_bytes(data)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    return tmp_path / "model.bin", tmp_path / "tokenizer.bin", tmp_path / "out"


def llama2c_logits(values: dict[str, np.ndarray], token_ids: list[int]) -> np.ndarray:
    """The forward pass as llama2.c computes it, with rotary pairs next to each other. Logits of the last token."""
    head, group = HIDDEN // HEADS, HEADS // KV_HEADS
    x = values["embedding"][token_ids].astype(np.float64)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight

    def rotate(x: np.ndarray) -> np.ndarray:  # [T, heads, head]
        angle = np.arange(len(x))[:, None] / 10000.0 ** (np.arange(0, head, 2) / head)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

    for layer in range(LAYERS):
        y = norm(x, values["attention_norm"][layer])
        q = rotate((y @ values["q"][layer].T).reshape(-1, HEADS, head))
        k = rotate((y @ values["k"][layer].T).reshape(-1, KV_HEADS, head)).repeat(group, 1)
        v = (y @ values["v"][layer].T).reshape(-1, KV_HEADS, head).repeat(group, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(head) + np.triu(np.full((len(x), len(x)), -np.inf), 1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), HIDDEN) @ values["o"][layer].T
        y = norm(x, values["ffn_norm"][layer])
        gate = y @ values["gate"][layer].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ values["up"][layer].T)) @ values["down"][layer].T
    return norm(x[-1], values["norm"]) @ values.get("output", values["embedding"]).T


@pytest.mark.parametrize("shared", [True, False])
def test_transformers_computes_what_llama2c_does(files: tuple[Path, Path, Path], shared: bool) -> None:
    weights, tokenizer, out = files
    values = write_weights(weights, shared)
    write_tokenizer(tokenizer, old_bytes=False)
    convert(weights, tokenizer, out)
    assert sorted(path.name for path in out.parent.iterdir()) == ["model.bin", "out", "tokenizer.bin"]
    model = AutoModelForCausalLM.from_pretrained(out)
    token_ids = [1, 5, 260, 17, 261]
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, -1].numpy()
    np.testing.assert_allclose(logits, llama2c_logits(values, token_ids), rtol=1e-3, atol=1e-4)
    description = open_checkpoint(out).description
    assert (description.tie_embeddings, description.vocab_size) == (shared, VOCAB)
    assert (description.num_kv_heads, description.context_length) == (KV_HEADS, CONTEXT)


@pytest.mark.parametrize("old_bytes", [True, False], ids=["bytes as characters", "bytes as <0xNN>"])
def test_tokenizer(files: tuple[Path, Path, Path], old_bytes: bool) -> None:
    weights, tokenizer, out = files
    write_weights(weights, shared=True)
    write_tokenizer(tokenizer, old_bytes)
    convert(weights, tokenizer, out)
    loaded = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert loaded.get_vocab_size() == VOCAB
    assert loaded.encode("ab").tokens == ["<s>", "▁ab"]
    assert loaded.encode("abb").tokens == ["<s>", "▁ab", "b"]  # "ab" is joined first: it scores best
    assert loaded.encode("é").ids == [1, 259, 3 + 0xC3, 3 + 0xA9]
    assert loaded.decode(loaded.encode("ab b\né").ids) == "ab b\né"


@pytest.mark.parametrize(
    ("victim", "damage", "message"),
    [
        ("model", lambda data: data[:-4], "its header implies"),
        ("model", lambda data: b"GGUF" + data[4:], "not a llama2.c"),
        ("model", lambda data: data[:1], "only 1 bytes"),
        ("tokenizer", lambda data: data[:-3], "not a tokenizer"),
        ("tokenizer", lambda data: data.replace(b"<unk>", b"<unq>"), "<unk>"),
        ("tokenizer", lambda data: data.replace(b"0x41", b"0x42"), "byte 65"),
        ("tokenizer", lambda data: data[:-2] + b" b", "twice"),
    ],
)
def test_bad_input_leaves_nothing_behind(
    files: tuple[Path, Path, Path], victim: str, damage: Callable[[bytes], bytes], message: str
) -> None:
    weights, tokenizer, out = files
    write_weights(weights, shared=True)
    write_tokenizer(tokenizer, old_bytes=False)
    path = weights if victim == "model" else tokenizer
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=message):
        convert(weights, tokenizer, out)
    assert sorted(file.name for file in out.parent.iterdir()) == ["model.bin", "tokenizer.bin"]


def test_existing_output_is_not_overwritten(files: tuple[Path, Path, Path]) -> None:
    weights, tokenizer, out = files
    write_weights(weights, shared=True)
    write_tokenizer(tokenizer, old_bytes=False)
    out.mkdir()
    (out / "mine").touch()
    with pytest.raises(CheckpointError, match="already exists"):
        convert(weights, tokenizer, out)


def test_stories15m_tells_a_story(model_path: Callable[[str], Path]) -> None:
    path = model_path("stories15m")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    prompt = tokenizer("Once upon a time", return_tensors="pt")
    assert prompt.input_ids.tolist() == [[1, 9038, 2501, 263, 931]]
    output = model.generate(**prompt, do_sample=False, max_new_tokens=24)
    text = tokenizer.decode(output[0], skip_special_tokens=True)
    assert text.startswith("Once upon a time, there was a little girl named Lily. She loved to play outside")


def test_stories15m_tokenizes_like_llama(model_path: Callable[[str], Path], data_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_path("stories15m") / "tokenizer.json"))
    with tarfile.open(data_path / "tokenizers" / "llamacpp_vocab_vectors.tar.gz") as archive:
        contents = {}
        for kind in ("inp", "out"):
            member = archive.extractfile(f"ggml-vocab-llama-spm.gguf.{kind}")
            assert member is not None
            contents[kind] = member.read().decode()
    texts = contents["inp"].split("\n__ggml_vocab_test__\n")
    expected = [[int(number) for number in line.split()] for line in contents["out"].splitlines()]
    cases = [(text, ids) for text, ids in zip(texts, expected, strict=False) if text]
    assert len(cases) > 30
    for text, ids in cases:
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
