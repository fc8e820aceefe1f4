"""`tokenmill plan` and `tokenmill deploy` as typed: JSON, reports, files; bad input ends with 2 and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tokenmill.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    shown = capsys.readouterr()
    assert [line.split()[0] for line in shown.err.splitlines()] == ["error:", "try:"]
    return shown.err


def test_one_h100_and_a_70b_model(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "plan", "llama-3.1-70b", "--gpu", "h100x1", "--weights", "fp8", "--kv-cache-dtype", "fp8")
    assert 20_500 <= found["plan"]["kv_tokens"] <= 22_500


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("llama-3.1-70b", "--gpu", "h1000"), ("unknown device 'h1000'", "nearest: h100")),
        (("llama-3.1-7b", "--gpu", "h100"), ("llama-3.1-7b", "llama-3.1-70b")),
        (("llama-3.1-70b", "--gpu", "h100x1", "--weights", "bf16"), ("weights alone do not fit", "fewer bits")),
        (("llama-3.1-70b", "--gpu", "a100-40x1", "--weights", "int4"), ("refused", "KV")),
        (("llama-3.1-70b", "--gpu", "h100x4", "--itl", "1"), ("impossible", "looser limit")),
        (("llama-3.1-8b", "--gpu", "h100", "--price", "-3"), ("negative", "at least 0")),
        (("llama-3.1-8b", "--gpu", "h100", "--ttft", "-5", "--itl", "-5", "--input-len", "0x"), ("token count", "8k")),
        (("llama-3.1-8b", "--gpu", "h100", "--use", "chatt"), ("unknown workload", "chat")),
        (("llama-3.1-8b", "--gpu", "h100", "--concurrency", "4", "--rate", "2"), ("either", "one of them")),
        (("llama-3.1-8b", "--gpu", "h100", "--any-gpu"), ("both", "one of them")),
        (("llama-3.1-8b",), ("no hardware", "--gpu")),
        (("--gpu", "h100"), ("no model", "name one")),
        (("llama-3.1-8b", "--gpu", "h100x0"), ("at least one device", "h100x1")),
        (("llama-3.1-8b", "--gpu", "custom:mem=80"), ("needs at least", "bw=3350")),
        (("llama-3.1-8b", "--gpu", "h100", "--engine", "vlm"), ("unknown engine", "vllm")),
        (("llama-3.1-8b", "--gpu", "h100", "--trait", "tiny"), ("unknown trait", "fine-tuned")),
        (("llama-3.1-8b", "--gpu", "h100", "--utilization", "2"), ("utilization", "correct")),
        (("llama-3.1-8b", "--gpu", "h100", "--target-cost", "much"), ("not a share", "-60%")),
        (("llama-3.1-8b", "--gpu", "h100", "--speculation", "perhaps"), ("perhaps", "auto, on, off")),
        (("llama-3.1-8b", "--gpu", "h100", "--acceptance", "60"), ("is impossible", "from 0 to 1")),
        (("llama-3.1-8b", "--gpu", "h100", "--ep", "8"), ("no combination", "--ep")),
        (("llama-3.1-8b", "--gpu", "h100", "--daily-load", "1,x"), ("not a daily load", "one number per hour")),
        (("llama-3.1-8b", "--gpu", "h100", "--current-bill", "-5"), ("a bill of $-5", "--current-bill")),
        (("llama-3.1-8b", "--gpu", "h100", "--gpu-memory-utilization", "92"), ("memory share", "0.98")),
        (("llama-3.1-8b", "--gpu", "h100", "--prices", "no.toml"), ("cannot read no.toml", "TOML")),
        (("llama-3.1-8b", "--gpu", "h100", "--html", "no/such/x.html"), ("cannot write", "--html")),
    ],
)
def test_bad_input_is_answered_with_the_remedy(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    message = refused(capsys, "plan", *words)
    for part in parts:
        assert part in message


def test_every_part_of_the_money_has_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ("plan", "llama-3.1-8b", "--gpu", "h100", "--weights", "fp8", "--price", "2", "--concurrency", "16")
    plain = run(capsys, *fixed)["costs"]
    full = run(
        capsys, *fixed, "--owned", "--pue", "1.5", "--kwh-price", "0.2", "--overhead", "0.25", "--engineering", "730",
        "--cold-starts", "12", "--cold-start-minutes", "6", "--spot-discount", "0.5", "--daily-load", "1,1,4,2",
        "--current-bill", "5000", "--monthly-tokens", "1e8",
    )["costs"]  # fmt: skip
    parts = full["hour_of_a_device"]
    assert parts["rent"] == 1.0
    assert parts["power"] == pytest.approx(0.7 * 1.5 * 0.2)
    assert full["dollars_per_hour"] == pytest.approx(sum(parts.values()) + 1.0, abs=0.002)
    assert full["utilization"] == 0.5
    assert plain["dollars_per_hour"] == 2.0
    assert "against_bill" not in plain
    bill = full["against_bill"]
    assert (bill["bill"], bill["tokens"], bill["bill_per_million"]) == (5000, 100e6, 50.0)
    assert bill["change"] == pytest.approx(full["dollars_per_month"] / 5000 - 1, abs=0.001)


def test_search_variables_have_flags(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--max-num-seqs", "24", "--max-num-batched-tokens", "4096", "--gpu-memory-utilization", "0.9")
    drafts = ("--speculation", "on", "--draft-tokens", "3", "--acceptance", "0.8")
    found = run(capsys, "plan", "llama-3.1-8b", "--gpu", "h100", *words, *drafts)
    settings = found["plan"]["settings"]
    assert settings["max_num_seqs"] == 24
    assert (settings["max_num_batched_tokens"], settings["gpu_memory_utilization"]) == (4096, 0.9)
    assert settings["draft_tokens"] == 3
    assert found["speculation"]["assumes"] == "3 drafts, 80% accepted"
    experts = run(capsys, "plan", "qwen3-235b-a22b", "--gpu", "h200x8", "--tp", "1", "--dp", "8", "--ep", "8")["plan"]
    assert (experts["tp"], experts["data_parallel"], experts["ep"], experts["devices"]) == (1, 8, 8, 8)


def test_negative_prices_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text('[[device]]\nname = "h100"\nprice = -2.0\n', encoding="utf-8")
    assert "at least 0" in refused(capsys, "plan", "llama-3.1-8b", "--gpu", "h100", "--prices", str(prices))


def test_explain_and_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    found = run(capsys, "plan", "llama-3.1-8b", "--gpu", "h100", "--explain", "--html", str(page))
    assert {"R1", "R2", "R3", "R10"} <= {row["rule"] for row in found["explain"]}
    assert found["report"] == str(page)
    assert 'data-chart="pareto"' in page.read_text(encoding="utf-8")


def test_from_plan_to_manifests(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = run(capsys, "plan", "llama-3.1-8b", "--gpu", "h100x2", "--concurrency", "8", "--weights", "fp8")
    (tmp_path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    words = ("deploy", "meta-llama/Llama-3.1-8B", "--plan", str(tmp_path / "plan.json"), "--target", "kubernetes")
    found = run(capsys, *words, "--out", str(tmp_path / "out"))
    assert all(Path(each).is_file() for each in found["written"])
    kinds = [each["kind"] for each in yaml.safe_load_all((tmp_path / "out" / "serving.yaml").read_text())]
    assert "Deployment" in kinds
    assert found["command"][:3] == ["vllm", "serve", "meta-llama/Llama-3.1-8B"]
    assert str(plan["plan"]["settings"]["max_model_len"]) in found["command"]


def test_deploy_prints_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "llama-3.2-1b", "--gpu", "xeon-8480", "--engine", "llamacpp"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("#!/bin/sh\n")
    assert "exec llama-server" in shown


def test_deploy_of_this_engine_on_a_gpu_makes_a_gguf_file_that_its_kernels_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["deploy", "llama-3.1-8b", "--gpu", "h100", "--engine", "tokenmill", "--weights", "q4_k_m"]) == 0
    shown = capsys.readouterr().out
    assert "tokenmill quantize llama-3.1-8b --method imatrix --type Q4_K_M" in shown
    assert "--device cuda" in shown


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("llama-3.1-8b",), ("neither a plan nor hardware", "--gpu")),
        (("llama-3.1-8b", "--gpu", "h100", "--engine", "vlm"), ("unknown engine", "vllm")),
        (("llama-3.1-8b", "--gpu", "mi300x", "--engine", "tokenmill"), ("not on mi300x", "vllm")),
        (
            (
                "llama-3.1-8b",
                "--gpu",
                "h100x2",
                "--tp",
                "2",
                "--engine",
                "tokenmill",
                "--target",
                "kubernetes",
                "--nodes",
                "2",
            ),
            ("one CPU host", "vllm"),
        ),
        (("llama-3.1-8b", "--gpu", "h100", "--target", "helm"), ("unknown target", "kubernetes")),
        (("llama-3.1-8b", "--gpu", "h100", "--split", "2"), ("not a split", "1:2")),
        (("llama-3.1-8b", "--plan", "no.json"), ("cannot read no.json", "tokenmill plan")),
        (("org/some-model", "--gpu", "h100"), ("some-model", "")),
    ],
)
def test_bad_deployments_are_refused(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    message = refused(capsys, "deploy", *words)
    for part in parts:
        assert part in message


def test_a_file_that_is_no_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for text in ("[]", "{}", '{"plan": {"device": "h100"}}', "x"):
        (tmp_path / "p.json").write_text(text, encoding="utf-8")
        assert "tokenmill" in refused(capsys, "deploy", "m", "--plan", str(tmp_path / "p.json"))
