"""Outcomes of `optimize` as real runs leave them, with made-up figures, for the tests of screens, reports and JSON."""

from __future__ import annotations

from tokenmill.optimize.pricing import token_price
from tokenmill.optimize.results import (
    CHOSEN,
    FAILED,
    HARMED,
    PASSED,
    SLOWER,
    TIED,
    UNLIKELY,
    UNTRIED,
    Artefact,
    CandidateResult,
    Check,
    Latency,
    Outcome,
    Percentiles,
    Prediction,
    Quality,
    Speed,
    TaskScore,
)

OBJECTIVES = "ttft p95=500ms, itl p95=40ms"
_CHECKS = (
    Check("repetition", 0.021, 0.020, 0.05),
    Check("valid JSON", 0.97, 0.98, 0.95),
    Check("perplexity at 4,096 tokens", 5.91, 5.90, 6.0),
)


def speed(cost: float, *, tok_s: float = 100.0, spread: float = 0.03, runs: int = 5) -> Speed:
    """At `cost` times the baseline's cost; `tok_s` is the baseline's output."""
    fast = tok_s / cost
    return Speed(cost, cost * (1 - spread), cost * (1 + spread), runs, fast, 3 * fast, 90.0 * cost, 9.0 * cost, 10**8)


def quality(loss: float, kld: float = 0.01, tokens: int = 12288) -> Quality:
    return Quality(loss, loss - 0.002, loss + 0.002, kld, 9 * kld, 1 - 3 * kld, 6.0 * (1 + loss), 6.0, tokens, 0, 0.001)


def latency(ttft_p95: float, itl_p95: float, goodput: float, *, met: bool = True, refusal: str = "") -> Latency:
    def percentiles(p95: float) -> Percentiles:
        return Percentiles(0.55 * p95, 0.5 * p95, 0.85 * p95, p95, 1.4 * p95)

    def curve(p95: float) -> tuple[float, ...]:
        return tuple(p95 * (0.2 + 0.6 * step / 19 + 0.2 * (step / 19) ** 6) for step in range(21))

    return Latency(
        requests=240,
        failed=0,
        offered_requests_s=12.0,
        duration_s=20.0,
        ttft_ms=percentiles(ttft_p95),
        itl_ms=percentiles(itl_p95),
        e2e_ms=percentiles(ttft_p95 + 100 * itl_p95),
        output_tok_s=1.02 * goodput,
        goodput_tok_s=goodput,
        attainment=0.98 if met else 0.61,
        objective_met=met,
        refusal=refusal,
        ttft_curve_ms=curve(ttft_p95),
        itl_curve_ms=curve(itl_p95),
    )


def artefact(name: str, nbytes: int = 90_000_000, bits: float = 4.8) -> Artefact:
    layers = ({"name": "layers.0.mlp.down", "type_name": "Q4_K", "relative_error": 0.071},)
    return Artefact(
        f"cache/{name}", nbytes, bits, 12.0, f"tokenmill quantize m --type {name} --out cache/{name}", layers
    )


def candidate(
    name: str, verdict: str = PASSED, reason: str = "", cost: float | None = None, **more: object
) -> CandidateResult:
    """With a prediction 10 % too cheap where it has a measured `cost`."""
    found = CandidateResult(name, name.split("/")[0], "float16", 512, verdict=verdict, reason=reason)
    if cost is not None:
        found.speed = speed(cost)
        found.prediction = Prediction(1.1 / cost, 90_000_000, 0.001, 0.01, "roofline of this machine")
        found.artefact = artefact(found.weights)
    for key, value in more.items():
        setattr(found, key, value)
    return found


def _finished(outcome: Outcome) -> Outcome:
    everyone = [outcome.baseline, outcome.today, *outcome.baseline_variants, *outcome.candidates, *outcome.rivals]
    for each in everyone:
        if each is not None:
            each.dollars_per_million_output = token_price(each, outcome.price, bool(outcome.objectives))
    return outcome


