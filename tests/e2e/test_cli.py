"""The command: the contract of each verb on real models, and what bad input gets.

Exit 0 with one JSON object on stdout, or exit 2 with what is wrong and what to do on stderr, one line each. Most run in
this process, as starting one takes longer than their work; in one of their own where input is piped.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenmill.cli.main import main

ModelPath = Callable[[str], Path]


def tokenmill(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in this process."""
    command = [str(each) for each in arguments]
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            code = main(command)
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(command, code, output.getvalue(), errors.getvalue())


def process(*arguments: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tokenmill", *map(str, arguments)],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def answer(*arguments: str | Path, stdin: str | None = None) -> dict[str, Any]:
    done = tokenmill(*arguments, "--json") if stdin is None else process(*arguments, "--json", stdin=stdin)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    return found


def test_pull_twice_finds_the_same_file(model_path: ModelPath) -> None:
    path = model_path("stories15m")
    first, second = answer("pull", "stories15m"), answer("pull", "stories15m")
    assert first == second
    assert set(first) == {"path", "bytes", "source"}
    assert first["path"] == str(path)
    assert first["bytes"] > 60_000_000


def test_run_answers_through_the_chat_template(model_path: ModelPath) -> None:
    model_path("smollm2")
    arguments = ("run", "smollm2", "What is the capital of France?", "--max-tokens", "3")
    found = answer(*arguments, "--logprobs", "2")
    assert set(found) >= {
        "text",
        "token_ids",
        "prompt_tokens",
        "completion_tokens",
        "ttft_ms",
        "tpot_ms",
        "finish_reason",
    }
    assert found["completion_tokens"] == len(found["token_ids"]) == 3
    assert found["finish_reason"] == "length"
    assert found["ttft_ms"] > 0
    assert found["tpot_ms"] > 0
    for token_id, record in zip(found["token_ids"], found["logprobs"], strict=True):
        assert record["token_id"] == token_id == record["top"][0][0]  # greedy: the most likely
        assert len(record["top"]) == 2
    raw = answer(*arguments, "--raw")
    assert raw["prompt_tokens"] < found["prompt_tokens"]


def test_run_streams_the_text_of_a_base_model(model_path: ModelPath) -> None:
    model_path("stories15m")
    done = process("run", "stories15m", "-", "--max-tokens", "12", stdin="Once upon a time\n")
    assert done.returncode == 0, done.stderr
    again = answer("run", "stories15m", "Once upon a time", "--max-tokens", "12")
    assert done.stdout == again["text"] + "\n"
    assert "there was a little" in done.stdout


def test_run_takes_token_ids_and_gives_several_answers(model_path: ModelPath) -> None:
    model_path("stories15m")
    flags = ("--token-ids", "1,9038,2501", "--max-tokens", "4", "--n", "2", "--temperature", "1", "--seed", "3")
    found = answer("run", "stories15m", *flags)
    assert found["prompt_tokens"] == 3
    assert [each["index"] for each in found["choices"]] == [0, 1]
    assert found["choices"][0]["token_ids"] == found["token_ids"]
    assert answer("run", "stories15m", *flags)["choices"] == found["choices"]


def test_chat_takes_one_turn_per_line(model_path: ModelPath) -> None:
    model_path("smollm2")
    lines = "Say hello.\n/system Be brief.\nAgain.\n/exit\nnever read\n"
    found = answer("chat", "smollm2", "--max-tokens", "2", "--seed", "1", stdin=lines)
    assert [message["role"] for message in found["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    first, second = found["turns"]
    assert second["prompt_tokens"] > first["prompt_tokens"]


def test_inspect_tells_shapes_bytes_and_kernels(model_path: ModelPath) -> None:
    model_path("smollm2")
    found = answer("inspect", "smollm2", "--kv-cache-dtype", "float16")
    assert found["architecture"] == "llama"
    assert found["parameters"] == 134_515_008
    assert sum(each["bytes"] for each in found["weights"]) == found["bytes"]
    assert found["kv_cache"]["bytes_per_token"] == 30 * 2 * 3 * 64 * 2
    assert found["tokenizer"]["vocab_size"] == 49152
    assert found["tokenizer"]["chat_template"] is True
    assert {"linear Q4_1", "attention", "rms_norm"} <= {each["op"] for each in found["kernels"]}


def test_inspect_says_why_the_reference_runs(model_path: ModelPath) -> None:
    model_path("stories15m")
    found = answer("inspect", "stories15m", "--kernels", "ref")
    assert found["executor"]["chosen"] == "eager"
    assert found["executor"]["declined"]
    assert {each["implementation"].split()[0] for each in found["kernels"]} == {"ref"}


def test_doctor_has_seen_tokens_move(model_path: ModelPath) -> None:
    model_path("stories15m")
    found = answer("doctor")
    assert found["verdict"].startswith("ready")
    assert found["self_test"] == {"model": "stories15m", "tokens": 4, "error": ""}
    assert "stories15m" in {each["name"] for each in found["models"]}


def test_bench_latency(model_path: ModelPath) -> None:
    model_path("stories15m")
    shape = ("--input-len", "8", "--output-len", "3", "--batch-size", "2", "--repeat", "1", "--warmup", "0")
    found = answer("bench", "latency", "stories15m", *shape)
    assert found["prefill_tok_s"] == pytest.approx(2 * 8 / (found["ttft_ms"] / 1000))
    assert found["decode_tok_s"] == pytest.approx(2 / (found["tpot_ms"] / 1000))
    assert found["threads"] >= 1
    assert {"linear F32", "attention"} <= set(found["kernels"])


def test_bench_throughput_reports_prefix_hits_and_waste(model_path: ModelPath) -> None:
    model_path("stories15m")
    shape = ("--num-prompts", "3", "--input-len", "8", "--output-len", "4", "--shared-prefix", "32")
    found = answer("bench", "throughput", "stories15m", *shape, "--batch-tokens", "40")
    assert (found["input_tokens"], found["output_tokens"]) == (3 * 40, 3 * 4)
    assert found["output_tok_s"] == pytest.approx(12 / found["elapsed_s"])
    assert found["total_tok_s"] == pytest.approx(132 / found["elapsed_s"])
    assert found["prefix_hit_rate"] == pytest.approx(64 / 120)
    assert 0 < found["kv_waste"] < 1


def test_perplexity_is_that_of_llama_cpp(model_path: ModelPath, data_path: Path) -> None:
    """Its figure for the same text and chunk is 5.9031 +/- 0.32 in float32."""
    model_path("stories15m")
    text = data_path / "text" / "stories15m-samples.eval.txt"
    found = answer("eval", "perplexity", "stories15m", "--text", text, "--limit-bytes", "20000", "--context", "256")
    assert found["perplexity"] == pytest.approx(5.9031, abs=2e-3)
    assert found["tokens"] == 20 * 127
    assert found["stderr"] == pytest.approx(0.32, abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "problem", "remedy"),
    [
        (["run", "smollm2", "hi", "--max-tokns", "3"], "--max-tokns", "--max-tokens"),
        (["inspect", "smolm2"], "smolm2", "'smollm2'"),
        (["run", "./missing.gguf", "hi"], "missing.gguf", "holds no"),
        (["run", "stories15m", ""], "empty", "give one"),
        (["run", "stories15m", "hi", "--temperature", "-1"], "temperature is -1", "give 0"),
        (["run", "stories15m", "hi", "--max-tokens", "0"], "max_tokens is 0", "give 1"),
        (["run", "stories15m", "hi", "--context", "100000"], "100000", "lower --context"),
        (["run", "stories15m", "word " * 300], "tokens, the context holds 256", "shorten the prompt"),
        (["bench", "latency", "stories15m", "--input-len", "300"], "428 tokens", "lower --input-len"),
        (["chat", "stories15m"], "no chat template", "tokenmill run --raw"),
        (["eval", "perplexity", "stories15m", "--text", "missing.txt"], "missing.txt", "--text"),
    ],
    ids=lambda each: " ".join(each)[:40] if isinstance(each, list) else None,
)
def test_bad_input_exits_2_with_the_remedy(
    arguments: list[str], problem: str, remedy: str, model_path: ModelPath
) -> None:
    model_path("stories15m")
    done = tokenmill(*arguments, "--json")
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["error:", "try:"]
    assert problem in done.stderr
    assert remedy in done.stderr


def test_a_corrupt_gguf_exits_2(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 64)
    done = process("run", path, "hi")
    assert (done.returncode, done.stdout) == (2, "")
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["error:", "try:"]
    assert "broken.gguf" in done.stderr
