"""`eval` on real models: perplexity protocols, divergence against direct computation, tasks, the gate, bad input."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenmill import LLM
from tokenmill.cli.main import main
from tokenmill.config import EngineConfig
from tokenmill.engine.scoring import Passage, read_logits
from tokenmill.evaluate.divergence import measure_divergence
from tokenmill.evaluate.gate import GateLimits, run_gate
from tokenmill.evaluate.likelihood import continuation_logprobs
from tokenmill.evaluate.windows import TextJob, Window
from tokenmill.types import SamplingParams

ModelPath = Callable[[str], Path]
Answer = Callable[..., dict[str, Any]]
Alter = Callable[[str, Callable[[dict[str, torch.Tensor]], None]], Path]
STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."


@pytest.fixture(autouse=True)
def reference_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Logit caches of these tests go here; models stay where they are."""
    from tokenmill.checkpoint import identity
    from tokenmill.evaluate import reference_cache

    monkeypatch.setattr(reference_cache, "cache_root", lambda: tmp_path)
    monkeypatch.setattr(reference_cache, "_SPARE_BYTES", 0)  # how full the disk is is not what is tested
    monkeypatch.setattr(identity, "cache_root", lambda: tmp_path)
    return tmp_path / "references"


@pytest.fixture
def answer(capfd: pytest.CaptureFixture[str]) -> Answer:
    """The JSON of a command that ends well; in this process, as starting one costs more than the work."""

    def run(*arguments: str | Path) -> dict[str, Any]:
        code = main([*map(str, arguments), "--json"])
        output, errors = capfd.readouterr()
        assert code == 0, errors
        found: dict[str, Any] = json.loads(output)
        return found

    return run


@pytest.fixture(scope="module")
def text(data_path: Path) -> Path:
    return data_path / "text" / "stories15m-samples.eval.txt"