def _outcome(**given: object) -> Outcome:
    values: dict[str, object] = {
        "model": "smollm2",
        "state": "complete",
        "source": "models/smollm2.gguf",
        "source_note": "",
        "workload": {"input_len": 64, "output_len": 32, "concurrency": 4},
        "workload_words": "prompts of 64 and answers of 32 tokens, 4 at a time",
        "machine": "Neoverse-N1, 2 cores, 24 GiB",
        "price": 0.08,
        "price_basis": "10% of a neoverse-n1 by memory (recalled, 2026-11); give --price for yours",
        "target_cost": -0.5,
        "max_quality_loss": 0.01,
        "quality_text": "built-in held-out text",
        "seconds": 231.0,
        "baseline_variants": [],
        "candidates": [],
        "baseline": None,
        "commands": ["tokenmill optimize smollm2 --out cheaper"],
        "date": "2026-11-16T12:00:00+00:00",
        "seed": 7,
        "versions": {"tokenmill": "0.1.0", "torch": "2.11.0"},
        "launch_lines": {"tokenmill": "tokenmill serve cheaper/model.gguf --config cheaper/serve.yaml"},
        "files": {"serve.yaml": "batch-tokens: 512\nkv-cache-dtype: float16\n"},
    }
    return Outcome(**(values | given))  # type: ignore[arg-type]


def cpu_without_objectives() -> Outcome:
    """A 4-bit source: today is the stored file, the baseline is the same weights expanded to floats."""
    baseline = candidate("F16", PASSED, cost=1.0)
    stored = candidate("stored", PASSED, "costs more than Q4_0", cost=0.48, quality=quality(0.0, 0.0))
    chosen = candidate("Q4_0", CHOSEN, cost=0.40, quality=quality(0.004, 0.02))
    tied = candidate("imatrix:Q4_0", TIED, "costs the same as Q4_0", cost=0.404, quality=quality(0.003, 0.021))
    return _finished(
        _outcome(
            baseline=baseline,
            baseline_variants=[baseline, candidate("F32", SLOWER, "slower than F16", cost=1.9)],
            today=stored,
            source_quantized=True,
            candidates=[
                chosen,
                tied,
                stored,
                candidate("Q8_0", PASSED, "costs more than Q4_0", cost=0.66, quality=quality(0.0005, 0.001)),
                candidate("Q2_K", HARMED, "perplexity grows by 41%", cost=0.31, divergence=quality(0.41, 0.5, 1024)),
                candidate(
                    "Q3_K_S", UNTRIED, "no time was left to prove it", cost=0.37, divergence=quality(0.006, 0.03)
                ),
                candidate("nf4", FAILED, "288 columns are no multiple of 64"),
                candidate("Q5_1", UNLIKELY, "predicted slower and no better than Q4_1"),
            ],
            chosen=chosen,
            tied=["Q4_0", "imatrix:Q4_0"],
            unproven=["Q3_K_S"],
        )
    )


def _rivals() -> list[CandidateResult]:
    return [
        CandidateResult(
            "vllm 0.32 fp8",
            "fp8",
            "fp8",
            8192,
            engine="vllm",
            verdict=PASSED,
            latency=latency(240, 20, 15500),
            quality=quality(0.004, 0.013),
        ),
        CandidateResult("sglang", "stored", "auto", 8192, engine="sglang", verdict=FAILED, reason="not installed"),
        CandidateResult(
            "llama.cpp b6000",
            "Q8_0",
            "f16",
            2048,
            engine="llama.cpp",
            verdict=SLOWER,
            reason="costs more than fp8",
            latency=latency(470, 39, 5000),
        ),
    ]


