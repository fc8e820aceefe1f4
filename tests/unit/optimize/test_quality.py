"""The judge on a real model: the same passes, each kind of damage is refused by name, engines are loaded once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenmill.config import EngineConfig
from tokenmill.engine.llm import LLM
from tokenmill.errors import UserError
from tokenmill.evaluate import reference_cache
from tokenmill.model.formats.quantized import Scheme
from tokenmill.optimize import generation, quality
from tokenmill.optimize.quality import QualityJudge, QualityPlan
from tokenmill.optimize.results import Proof
from tokenmill.quantize.methods.rtn import round_to_nearest

_PLAIN = EngineConfig(kv_cache_dtype="float32", device="cpu")
_CONTEXT = 64


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, model_path: Callable[[str], Path]) -> Iterator[Path]:
    """References of these tests go here; the model is found in the ordinary cache first."""
    model_path("stories15m")
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setattr(reference_cache, "cache_root", lambda: folder)
        patch.setattr(reference_cache, "_SPARE_BYTES", 0)
        patch.setattr(generation, "_JSON_TOKENS", 16)  # this model writes no JSON, however long it may
        yield folder


@pytest.fixture(scope="module")
def source(model_path: Callable[[str], Path]) -> Path:
    return model_path("stories15m")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory, data_path: Path) -> Path:
    """Last words of sentences that the model's own stories hold: it knows a good part of them."""
    text = (data_path / "text" / "stories15m-samples.eval.txt").read_text()
    sentences = [each.strip() for each in text.split(".") if 6 <= len(each.split()) <= 16 and each.strip().isascii()]
    items = []
    for sentence in sentences[:80]:
        words = sentence.split()
        items.append({"context": " ".join(words[:-1]), "continuation": f" {words[-1]}"})
    path = tmp_path_factory.mktemp("task") / "last_words.jsonl"
    path.write_text("".join(f"{json.dumps(item)}\n" for item in items))
    return path


@pytest.fixture(scope="module")
def plan(data_path: Path, task: Path) -> QualityPlan:
    text = (data_path / "text" / "stories15m-samples.eval.txt").read_text()
    return QualityPlan(
        text, _CONTEXT, 2, 6, 0.05, None, (task,), 0.05, long_contexts=(4096,), num_prompts=4, answer_tokens=24
    )


@pytest.fixture(scope="module")
def judge(plan: QualityPlan, source: Path) -> QualityJudge:
    return QualityJudge(plan, source, _PLAIN)


@pytest.fixture(scope="module")
def damaged(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def make(name: str, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
        folder = tmp_path_factory.mktemp(name)
        shutil.copytree(source, folder, dirs_exist_ok=True)
        (file,) = folder.glob("*.safetensors")
        tensors = {name: change(name, tensor).contiguous() for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
        return folder

    return make


def _names(proof: Proof) -> set[str]:
    return {check.name for check in proof.checks if check.refusal}


def test_the_baseline_itself_passes_and_each_engine_is_loaded_once(
    judge: QualityJudge, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[tuple[str, str]] = []

    class Counted(LLM):
        def __init__(self, model: str, config: EngineConfig) -> None:
            loads.append((Path(model).name, str(config.kv_cache_dtype)))
            super().__init__(model, config)

    monkeypatch.setattr(quality, "LLM", Counted)
    proof = judge.prove(source, _PLAIN)
    assert proof.refusals == ()
    assert proof.quality is not None
    assert abs(proof.quality.loss) < 1e-4
    assert proof.quality.kld_mean < 1e-4
    assert [(score.name, score.accuracy == score.reference_accuracy) for score in proof.tasks] == [("last_words", True)]
    assert proof.tasks[0].reference_accuracy > 0.2
    assert (proof.tasks[0].items, proof.tasks[0].note) == (80, "")
    assert [kv for _, kv in loads] == ["float32", "float16", "float32"]  # reference, control, candidate
    json_check = next(check for check in proof.checks if check.name == "invalid JSON")
    assert json_check.note.startswith("skipped: the baseline answers 0 of")
    loads.clear()
    again = QualityJudge(judge.plan, source, _PLAIN)  # another process would find the same files
    assert again.prove(source, _PLAIN) == proof
    assert [kv for _, kv in loads] == ["float32"]


def test_a_first_look_uses_the_same_reference(judge: QualityJudge, source: Path) -> None:
    found = judge.check(source, _PLAIN)
    assert found.tokens == 2 * (_CONTEXT - _CONTEXT // 8)
    assert found.kld_mean < 1e-4


def test_weights_of_two_bits_are_refused_by_name(judge: QualityJudge, damaged: Callable[..., Path]) -> None:
    def round_(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not name.endswith("proj.weight"):
            return tensor
        return round_to_nearest(tensor.float(), Scheme("int", 2, 32)).dequantize().to(tensor.dtype)

    proof = judge.prove(damaged("two_bits", round_), _PLAIN)
    assert any("perplexity grows" in reason for reason in proof.refusals)
    assert any("accuracy on last_words is" in reason for reason in proof.refusals)
    assert "divergence" in _names(proof)
    assert len(set(proof.refusals)) == len(proof.refusals)


def test_a_model_that_loops_is_refused_by_its_text(judge: QualityJudge, damaged: Callable[..., Path]) -> None:
    """Without attention and MLP, the next token depends on the last one alone."""

    def cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor) if name.endswith(("o_proj.weight", "down_proj.weight")) else tensor

    proof = judge.prove(damaged("loops", cut), _PLAIN)
    assert {"divergence", "repetition"} <= _names(proof)


def test_logits_that_are_not_finite_end_the_proof(judge: QualityJudge, damaged: Callable[..., Path]) -> None:
    def spoil(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.full_like(tensor, torch.nan) if name == "model.norm.weight" else tensor

    proof = judge.prove(damaged("nan", spoil), _PLAIN)
    assert "NaN or infinite" in proof.refusals[0]
    assert proof.tasks == ()


def test_a_kv_cache_of_two_bits_and_a_budget_spend_the_same_budget(judge: QualityJudge, source: Path) -> None:
    """Weights are the baseline's: what is measured is the KV cache, on short windows and on the longest context."""
    for config in (
        EngineConfig(kv_cache_dtype="turboquant2", kv_native_layers=0, device="cpu"),
        EngineConfig(kv_cache_dtype="float32", kv_budget_policy="streaming_llm", kv_budget=32, device="cpu"),
    ):
        proof = judge.prove(source, config)
        long = next(check for check in proof.checks if check.name == "divergence at 256")
        assert long.refusal in proof.refusals
        assert long.value > long.limit == pytest.approx(judge.plan.kld_limit)
        assert any(check.name == "retrieval at 256" for check in proof.checks)


def test_limits_in_words_and_bad_plans(plan: QualityPlan, source: Path, tmp_path: Path) -> None:
    assert plan.limit_words == (
        "perplexity at most +5.00%, mean divergence at most 0.09758 nats (goes with that limit), a task at most -5.0%"
    )
    with pytest.raises(UserError, match="task loss"):
        QualityPlan("text", 64, 1, 1, 0.01, None, max_task_loss=-1)
    (tmp_path / "bad.jsonl").write_text('{"colour": 1}\n')
    with pytest.raises(UserError, match="no kind of task"):
        QualityJudge(QualityPlan(plan.text, 64, 1, 2, 0.01, 0.02, (tmp_path / "bad.jsonl",)), source, _PLAIN)