@pytest.fixture(scope="module")
def altered(model_path: ModelPath, tmp_path_factory: pytest.TempPathFactory) -> Alter:
    """stories15m with its weights changed by a function."""
    source = model_path("stories15m")

    def make(name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
        folder = tmp_path_factory.mktemp(name)
        shutil.copytree(source, folder, dirs_exist_ok=True)
        (file,) = folder.glob("*.safetensors")
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
        return folder

    return make


@pytest.fixture(scope="module")
def noisy(altered: Alter) -> Path:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        for name, tensor in tensors.items():
            if name.endswith("proj.weight"):
                tensor += 0.05 * tensor.std() * torch.randn(tensor.shape, generator=generator)

    return altered("noisy", change)


def job(text: Path, **options: object) -> TextJob:
    return TextJob(text, **{"context": 64, "limit_bytes": 1500, **options})  # type: ignore[arg-type]


def test_logits_read_are_those_that_choose_tokens(model_path: ModelPath) -> None:
    """Through the prefix cache, in chunks and beside others, the rows are the prompt log-probabilities."""
    with LLM(model_path("stories15m"), context=64, batch_tokens=16) as llm:
        ids = llm.parts.tokenizer.encode(STORY)
        (expected,) = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
        passages = [Passage(ids[:-1], first) for first in (0, 9, 17)]
        found = [np.full(len(ids), np.nan) for _ in passages]

        def visit(number: int, position: int, logits: torch.Tensor) -> None:
            for row, values in enumerate(logits.log_softmax(-1)):
                found[number][position + row + 1] = float(values[ids[position + row + 1]])

        read_logits(llm.parts, passages, visit)
        assert not llm.parts.core.has_work
        hits = llm.parts.core.scheduler.kv.stats.num_prefix_hit_tokens
    assert hits >= 8  # the third finds the first page or two of the first
    logprobs = [entry[token].logprob for token, entry in zip(ids[1:], expected.prompt_logprobs[1:], strict=True)]
    for values, passage in zip(found, passages, strict=True):
        assert np.isnan(values[: passage.first + 1]).all()
        assert values[passage.first + 1 :] == pytest.approx(logprobs[passage.first :], abs=1e-4)


def test_continuations_share_their_context_and_change_nothing(model_path: ModelPath) -> None:
    with LLM(model_path("stories15m"), context=64) as llm:
        encode = llm.parts.tokenizer.encode
        context = encode(STORY)
        tails = [encode(tail, add_special_tokens=False) for tail in ("One day", "One dog", "The", "x")]
        together = continuation_logprobs(llm.parts, [(context, tail) for tail in tails])
        assert llm.parts.core.scheduler.kv.stats.num_prefix_hit_tokens > len(context) // 2
        llm.parts.core.scheduler.kv.clear()
        for tail, found in zip(tails, together, strict=True):
            (alone,) = continuation_logprobs(llm.parts, [(context, tail)])
            assert found.logprob == pytest.approx(alone.logprob, abs=1e-4)
            assert (found.greedy, found.num_tokens) == (alone.greedy, len(tail))
    assert together[0].greedy
    assert not together[3].greedy


def test_protocols_agree_where_they_score_the_same_tokens(model_path: ModelPath, text: Path, answer: Answer) -> None:
    model_path("stories15m")
    common = ("eval", "perplexity", "stories15m", "--text", text, "--limit-bytes", "1500")
    disjoint = answer(*common, "--context", "64", "--protocol", "stride")
    sliding = answer(*common, "--context", "64", "--protocol", "stride", "--stride", "16")
    whole = answer(*common, "--context", "256", "--protocol", "stride", "--max-chunks", "1")
    assert set(disjoint) >= {"perplexity", "tokens", "stderr", "chunks", "context", "text_tokens"}
    assert disjoint["tokens"] == disjoint["text_tokens"] - disjoint["chunks"]
    assert sliding["tokens"] == sliding["text_tokens"] - 1
    assert whole["tokens"] == 255
    assert sliding["perplexity"] < disjoint["perplexity"]  # more context, better predictions


def test_a_model_does_not_diverge_from_itself(model_path: ModelPath, text: Path, reference_directory: Path) -> None:
    model_path("stories15m")
    config, cut = EngineConfig(), job(text, limit_bytes=600).cut
    for cached in (False, True, True):
        found = measure_divergence("stories15m", "stories15m", cut, config, context=64, cached=cached)
        assert found.kld_mean == pytest.approx(0.0, abs=1e-8 if cached else 0.0)
        assert found.top1_agreement == 1.0
        assert found.perplexity_ratio == pytest.approx(1.0, abs=1e-6)
        assert found.nan_count == 0
        assert (found.reference_cache is not None) == cached
    assert len(list(reference_directory.glob("*.logits"))) == 1
    # The C++ kernels against the plain ones: a cache made with those is the reference.
    plain = measure_divergence("stories15m", "stories15m", cut, EngineConfig(kernels="ref"), context=64)
    assert plain.reference_cache is not None
    found = measure_divergence("stories15m", plain.reference_cache, cut, config, context=64)
    assert 0 <= found.kld_mean < 1e-6
    assert found.top1_agreement == 1.0


def all_logprobs(model: Path, text: Path) -> tuple[list[Window], np.ndarray]:
    """Of every scored token over the whole vocabulary, in float64."""
    parts = []

    def visit(_number: int, _position: int, logits: torch.Tensor) -> None:
        values = logits.double().numpy()
        parts.append(values - np.log(np.exp(values).sum(-1, keepdims=True)))

    with LLM(model, context=64) as llm:
        windows = job(text, max_chunks=3).cut(llm.parts.tokenizer)
        for window in windows:
            read_logits(llm.parts, [window.passage], visit)
    return windows, np.concatenate(parts)


@pytest.mark.parametrize("cached", [True, False])
def test_divergence_is_that_of_a_direct_computation(
    model_path: ModelPath, noisy: Path, text: Path, cached: bool
) -> None:
    found = measure_divergence(
        str(noisy),
        str(model_path("stories15m")),
        job(text, max_chunks=3).cut,
        EngineConfig(),
        context=64,
        cached=cached,
    )
    windows, reference = all_logprobs(model_path("stories15m"), text)
    _, candidate = all_logprobs(noisy, text)
    divergence = (np.exp(reference) * (reference - candidate)).sum(-1)
    targets = np.concatenate([window.token_ids[window.first :] for window in windows])
    place = np.arange(len(targets))
    losses = reference[place, targets] - candidate[place, targets]
    assert found.tokens == len(targets) == 3 * 31
    close = 1e-5 if cached else 1e-9  # what the cache's uint16 cost in nats; without it, the order of sums
    assert found.kld_mean == pytest.approx(divergence.mean(), abs=close)
    assert found.kld_median == pytest.approx(np.median(divergence), abs=close)
    assert found.kld_p99 == pytest.approx(np.quantile(divergence, 0.99), abs=close)
    assert found.kld_max == pytest.approx(divergence.max(), abs=10 * close)
    assert found.top1_agreement == (reference.argmax(-1) == candidate.argmax(-1)).mean()
    assert found.perplexity_ratio == pytest.approx(np.exp(losses.mean()), rel=1e-6)
    assert found.perplexity_ratio_stderr == pytest.approx(
        np.exp(losses.mean()) * losses.std(ddof=1) / np.sqrt(len(losses)), rel=1e-5
    )
    change = np.exp(candidate[place, targets]) - np.exp(reference[place, targets])
    assert found.probability_change_rms == pytest.approx(np.sqrt((change**2).mean()), rel=1e-5)
    assert found.kld_mean > 1e-4


def test_the_gate_lets_through_what_is_good_and_nothing_else(
    model_path: ModelPath, noisy: Path, altered: Alter, text: Path
) -> None:
    reference, words = model_path("stories15m"), text.read_text()[:3000]
    same = run_gate(reference, reference, words, GateLimits(0.001), context=128)
    assert same.passed, same.reasons
    worse = run_gate(noisy, reference, words, GateLimits(0.0001), context=128)
    assert not worse.passed
    assert worse.perplexity_ratio_low < worse.perplexity_ratio < worse.perplexity_ratio_high
    assert run_gate(noisy, reference, words, GateLimits(0.5), context=128).passed

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.3.mlp.down_proj.weight"][7, 7] = float("nan")

    broken = run_gate(altered("broken", spoil), reference, [list(range(100, 140))], GateLimits(9.0), context=64)
    assert not broken.passed
    assert broken.nan_count == broken.tokens == 19
    assert "NaN" in broken.reasons[0]


def test_tasks_by_the_command(model_path: ModelPath, data_path: Path, tmp_path: Path, answer: Answer) -> None:
    model_path("stories15m")
    file, results = data_path / "tasks" / "arc_easy.jsonl", tmp_path / "results.jsonl"
    found = answer("eval", "task", "stories15m", "--task", file, "--limit", "12", "--out", results)
    assert (found["task"], found["kind"], found["n"]) == ("arc_easy", "multiple_choice", 12)
    assert found["accuracy"] == found["metrics"]["acc_norm"]["value"]
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert sum(line["metrics"]["acc_norm"] for line in lines) / 12 == pytest.approx(found["accuracy"])
    again = answer("eval", "task", "stories15m", "--task", file, "--limit", "10", "--compare", results)
    assert again["comparison"]["difference"] == 0.0
    assert (again["comparison"]["p_value"], again["comparison"]["n"]) == (1.0, 10)


def test_two_models_on_the_same_items(noisy: Path, data_path: Path, answer: Answer) -> None:
    file = data_path / "tasks" / "arc_easy.jsonl"
    found = answer("eval", "task", noisy, "--task", file, "--limit", "12", "--reference", "stories15m")
    paired = found["comparison"]
    assert (paired["with"], paired["n"], paired["confidence"]) == ("stories15m", 12, 0.95)
    assert found["accuracy"] - paired["reference_accuracy"] == pytest.approx(paired["difference"])
    assert (paired["better"] - paired["worse"]) / 12 == pytest.approx(paired["difference"])
    assert paired["low"] <= paired["difference"] <= paired["high"]
    assert paired["loss_low"] < -paired["difference"] < paired["loss_high"]


@pytest.mark.parametrize(
    ("name", "options", "metrics"),
    [
        ("lambada", ("--limit", "12"), {"acc"}),
        ("hellaswag", ("--limit", "4"), {"acc", "acc_norm"}),
        ("truthfulqa", ("--limit", "2"), {"mc1", "mc2"}),
        ("gsm8k", ("--limit", "2", "--num-shots", "1", "--max-tokens", "24"), {"strict", "flexible"}),
        ("ifeval", ("--limit", "2", "--max-tokens", "24"), {"prompt_strict", "prompt_loose"}),
        ("humaneval", ("--limit", "2", "--max-tokens", "32"), {"pass@1"}),
    ],
)
def test_every_kind_runs(
    model_path: ModelPath, data_path: Path, answer: Answer, name: str, options: tuple[str, ...], metrics: set[str]
) -> None:
    model_path("smollm2")
    found = answer("eval", "task", "smollm2", "--task", data_path / "tasks" / f"{name}.jsonl", *options)
    assert set(found["metrics"]) == metrics
    assert 0 <= found["accuracy"] <= 1
    assert found["n"] == int(options[1])
    if name.startswith("lambada"):
        assert found["accuracy"] >= 2 / 12  # 0.34 on a hundred items
        assert 1 < found["summary"]["word_perplexity"] < 1000


def test_mmlu_takes_its_examples_from_a_file(model_path: ModelPath, data_path: Path, answer: Answer) -> None:
    model_path("smollm2")
    folder = data_path / "tasks"
    found = answer(
        "eval", "task", "smollm2", "--task", folder / "mmlu_test.jsonl", "--limit", "3",
        "--shots", folder / "mmlu_dev.jsonl", "--num-shots", "2",
    )  # fmt: skip
    assert (found["kind"], found["num_shots"], found["n"]) == ("mmlu", 2, 3)


BAD = [
    ("divergence stories15m --text TEXT", "no reference", "give a model"),
    ("divergence stories15m --reference smollm2 --text TEXT --context 64", "vocabularies differ", "one vocabulary"),
    ("divergence stories15m --reference TEXT --text TEXT --context 64", "stories15m-samples.eval.txt", "give|use"),
    ("perplexity stories15m --text TEXT --context 64 --limit-bytes 100", "fewer than one chunk", "lower --context"),
    ("perplexity stories15m --text TEXT --protocol strides", "unknown protocol", "did you mean 'stride'"),
    ("task stories15m", "no task", "give a file"),
    ("task stories15m --task missing.jsonl", "missing.jsonl", "give a .jsonl"),
    ("task stories15m --task TEXT", "line 1 of", "correct that line"),
    ("task stories15m --task TEXT --kind hellaswarg", "unknown kind of task", "did you mean 'hellaswag'"),
]


@pytest.mark.parametrize(("command", "problem", "remedy"), BAD, ids=[case[0] for case in BAD])
def test_bad_input_exits_2_with_the_remedy(
    command: str, problem: str, remedy: str, model_path: ModelPath, text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model_path("stories15m")
    code = main(["eval", *command.replace("TEXT", str(text)).split(), "--json"])
    output, errors = capfd.readouterr()
    assert (code, output) == (2, ""), errors
    assert errors.startswith("error: ")
    assert [line.split()[0] for line in errors.splitlines()] == ["error:", "try:"]
    assert problem in errors
    assert re.search(remedy, errors), errors


def test_an_interrupt_leaves_nothing_behind(model_path: ModelPath, text: Path, tmp_path: Path) -> None:
    """Ctrl-C while the reference's log-probabilities are written."""
    model = model_path("stories15m")
    environment = {"TOKENMILL_CACHE": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"}
    command = ["eval", "divergence", model, "--reference", model, "--text", text, "--context", "256"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tokenmill", *map(str, command)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    folder = tmp_path / "cache" / "references"
    deadline = time.monotonic() + 300
    while not list(folder.glob("*.logits.*.new")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 130
    assert output == b""
    assert [file.name for file in folder.iterdir()] == ["hashes.json"]
