"""The file itself: read by the gguf package and by us, whole or not there at all."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tests.unit.checkpoint.gguf_builder import write_model
from tokenmill.checkpoint.gguf import GGUFCheckpoint
from tokenmill.checkpoint.gguf_header import read_gguf_raw_pairs
from tokenmill.checkpoint.gguf_names import canonical_name, gguf_name
from tokenmill.checkpoint.gguf_writer import GGUFWriter, TensorSlot, Value, file_bytes, pack_value
from tokenmill.errors import UserError

VALUES: dict[str, Value] = {
    "a.flag": True,
    "a.count": 7,
    "a.large": 2**40,
    "a.negative": -3,
    "a.number": 0.5,
    "a.text": "naïve ▁",
    "a.texts": ["x", "", "ÿ"],
    "a.numbers": [1.5, -2.0],
    "a.integers": [3, -1],
    "a.flags": [True, False],
}
SLOTS = [
    TensorSlot("one.weight", (3, 5), "F32"),
    TensorSlot("two.weight", (2, 64), "Q8_0"),
    TensorSlot("bias", (7,), "F16"),
]


def contents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 60, (slot.nbytes,), generator=generator).to(torch.uint8) for slot in SLOTS]


def test_the_gguf_package_reads_it(tmp_path: Path) -> None:
    path, data = tmp_path / "file.gguf", contents()
    pairs = {key: pack_value(value) for key, value in VALUES.items()}
    with GGUFWriter(path, pairs, SLOTS) as writer:
        writer.append(data[0][:20])  # a tensor may come in parts
        writer.append(data[0][20:])
        for tensor in data[1:]:
            writer.append(tensor)
    assert path.stat().st_size == file_bytes(pairs, SLOTS) == writer.nbytes
    reader = gguf.GGUFReader(path)
    for key, value in VALUES.items():
        assert reader.fields[key].contents() == value, key
    for slot, tensor, bytes_ in zip(SLOTS, reader.tensors, data, strict=True):
        assert (tensor.name, tensor.tensor_type.name) == (slot.name, slot.type_name)
        assert tuple(reversed(tensor.shape.tolist())) == slot.shape
        assert np.array_equal(tensor.data.view(np.uint8).reshape(-1), bytes_.numpy())


def test_metadata_of_a_file_goes_over_byte_for_byte(tmp_path: Path) -> None:
    source, copy = tmp_path / "source.gguf", tmp_path / "copy.gguf"
    write_model(source, "qwen2")
    pairs = read_gguf_raw_pairs(source)
    with GGUFWriter(copy, pairs, []):
        pass
    assert read_gguf_raw_pairs(copy) == pairs
    assert dict(GGUFCheckpoint(source).metadata) == {
        key: field.contents() for key, field in gguf.GGUFReader(copy).fields.items() if not key.startswith("GGUF.")
    }


def test_nothing_is_left_of_a_file_that_was_not_finished(tmp_path: Path) -> None:
    path = tmp_path / "file.gguf"
    path.write_bytes(b"the one before")

    def interrupted() -> None:
        with GGUFWriter(path, {}, SLOTS) as writer:
            writer.append(contents()[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.gguf"]
    assert path.read_bytes() == b"the one before"


def test_bad_targets_are_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        GGUFWriter(tmp_path / "no" / "file.gguf", {}, SLOTS)
    with pytest.raises(UserError, match="is a directory"):
        GGUFWriter(tmp_path, {}, SLOTS)
    with pytest.raises(UserError, match=r"are free there\. free some space"):
        GGUFWriter(tmp_path / "file.gguf", {}, [TensorSlot("huge", (2**40, 2**16), "F32")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_names_go_both_ways(architecture: str) -> None:
    parts = ["attn_q", "attn_k_norm", "attn_output", "attn_norm", "ffn_norm", "ffn_down"]
    parts += ["post_attention_norm", "post_ffw_norm"] if architecture == "gemma3" else []
    names = ["token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight", "blk.0.attn_q.bias"]
    for name in [*names, *(f"blk.12.{part}.weight" for part in parts)]:
        assert gguf_name(architecture, canonical_name(architecture, name)) == name