def gpu_with_a_rival_that_wins() -> Outcome:
    """Objectives, tasks, checks and rivals; today is a vLLM command; vLLM with other flags is cheaper than we are."""
    baseline = candidate("BF16", PASSED, cost=1.0, latency=latency(410, 31, 9000))
    chosen = candidate(
        "fp8",
        CHOSEN,
        cost=0.62,
        kv="fp8",
        batch_tokens=8192,
        quality=quality(0.003, 0.012),
        latency=latency(260, 22, 14000),
        tasks=(
            TaskScore("arc_easy", 500, 0.612, 0.618, -0.021, 0.008, 0.43),
            TaskScore("humaneval", 164, 0.402, 0.409, -0.03, 0.018, 0.75),
        ),
        checks=_CHECKS,
    )
    slow = latency(900, 66, 3000, met=False, refusal="ttft p95 is 900 ms, 400 ms over the objective")
    return _finished(
        _outcome(
            model="qwen2.5-coder-1.5b",
            machine="NVIDIA H200, 140 GiB",
            device="cuda",
            price=4.18,
            price_basis="one h200-sxm (rental range, recalled, 2026-11); give --price for yours",
            workload_words="240 arrivals of azure.csv over 20 s",
            objectives=OBJECTIVES,
            max_kld=0.05,
            baseline=baseline,
            baseline_variants=[baseline],
            today=CandidateResult(
                "today", "stored", "auto", 8192, engine="vllm", verdict=PASSED, latency=latency(380, 30, 9500),
                reason="vllm serve Qwen/Qwen2.5-Coder-1.5B",
            ),
            candidates=[
                chosen,
                candidate("int8", PASSED, "costs more than fp8", cost=0.7, quality=quality(0.002),
                          latency=latency(300, 25, 12500)),
                candidate("gptq-4", HARMED, "task humaneval loses 4.1 points, more than 2.0", cost=0.6,
                          quality=quality(0.008, 0.04),
                          tasks=(TaskScore("humaneval", 164, 0.36, 0.409, -0.09, -0.01, 0.02),)),
                candidate("mxfp4", PASSED, "ttft p95 is 900 ms, 400 ms over the objective", cost=0.9,
                          quality=quality(0.006, 0.03), latency=slow),
                candidate("int4-g32", FAILED, "killed after 120 s: it hung"),
            ],
            rivals=_rivals(),
            chosen=chosen,
            tied=["fp8"],
            launch_lines={
                "tokenmill": "tokenmill serve cheaper/model --config cheaper/serve.yaml",
                "vllm": "vllm serve cheaper/model --max-num-seqs 64",
            },
            files={
                "serve.yaml": "batch-tokens: 8192\nkv-cache-dtype: fp8\n",
                "kubernetes/serving.yaml": "apiVersion: apps/v1\nkind: Deployment\n",
            },
        )
    )  # fmt: skip


def nothing_chosen() -> Outcome:
    """Every candidate harms the model: the full-precision source is served as it is."""
    baseline = candidate("F32", PASSED, cost=1.0)
    return _finished(
        _outcome(
            model="stories15m",
            baseline=baseline,
            baseline_variants=[baseline],
            today=baseline,
            candidates=[
                candidate("Q4_0", HARMED, "perplexity grows by 7%", cost=0.5, divergence=quality(0.07, 0.2, 1024))
            ],
            reason="no candidate is cheaper and keeps the quality: serve the baseline",
        )
    )


def interrupted() -> Outcome:
    """Stopped in the first round, before the baseline of today was measured."""
    return _finished(
        _outcome(
            state="interrupted",
            baseline=candidate("F16", PASSED, cost=1.0),
            candidates=[candidate("Q8_0", UNTRIED, cost=0.7), candidate("Q4_0", UNTRIED)],
            reason="the run is interrupted: nothing was proven yet",
            launch_lines={},
            files={},
        )
    )


def quality_off() -> Outcome:
    """Speed only, of made-up weights."""
    chosen = candidate("int4-g128", CHOSEN, cost=0.55, latency=latency(300, 21, 8000))
    baseline = candidate("BF16", PASSED, cost=1.0, latency=latency(450, 37, 5000))
    return _finished(
        _outcome(
            model="llama-3.1-8b",
            machine="NVIDIA H200, 140 GiB",
            device="cuda",
            price=4.18,
            objectives=OBJECTIVES,
            quality_off=True,
            baseline=baseline,
            baseline_variants=[baseline],
            today=baseline,
            candidates=[chosen],
            chosen=chosen,
            tied=["int4-g128"],
        )
    )


ALL = (cpu_without_objectives, gpu_with_a_rival_that_wins, nothing_chosen, interrupted, quality_off)
