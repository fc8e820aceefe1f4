"""Mixed precision in a GGUF: within its bytes, better than the mix of the same size, and what cannot be is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity import tiny_models
from tests.unit.quantize.ggml.test_export import save_tokenizer
from tokenmill.checkpoint.gguf_header import read_gguf_raw_pairs
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import UserError
from tokenmill.quantize.divergence import BlockWeights, DivergenceProbe
from tokenmill.quantize.finish import GateRequest
from tokenmill.quantize.ggml.blocks import BLOCK_TYPES, dequantize, quantize
from tokenmill.quantize.gguf_job import GGUFJob, run_gguf_job
from tokenmill.quantize.source import SourceModel

LENGTH = 24


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> GGUFJob:
    """A tiny llama with rows of 256, so that every type fits."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("model")
    common: dict[str, Any] = tiny_models._COMMON | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
    }
    tiny_models.CONFIGS["llama-256"] = lambda: LlamaConfig(**common)
    try:
        tiny_models.make("llama-256", folder)
    finally:
        del tiny_models.CONFIGS["llama-256"]
    save_tokenizer(folder, "qwen2")
    text = folder / "text.txt"
    text.write_text("the cat sat on a mat and then that hat chat " * 80)
    return GGUFJob(str(folder), folder / "out.gguf", "mixed", "Q3_K_M", None, text, 8, LENGTH, "cpu")


def run(job: GGUFJob) -> dict[str, Any]:
    return run_gguf_job(job, GateRequest(enabled=False, threads=1), 0, lambda *_: None)


def divergence(job: GGUFJob, path: Path) -> float:
    source = SourceModel(open_checkpoint(Path(job.model)), LENGTH)
    ids = torch.randint(3, 60, (8, LENGTH), generator=torch.Generator().manual_seed(2))
    probe = DivergenceProbe(source, ids, BlockWeights(source, 1 << 30))
    quantized = SourceModel(open_checkpoint(path), LENGTH)
    names = [*quantized.edge_names(), *quantized.layer_linears()]
    return probe.measure([{name: quantized.read_edge(name) for name in names}])[0]


def test_weights_that_were_on_a_types_grid_are_not_taken_for_worthless(job: GGUFJob, tmp_path: Path) -> None:
    """Rounding such a matrix to that type alone changes nothing, which says nothing of the other types."""
    model = tmp_path / "model"
    shutil.copytree(job.model, model, ignore=shutil.ignore_patterns("out*", "plain*", "mixed*"))
    tensors = load_file(model / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith(("o_proj.weight", "gate_proj.weight", "up_proj.weight")):
            tensors[name] = dequantize("Q4_K", quantize("Q4_K", weight.float(), None)).to(weight.dtype)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    types = tuple(name for name in BLOCK_TYPES if name not in ("Q5_K", "Q6_K", "Q8_0"))
    there = replace(job, model=str(model), type_name="Q4_K_M")
    plain = replace(there, method="imatrix", out=tmp_path / "plain.gguf")
    mixed = replace(there, out=tmp_path / "mixed.gguf", types=types)
    theirs, ours = run(plain), run(mixed)
    assert ours["bytes"] <= theirs["bytes"]
    found = {layer["name"]: layer["type_name"] for layer in ours["layers"]}
    assert not {"TQ1_0", "TQ2_0", "Q2_K"} & set(found.values()), found


def test_fewer_bytes_and_less_divergence_than_the_mix(job: GGUFJob, tmp_path: Path) -> None:
    plain = replace(job, method="imatrix", out=tmp_path / "plain.gguf")
    mixed = replace(job, out=tmp_path / "mixed.gguf")
    theirs, ours = run(plain), run(mixed)
    assert ours["bytes"] <= theirs["bytes"]
    assert divergence(job, mixed.out) < 0.85 * divergence(job, plain.out)
    assert len({layer["type_name"] for layer in ours["layers"]}) > 2
    assert ours["mixed"]["measured"] > 0
    assert read_gguf_raw_pairs(mixed.out)


def test_a_size_and_a_limit_are_kept(job: GGUFJob, tmp_path: Path) -> None:
    small = run(replace(job, type_name="", size=500_000, out=tmp_path / "small.gguf"))
    assert small["bytes"] <= 500_000
    within = run(replace(job, type_name="", max_kld=0.05, out=tmp_path / "within.gguf"))
    assert within["mixed"]["measured"] <= 0.05
    only = replace(job, types=("Q4_0", "Q8_0"), type_name="", size=800_000, out=tmp_path / "only.gguf")
    assert {layer["type_name"] for layer in run(only)["layers"]} <= {"Q4_0", "Q8_0", "F32"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": 1000}, "too small"),
        ({"method": "imatrix", "size": 10**6}, "--method mixed"),
        ({"size": 10**6, "max_kld": 0.1}, "not both"),
        ({"types": ("Q9_K",)}, "Q9_K"),
    ],
)
def test_bad_requests_are_refused(change: dict[str, Any], words: str, job: GGUFJob, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        run(replace(job, out=tmp_path / "out.gguf", **change))
    assert not list(tmp_path.iterdir())
