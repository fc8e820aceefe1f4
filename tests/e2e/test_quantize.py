"""`tokenmill quantize` from the command line: the report, the files, the refusals; and the result runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenmill.cli.main import main

_STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_quantize_then_run(
    model_path: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = str(model_path("stories15m")), tmp_path / "q"
    text = tmp_path / "story.txt"
    text.write_text(_STORY * 20)
    flags = ["--bits", "4", "--group-size", "32", "--calibration", str(text), "--calibration-samples", "6"]
    flags += ["--calibration-length", "64", "--gate-text", str(text), "--max-quality-loss", "200%"]
    code, printed, said = _run(capsys, "quantize", model, "--method", "gptq", *flags, "--out", str(out), "--json")
    assert code == 0, said
    report = json.loads(printed)
    assert set(report) >= {"path", "bits_per_weight", "bytes", "seconds", "peak_memory_bytes", "fidelity"}
    assert report["bits_per_weight"] == pytest.approx(4.5, abs=0.01)
    assert report["fidelity"]["gate"] == "passed"
    assert report["fidelity"]["perplexity_ratio"] > 0
    assert "of memory" in said
    assert "## Measured" in (out / "README.md").read_text()
    code, printed, said = _run(
        capsys, "run", str(out), "Once upon a time", "--raw", "--max-tokens", "8", "--temperature", "0", "--json"
    )
    assert code == 0, said
    assert json.loads(printed)["text"].startswith(", there was a")
    code, _, said = _run(capsys, "quantize", model, "--out", str(out))
    assert code == 2
    assert "exists" in said


def test_gguf_with_importance(
    model_path: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = str(model_path("stories15m")), tmp_path / "q.gguf"
    text = tmp_path / "story.txt"
    text.write_text(_STORY * 20)
    flags = ["--method", "imatrix", "--type", "Q4_K_M", "--calibration", str(text), "--calibration-samples", "4"]
    code, printed, said = _run(
        capsys, "quantize", model, *flags, "--calibration-length", "64", "--no-gate", "--out", str(out), "--json"
    )
    assert code == 0, said
    report = json.loads(printed)
    assert (report["format"], report["type"], report["bytes"]) == ("gguf", "Q4_K_M", out.stat().st_size)
    assert (tmp_path / "q.gguf.md").is_file()
    code, printed, said = _run(
        capsys, "run", str(out), "Once upon a time", "--raw", "--max-tokens", "6", "--temperature", "0", "--json"
    )
    assert code == 0, said
    assert json.loads(printed)["text"].startswith(", there was")


def test_four_bits_of_a_tiny_model_are_refused_by_default(
    model_path: Callable[[str], Path],
    data_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both figures with their limits, what was kept and the remedy; with a limit that allows it, the same is kept."""
    text = tmp_path_factory.mktemp("text") / "story.txt"
    text.write_text((data_path / "text" / "stories15m-samples.eval.txt").read_text()[:1200])
    command = ["quantize", str(model_path("stories15m")), "--type", "Q4_0", "--gate-text", str(text)]
    command += ["--out", str(tmp_path / "q.gguf")]
    code, _, said = _run(capsys, *command)
    assert code == 2
    assert "limit 5.00%; divergence" in said
    assert "limit 0.09758 nats" in said
    assert "raise --max-quality-loss and --max-kld" in said
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "q.gguf.rejected", "q.gguf.rejected.md", "q.gguf.rejected.reason.txt",
    ]  # fmt: skip
    code, printed, said = _run(capsys, *command, "--max-loss", "100%", "--max-kld", "2", "--json")
    assert code == 0, said
    fidelity = json.loads(printed)["fidelity"]
    assert (fidelity["gate"], fidelity["max_quality_loss"], fidelity["max_kld"]) == ("passed", 1.0, 2.0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--method", "gptqq"], "did you mean 'gptq'"),
        (["--group-size", "128"], "use --group-size 96"),
        (["--option", "order"], "write it like order=static"),
        (["--ignore", "model.layers.0.mlp.gate"], "the nearest are"),
        (["--method", "nf4", "--group-size", "32", "--format", "gptq"], "gptq cannot hold"),
        (["--max-quality-loss", "much"], "write it like 1%"),
        (["--memory", "10MiB", "--type", "Q8_0"], "or --no-gate"),
        (["--memory", "10MiB", "--calibration-samples", "2"], "give --memory"),
        (["--size", "10MB"], "use --method mixed"),
        (["--format", "gguf", "--method", "imatrix", "--size", "10MB"], "use --method mixed"),
        (["--format", "gguf", "--method", "mixed", "--size", "1MB"], "give a larger --size"),
        (["--format", "gguf", "--method", "mixed", "--option", "kinds=Q4_K"], "types"),
        (["--format", "gguf", "--tune-scales", "5"], "does not go with a GGUF"),
        (["--format", "gguf", "--low-rank", "4"], "does not go with a GGUF"),
        (["--low-rank", "4", "--tune-scales", "5"], "leave one of them out"),
        (["--format", "gguf", "--train-codes", "5"], "does not go with a GGUF"),
        (["--tune-scales", "4", "--train-codes", "5"], "leave --tune-scales out"),
        (["--method", "mxfp4", "--train-codes", "5"], "use gptq or qat"),
        (["--format", "gguf", "--method", "gptq"], "use --method rtn, imatrix or mixed"),
        (["--format", "gguf", "--type", "Q9_K"], "Q9_K"),
        (["--recipe", "none.yaml"], "cannot read"),
    ],
)
def test_bad_input(
    flags: list[str],
    message: str,
    model_path: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, printed, said = _run(capsys, "quantize", str(model_path("stories15m")), *flags, "--out", str(tmp_path / "q"))
    assert (code, printed) == (2, "")
    assert message in said
    assert [line.split()[0] for line in said.splitlines()] == ["error:", "try:"]
    assert not list(tmp_path.iterdir())
