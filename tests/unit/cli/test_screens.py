"""Screens from recorded results: the answer first, the lines people look for, no more than a screen of plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.unit.optimize import outcomes
from tokenmill.cli.render.draw import PLAIN_WIDTH, as_text
from tokenmill.cli.render.screen import Screen
from tokenmill.cli.screens.bench import latency_screen, serve_screen, throughput_screen
from tokenmill.cli.screens.calibration import calibrate_screen, validate_screen
from tokenmill.cli.screens.convert import convert_screen
from tokenmill.cli.screens.deploy import deploy_screen
from tokenmill.cli.screens.doctor import doctor_screen
from tokenmill.cli.screens.evaluation import divergence_screen, perplexity_screen, task_screen
from tokenmill.cli.screens.inspection import inspect_screen
from tokenmill.cli.screens.optimize import optimize_screen
from tokenmill.cli.screens.plan import plan_screen
from tokenmill.cli.screens.pull import pull_screen
from tokenmill.cli.screens.quantize import quantize_screen
from tokenmill.cli.screens.simulate import simulate_screen
from tokenmill.cli.screens.train_draft import train_draft_screen
from tokenmill.optimize.results import Outcome

_RECORDED = Path(__file__).parent / "recorded"
_LINES = 46  # about one screen
_FULL = "#" * 30


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_RECORDED / f"{name}.json").read_text())
    return found


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[Any], Screen]
    headline: str
    lines: Sequence[str]


CASES = [
    Case(
        "doctor",
        doctor_screen,
        "Ready: stories15m answered with 4 tokens, C++ kernels (neon_dotprod)",
        [
            "  processor      Neoverse-N1, 2 cores (Linux aarch64)",
            "  memory in use  514 MiB of 23.5 GiB (2%)                 #.............................",
            "  smollm2     93.8 MiB  models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ],
    ),
    Case(
        "inspect",
        inspect_screen,
        "smollm2: llama, 134.5 M parameters, 92.1 MiB at 5.74 bits per weight, context of 8,192 tokens",
        [
            "  Q4_1         210     106.2 M  63.3 MiB    69%  #####################.........",
            "  KV cache   360 MiB  80%  ########################......",
            "  cpu (Q4_1 neon_dotprod)  linear Q4_1",
            "- executor declined: cuda_graph: runs on NVIDIA GPUs, not on cpu",
        ],
    ),
    Case("pull", lambda result: pull_screen(result, "smollm2"), "smollm2 is ready: 93.8 MiB", []),
    Case("convert", convert_screen, "Wrote out/stories.gguf: gguf, 58.6 MiB, lossless", ["  F32 to F32        43"]),
    Case(
        "plan",
        plan_screen,
        "2 x h100-sxm, int4-g128 weights, 8-bit KV, vllm: $1.19/M output tokens, TTFT 310 ms, ITL 23.0 ms",
        [
            "  time to first token       310 ms  179 to 510 ms              table scaled",
            "  weights      37.0 GiB   51%  ###############...............",
            "  chosen         2  x1 tp1 int4-g128 kv8     $1.19  310 ms  23.0 ms  1,326      5.5%  kept",
            "- cheapest of 11 plans that keep every promise",
            "+ cheaper than open-model host llama-3.1-70b ($0.90 per million tokens) from 29% load",
        ],
    ),
    Case(
        "simulate",
        simulate_screen,
        "llama-3.1-8b on h100-sxm x1: 482 tok/s, 3.77 requests/s, TTFT p99 71.7 ms, ITL p99 22.0 ms, 100%",
        [
            "  time to first token (TTFT)   56.2 ms   55.7 ms   59.0 ms   71.7 ms",
            "  decode   1 min 13 s  91%  ###########################...",
            "! step times are predicted, not measured on this device",
        ],
    ),
    Case(
        "bench_latency",
        lambda result: latency_screen(result, "smollm2"),
        "smollm2: 83.9 tok/s decode, 344 tok/s prefill, first token after 186 ms",
        [
            "1 prompt of 64 tokens, 16 tokens generated; median of 2 runs",
            "  decode   83.9 tok/s    11.9 ms  179 ms    49%  ###############...............",
            "  8 other operations  recorded program",
        ],
    ),
    Case(
        "bench_throughput",
        lambda result: throughput_screen(result, "stories15m"),
        "stories15m: 323 tok/s output, 970 tok/s with prompts, 20.2 requests/s",
        ["  KV memory in use, mean   3%  #............................."],
    ),
    Case(
        "bench_serve",
        lambda result: serve_screen(result, ("ttft", "tpot", "itl")),
        "stories15m: 71.0 tok/s output, 5.92 requests/s, TTFT 130 ms, ITL 57.2 ms (medians)",
        [
            "  time to first token (TTFT)                 125 ms   130 ms  28.4 ms   161 ms",
            "  goodput       5.92 requests/s within the limits (100%)",
        ],
    ),
    Case(
        "perplexity",
        lambda result: perplexity_screen(result, "stories15m", "stories.txt"),
        "stories15m: perplexity 5.9033 +/- 0.3223 on stories.txt",
        ["  scored        2,540 of 5,346 tokens"],
    ),
    Case(
        "divergence",
        lambda result: divergence_screen(result, "stories-int4"),
        "stories-int4 against stories15m: KL divergence 0.161, same top token 80.9% of the time, perplexity",
        ["  perplexity                     6.6858 against 5.9033  +13.3% +/- 1.4%"],
    ),
    Case(
        "task",
        lambda result: task_screen(result, "stories-int4"),
        "stories-int4: 16.7% +/- 11.2% on arc_easy.even (acc_norm, 12 items)",
        ["  acc       25.0%  +/- 13.1%  ########......................"],
    ),
    Case(
        "quantize",
        lambda result: quantize_screen(result, "stories15m"),
        "stories15m: 24.3 MiB at 4.50 bits per weight (rtn), perplexity +22.5%, written to out/q-rtn",
        [
            "  perplexity            1,283 against 1,048  +22.5% (95%: +17.3% to +27.6%)",
            "  took    18.4 s on 2 CPU threads, 676 MiB of memory",
        ],
    ),
    Case(
        "deploy",
        lambda result: deploy_screen(result, "kubernetes"),
        "Wrote 3 files for kubernetes: vllm serve /models/llama-3-1-70b-instruct-int4-g128 ...",
        ["  out/deploy/serving.yaml"],
    ),
    Case(
        "validate",
        validate_screen,
        "The planning call misses measured TPOT by 12.2% (dense) and 18.5% (experts) on average, TTFT by",
        ["  TPOT, dense             12.2%          7.5%             0.941    783"],
    ),
    Case(
        "train_draft",
        lambda result: train_draft_screen(result, "stories15m"),
        "eagle head for stories15m: 62% of first guesses hold, 2.01 tokens a step",
        ["  1 ahead  62%  ###################...........", "  tokenmill serve stories15m --speculate head:out/head"],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_answer_comes_first_and_the_essential_lines_follow(case: Case) -> None:
    lines = as_text(case.make(recorded(case.name))).splitlines()
    assert lines[0] == case.headline
    missing = [line for line in case.lines if line not in lines]
    assert not missing, "\n".join(lines)
    assert lines[-1] == "All figures: --json"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_pipe_gets_one_screen_of_plain_text(case: Case) -> None:
    text = as_text(case.make(recorded(case.name)))
    lines = text.splitlines()
    assert text.isascii()
    assert "\x1b" not in text
    assert len(lines) <= _LINES
    assert all(line == line.rstrip() for line in lines)
    commands = ("  tokenmill ", "  vllm ", "  [ ")  # never broken, so that they can be copied
    assert all(len(line) <= PLAIN_WIDTH for line in lines if not line.startswith(commands))


def test_a_plan_that_breaks_promises_says_so_first() -> None:
    result = recorded("plan")
    result["feasible"] = False
    result["plan"]["broken_promises"] = ["TTFT 310 ms is above 200 ms"]
    screen = plan_screen(result)
    assert screen.tone == "bad"
    text = as_text(screen)
    assert text.startswith("No plan keeps every promise. Nearest: 2 x h100-sxm")
    assert "x broken: TTFT 310 ms is above 200 ms\n" in text
    assert "5.5%  broken\n" in text


def test_the_bolder_plan_is_the_second_row() -> None:
    result = recorded("plan")
    bolder = {**result["plan"], "weights": "int3", "kv_bits": 4.0}
    result["bolder"] = {"plan": bolder, "costs": {**result["costs"], "per_million_output": 0.8}}
    lines = as_text(plan_screen(result)).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("  chosen"))
    assert lines[first + 1].split()[:7] == ["bolder", "2", "x1", "tp1", "int3", "kv4", "$0.80"]


def test_a_plan_without_a_price() -> None:
    result = recorded("plan") | {"costs": {"note": "no price is known for h100-sxm: give --price"}}
    text = as_text(plan_screen(result))
    assert text.startswith("2 x h100-sxm, int4-g128 weights, 8-bit KV, vllm: TTFT 310 ms")
    assert "! no price is known for h100-sxm: give --price\n" in text


def test_plans_on_several_devices_keep_their_names() -> None:
    result = recorded("plan")
    result["pareto"][1]["plan"] = "a100-80 x2 tp2 fp8 kv16 vllm"
    text = as_text(plan_screen(result))
    assert "h100-sxm x2 tp2 fp8 kv8 " in text
    assert "a100-80 x2 tp2 fp8 kv16 " in text


def test_bill_target_and_rules_of_a_plan() -> None:
    result = recorded("plan")
    result["costs"]["against_bill"] = {"bill": 5000.0, "plan_per_month": 178.8, "change": -0.9642}
    result["target"] = {
        "wanted": -0.6, "predicted": -0.4, "met": False, "baseline": "h100-sxm x4", "baseline_per_million_blended": 1.2,
    }  # fmt: skip
    result["explain"] = [{"rule": "R2", "topic": "engine", "text": "vLLM is the default."}]
    notes = {cell.text: cell.tone for cell in plan_screen(result).notes}
    assert notes["against today's bill of $5,000 a month: $179, -96%"] == "good"
    assert next(tone for text, tone in notes.items() if text.startswith("target of -60% missed")) == "bad"
    assert "  R2 engine  vLLM is the default.\n" in as_text(plan_screen(result))


def test_doctor_shows_what_is_wrong() -> None:
    result = recorded("doctor")
    result |= {"verdict": "not ready: no kernels", "problems": ["the C++ kernels are missing"], "models": []}
    result["kernels"] = {"available": False, "reason": "not built", "instruction_set": "", "threads": 2}
    result["machine"]["gpus"] = ["NVIDIA H200, 143771 MiB"]
    result["network"] = {"https://example.org": "ok", "https://example.com": "timed out"}
    screen = doctor_screen(result)
    assert screen.tone == "bad"
    text = as_text(screen)
    for line in ("not available: not built", "NVIDIA H200, 143771 MiB", "timed out", "! the C++ kernels are missing"):
        assert line in text


def test_inspect_names_each_reason_once() -> None:
    result = recorded("inspect")
    for each in result["kernels"]:
        each |= {"implementation": "ref", "declined": ["cpu: kernels='ref'"]}
    text = as_text(inspect_screen(result))
    assert text.count("cpu: kernels='ref'") == 1
    assert "! declined for linear Q8_0, linear Q4_1, rms_norm and 8 others: cpu: kernels='ref'\n" in text


def test_inspect_says_who_set_an_option() -> None:
    options = [{"name": "page_size", "value": 8, "source": "automatic: pages of 8 suit this CPU"}]
    text = as_text(inspect_screen(recorded("inspect") | {"options": options}))
    assert "  page-size  8      automatic: pages of 8 suit this CPU\n" in text


def test_a_benchmark_without_success_is_bad() -> None:
    result = recorded("bench_serve") | {"completed": 0, "failed": 12, "failures": {"connection refused": 12}}
    screen = serve_screen(result, ())
    assert screen.tone == "bad"
    assert as_text(screen).splitlines()[:3] == [
        "stories15m: none of 12 requests succeeded",
        "",
        "x 12 x connection refused",
    ]


def test_only_the_metrics_asked_for() -> None:
    text = as_text(serve_screen(recorded("bench_serve"), ("e2el",)))
    assert "end to end (E2EL)" in text
    assert "(TTFT)" not in text


def test_a_gate_that_was_off_is_a_warning() -> None:
    result = recorded("quantize") | {"fidelity": {"gate": "off"}}
    screen = quantize_screen(result, "stories15m")
    assert screen.tone == "warning"
    assert "quality not measured" in screen.headline
    assert "tokenmill eval divergence out/q-rtn --reference stories15m" in as_text(screen).replace("\n  ", " ")


def test_what_a_conversion_lost() -> None:
    result = recorded("convert") | {"lossless": False, "lost": [{"name": "lm_head", "lost": ["scales: up to 1e-4"]}]}
    screen = convert_screen(result)
    assert screen.tone == "warning"
    assert "! lm_head: scales: up to 1e-4\n" in as_text(screen)


def test_calibration_compares_with_measurement() -> None:
    result = {
        "model": "smollm2", "bandwidth_gb_s": 21.3, "gflops": 88.0, "engine": {"fit_error": 0.034}, "cpu": "Neoverse",
        "cores": 2, "threads": 2, "steps_timed": 812, "file": "machine.json", "skipped": ["decode x16"],
        "predicted_against_measured": [{"what": "decode x1 tok/s", "predicted": 90.0, "measured": 100.0, "ratio": 0.9}],
    }  # fmt: skip
    text = as_text(calibrate_screen(result))
    assert text.startswith("Calibrated smollm2 on this machine: 21.3 GB/s, 88.0 GFLOP/s, step times fitted to 3.4%\n")
    assert "  decode x1 tok/s       90.0       100  -10.0%\n" in text
    assert "! not measured in full: decode x16\n" in text


@pytest.mark.parametrize("make", outcomes.ALL)
def test_optimize_fits_one_screen(make: Callable[[], Outcome]) -> None:
    lines = as_text(optimize_screen(make(), Path("out/report.html"))).splitlines()
    assert len(lines) <= _LINES
    assert max(map(len, lines)) <= PLAIN_WIDTH
    assert any(line.startswith("- report: out/report.html (") for line in lines)


def _closing(outcome: Outcome) -> str:
    """Without line breaks."""
    return " ".join(as_text(optimize_screen(outcome, Path("out/report.html"))).split())


def test_optimize_compares_with_both_baselines_and_says_what_the_source_was() -> None:
    text = _closing(outcomes.cpu_without_objectives())
    assert text.startswith(
        "Q4_0: 17% cheaper than today (12% to 22%), 60% cheaper than unquantized (58% to 62%); the source is already "
        "quantized: target met Cost of a token (the source is already quantized)"
    )
    today, unquantized = (
        text.index("today stored on tokenmill, already quantized"),
        text.index("unquantized F16, expan"),
    )
    assert today < unquantized < text.index("chosen Q4_0")
    assert "no latency objective was given: throughput decides" in text
    assert "perplexity +0.40% (+0.20% to +0.60%), limit 1.0%" in text
    assert "! cheaper by a first measurement, but not proven: Q3_K_S; repeat with more --minutes" in text
    assert "as cheap within the error of measurement: imatrix:Q4_0" in text
    assert re.search(r"Candidates \(\d+, \d+ timed, \d+ proven\)", text)
    assert "another finalist" not in text
    assert "Serve it tokenmill serve cheaper/model.gguf" in text


def test_optimize_says_what_the_final_leaves_open() -> None:
    outcome = outcomes.cpu_without_objectives()
    outcome.margin = 0.023
    assert "another finalist may be up to 2.3% cheaper than the choice; more --runs tell them apart" in _closing(
        outcome
    )


def test_optimize_names_the_winner_even_if_it_is_another_engine() -> None:
    outcome = outcomes.gpu_with_a_rival_that_wins()
    text = _closing(outcome)
    assert "the source is in full precision" in text
    assert "TTFT p95 260 ms, ITL p95 22.0 ms, 98% within; ttft p95=500ms, itl p95=40ms: met" in text
    assert "task humaneval 40.2% against 40.9% on 164 items (-3.0 to +1.8 points, p=0.75)" in text
    assert "! cheapest on this machine: vllm 0.32 fp8, not tokenmill, 10% cheaper than the best of tokenmill" in text
    outcome.rivals = outcome.rivals[1:]
    assert "- cheapest on this machine: fp8 on tokenmill" in _closing(outcome)


def test_optimize_without_a_winner() -> None:
    outcome = outcomes.nothing_chosen()
    screen = optimize_screen(outcome, Path("out/report.html"))
    assert screen.tone == "warning"
    assert screen.headline.startswith("Nothing cheaper keeps the quality: stay with what you have")


def test_optimize_interrupted_or_without_quality() -> None:
    text = _closing(outcomes.interrupted())
    assert "today not measured" in text
    assert "! the search is not finished: interrupted; run the same command to go on" in text
    assert "quality was not measured (--quality off)" in _closing(outcomes.quality_off())


def test_a_missed_objective_is_not_good_news() -> None:
    outcome = outcomes.quality_off()
    assert outcome.chosen is not None
    outcome.target_cost = -0.1
    assert optimize_screen(outcome, Path("r")).tone == "good"
    outcome.chosen.latency = outcomes.latency(900, 66, 8000, met=False, refusal="ttft p95 is 900ms")
    assert optimize_screen(outcome, Path("r")).tone == "warning"
    assert "ttft p95=500ms, itl p95=40ms: ttft p95 is 900ms" in _closing(outcome)
