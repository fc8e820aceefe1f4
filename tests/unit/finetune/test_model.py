"""The training forward pass: losses and gradients equal to transformers and PEFT, packed or not, in any format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.tiny_models import make
from tests.peft_adapters import make_adapter
from tests.unit.quantize.test_convert import dense, quantized
from tokenmill.checkpoint.adapters.peft import read_adapter
from tokenmill.checkpoint.adapters.write import write_adapter
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import UserError
from tokenmill.finetune.data import Document, Rows, pack
from tokenmill.finetune.model import AdapterPlan, TrainableModel
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.convert import convert

CPU = torch.device("cpu")
LENGTH = 24


def rows_of(*sizes: int, length: int = LENGTH) -> Rows:
    generator = torch.Generator().manual_seed(sum(sizes))
    documents = [Document(torch.randint(3, 131, (size,), generator=generator).tolist()) for size in sizes]
    return pack(documents, length)


def model_of(path: Path, rank: int = 4) -> TrainableModel:
    return TrainableModel(
        open_checkpoint(path), CPU, LENGTH, AdapterPlan(rank, targets=("q_proj", "v_proj", "down_proj"))
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "cohere", "granite"])
def test_the_loss_is_that_of_transformers(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    make(family, tmp_path)
    rows = rows_of(LENGTH, LENGTH, LENGTH)
    model = TrainableModel(open_checkpoint(tmp_path), CPU, LENGTH)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").float().eval()
    with torch.no_grad():
        expected = reference(rows.ids, labels=rows.ids).loss
        assert float(model.text_loss(rows)) / rows.num_targets == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
def test_documents_in_one_row_do_not_see_each_other(tmp_path: Path, family: str) -> None:
    """Sliding windows, softcaps and learned positions too."""
    make(family, tmp_path)
    model = TrainableModel(open_checkpoint(tmp_path), CPU, 64)
    together, apart = rows_of(30, 20, 9, length=64), rows_of(30, 20, 9, length=30)
    assert (len(together), len(apart)) == (1, 2)
    with torch.no_grad():
        assert float(model.text_loss(together)) == pytest.approx(float(model.text_loss(apart)), rel=1e-5)


def test_gradients_are_those_of_peft(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = dense(tmp_path / "base")
    model, rows = model_of(base), rows_of(LENGTH, LENGTH)
    for parameter in model.parameters().values():
        parameter.data += 0.02 * torch.randn_like(parameter)
    write_adapter(model.adapter("start", "base", ""), tmp_path / "start")
    (model.text_loss(rows) / rows.num_targets).backward()
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "start", is_trainable=True)
    peft(rows.ids, labels=rows.ids).loss.backward()
    for name, parameter in model.parameters().items():
        module, side = name.rsplit(".", 1)
        theirs = peft.get_submodule(f"base_model.model.{module}")
        expected = getattr(theirs, f"lora_{side.upper()}")["default"].weight.grad
        torch.testing.assert_close(parameter.grad, expected, atol=1e-6, rtol=1e-3, msg=name)


@pytest.mark.parametrize("kind", ["gptq", "awq", "gguf"])
def test_a_quantized_base_trains_as_its_floats_do(tmp_path: Path, kind: str) -> None:
    """Codes expanded in the forward pass give the losses and gradients of the expanded model."""
    if kind == "gguf":
        from tokenmill.quantize.ggml.export import quantize_gguf

        path = tmp_path / "base.gguf"
        quantize_gguf(open_checkpoint(dense(tmp_path / "plain")), path, "Q4_0")
    else:
        path = quantized(tmp_path / "base", kind, Scheme("int", 4, 32, symmetric=kind == "gptq"))
    convert(path, tmp_path / "floats", "safetensors")
    codes, floats, rows = model_of(path), model_of(tmp_path / "floats"), rows_of(LENGTH, 15, 8)
    assert codes.is_quantized
    assert not floats.is_quantized
    losses = []
    for model in (codes, floats):
        model.factors["model.layers.1.mlp.down_proj"].b.data.fill_(0.01)
        losses.append(model.text_loss(rows))
        losses[-1].backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-4)
    a, b = (model.adapter("x", "", "").matrices for model in (codes, floats))
    assert a.keys() == b.keys()
    first, second = (model.factors["model.layers.0.self_attn.v_proj"].b.grad for model in (codes, floats))
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-4)


def test_rows_of_a_gguf_go_back_to_their_order(tmp_path: Path) -> None:
    base = dense(tmp_path / "base")
    convert(base, tmp_path / "base.gguf", "gguf")
    ours = TrainableModel(open_checkpoint(tmp_path / "base.gguf"), CPU, LENGTH, AdapterPlan(4, targets=("q_proj",)))
    theirs = TrainableModel(open_checkpoint(base), CPU, LENGTH, AdapterPlan(4, targets=("q_proj",)))
    rows = rows_of(LENGTH)
    for model in (ours, theirs):
        model.text_loss(rows).backward()
        for factors in model.factors.values():
            factors.b.data -= factors.b.grad
    for name, matrix in theirs.adapter("x", "", "").matrices.items():
        torch.testing.assert_close(ours.adapter("x", "", "").matrices[name].b, matrix.b, rtol=1e-3, atol=1e-4)


def test_the_loss_in_pieces_is_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = model_of(dense(tmp_path / "base")), rows_of(LENGTH, LENGTH)
    whole = model.text_loss(rows)
    whole.backward()
    gradient = model.factors["model.layers.0.self_attn.q_proj"].b.grad.clone()
    model.factors["model.layers.0.self_attn.q_proj"].b.grad = None
    monkeypatch.setattr("tokenmill.finetune.model._LOGITS_AT_ONCE", 131 * 7)
    pieces = model.text_loss(rows)
    pieces.backward()
    torch.testing.assert_close(pieces, whole)
    torch.testing.assert_close(model.factors["model.layers.0.self_attn.q_proj"].b.grad, gradient)


def test_the_divergence_from_itself_is_nothing(tmp_path: Path) -> None:
    base = dense(tmp_path / "base")
    model, teacher, rows = model_of(base), TrainableModel(open_checkpoint(base), CPU, LENGTH), rows_of(LENGTH)
    assert float(model.divergence(rows, teacher).detach()) == pytest.approx(0, abs=1e-3)
    model.factors["model.layers.0.self_attn.q_proj"].b.data.fill_(0.3)
    assert float(model.divergence(rows, teacher).detach()) > 0.01
    with model.base(), torch.no_grad():
        assert float(model.divergence(rows, teacher)) == pytest.approx(0, abs=1e-3)


def test_what_is_not_trained_is_refused(tmp_path: Path) -> None:
    base = dense(tmp_path / "base")
    with pytest.raises(UserError, match="--rank 65 is more than"):
        model_of(base, rank=65)
    with pytest.raises(UserError, match=r"no module is called qproj"):
        TrainableModel(open_checkpoint(base), CPU, LENGTH, AdapterPlan(targets=("qproj",)))
    (tmp_path / "latent").mkdir()
    make("deepseek_v2", tmp_path / "latent")
    with pytest.raises(UserError, match="latent layers, which `finetune` does not train"):
        TrainableModel(open_checkpoint(tmp_path / "latent"), CPU, LENGTH)


def test_an_adapter_of_peft_and_ours_have_one_form(tmp_path: Path) -> None:
    base = dense(tmp_path / "base")
    make_adapter(base, tmp_path / "peft")
    ours = model_of(base).adapter("ours", "base", "")
    theirs = read_adapter(tmp_path / "peft")
    assert {name: each.shape for name, each in ours.matrices.items()} == {
        name: each.shape for name, each in theirs.matrices.items()
    }
