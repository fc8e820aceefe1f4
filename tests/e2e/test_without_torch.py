"""Running, chatting and serving on a CPU import neither torch nor transformers, and give the tokens that they give with
torch. What needs torch says so in one line where it is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import RunningServer
from tests.parity.tiny_models import CONFIGS, make, write_tokenizer
from tokenmill import LLM, SamplingParams, StructuredSpec
from tokenmill.kernels import cpu
from tokenmill.kernels.host import HOST, on_host
from tokenmill.model.host_reader import needs_torch

pytestmark = pytest.mark.skipif(cpu.unavailable(HOST) is not None, reason="the C++ kernels are not built")

_ROOT = Path(__file__).parents[2]
_PROMPT = "Once upon a time, a small robot"
# Python runs it first in every process, children included: as if the packages were not installed.
_HIDES = """
import sys
class Hides:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hides())
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that has neither torch nor transformers."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(_HIDES)
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{_ROOT}"}


def _tokenmill(bare: dict[str, str], *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenmill", *words]
    return subprocess.run(command, env=bare, input=text, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("alias", ["smollm2", "stories15m"])  # GGUF blocks; floats in safetensors
def test_run_gives_the_same_tokens(bare: dict[str, str], alias: str, model_path: Callable[[str], Path]) -> None:
    path = model_path(alias)
    sampled = {"temperature": 0.8, "top_p": 0.9, "seed": 5}
    flags = [word for name, value in sampled.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with LLM(path, context=128, concurrency=1, tensors=True) as llm:
        assert not on_host(llm.parts.runtime.model.device)
        for params, words in (({"temperature": 0.0}, []), (sampled, flags)):
            output = llm.generate(_PROMPT, SamplingParams(max_tokens=12, **params))[0].outputs[0]
            done = _tokenmill(
                bare, "run", str(path), _PROMPT, "--raw", "--max-tokens", "12", "--context", "128", "--json", *words
            )
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["token_ids"] == output.token_ids


def test_chat_answers(bare: dict[str, str], model_path: Callable[[str], Path]) -> None:
    done = _tokenmill(
        bare,
        "chat",
        str(model_path("smollm2")),
        "--max-tokens",
        "8",
        "--context",
        "128",
        text="What is two plus two?\n",
    )
    assert (done.returncode, bool(done.stdout.strip())) == (0, True), done.stderr


def test_a_server_answers(bare: dict[str, str], model_path: Callable[[str], Path]) -> None:
    server = RunningServer(model_path("stories15m"), "--context", "128", env={"PYTHONPATH": bare["PYTHONPATH"]})
    try:
        body = {"model": "m", "prompt": _PROMPT, "max_tokens": 8, "temperature": 0.7, "seed": 3, "logprobs": 2}
        body["model"] = server.http.get("/v1/models").json()["data"][0]["id"]
        answer = server.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
    finally:
        server.stop()


def test_torch_that_is_installed_is_not_imported(model_path: Callable[[str], Path]) -> None:
    code = (
        "import sys; from tokenmill import LLM, SamplingParams\n"
        f"with LLM({str(model_path('stories15m'))!r}, context=128) as llm:\n"
        "    params = [SamplingParams(temperature=1.0, max_tokens=4, logprobs=2), SamplingParams(max_tokens=4, n=2)]\n"
        f"    assert len(llm.generate([{_PROMPT!r}] * 2, params)) == 2\n"
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--executor", "eager"], "the executor eager computes with it"),
        (["--kv-cache-dtype", "int8"], "KV pages of type int8 are coded with it"),
        (["--speculate", "self:layers=1"], "--speculate self computes with it"),
        (["--device", "cuda"], "GPUs are used through it"),
        (["--lora", "a=/nothing"], "adapters are read with it"),
    ],
)
def test_what_needs_torch_says_so(
    bare: dict[str, str], words: list[str], reason: str, model_path: Callable[[str], Path]
) -> None:
    done = _tokenmill(bare, "run", str(model_path("stories15m")), "Once", "--raw", "--max-tokens", "2", *words)
    assert done.returncode == 2
    assert done.stderr == f"error: torch is not installed, and {reason}\ntry: pip install 'tokenmill[torch]'\n"


def test_verbs_that_compute_with_torch_say_so(bare: dict[str, str], tmp_path: Path) -> None:
    done = _tokenmill(bare, "quantize", str(tmp_path), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stderr == "error: quantize needs tokenmill[torch]\ntry: pip install 'tokenmill[torch]'\n"


_FEATURES: list[dict[str, Any]] = [
    {"temperature": 0.9},
    {"temperature": 1.3, "top_k": 20, "logprobs": 3},
    {"temperature": 1.0, "top_p": 0.6, "n": 3},
    {"temperature": 5.0, "top_p": 0.99},  # more candidates than the first cut
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    {"temperature": 1.2, "typical_p": 0.7},
    {"temperature": 0.0, "logit_bias": {263: 4.0, 727: -8.0}, "logprobs": 0},
    {"temperature": 1.0, "allowed_token_ids": [5, 9, 300, 301, 302, 303]},
    {"temperature": 0.7, "min_tokens": 6, "bad_words": ["the", "little girl"]},
    {"temperature": 1.0, "structured": StructuredSpec("regex", "[a-z]{2,9} [0-9]{3}")},
    {"temperature": 0.0, "prompt_logprobs": 2},
]


def test_every_sampling_feature_draws_the_same_tokens(model_path: Callable[[str], Path]) -> None:
    params = [SamplingParams(max_tokens=10, seed=11 + number, **each) for number, each in enumerate(_FEATURES)]
    found = []
    for tensors in (False, True):
        with LLM(model_path("stories15m"), context=128, speculate="off", tensors=tensors) as llm:
            assert on_host(llm.parts.runtime.store.device) is not tensors
            found.append(llm.generate([_PROMPT] * len(params), params))
    for ours, theirs in zip(*found, strict=True):
        assert [each.token_ids for each in ours.outputs] == [each.token_ids for each in theirs.outputs]
        for records in (ours.outputs[0].logprobs, ours.prompt_logprobs):
            other = theirs.outputs[0].logprobs if records is ours.outputs[0].logprobs else theirs.prompt_logprobs
            for mine, its in zip(records or (), other or (), strict=True):
                assert (mine is None) == (its is None)
                for token_id, record in (mine or {}).items():
                    assert record.logprob == pytest.approx(its[token_id].logprob, abs=1e-4)
                    assert record.rank == its[token_id].rank


_FEW = ("llama", "gemma3", "qwen3", "gpt2", "falcon", "cohere2", "phi", "mixtral", "deepseek_v3", "mamba2")
_FAMILIES = [name if name in _FEW else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]


@pytest.mark.parametrize("family", _FAMILIES)
def test_every_architecture_gives_the_same_tokens(family: str, tmp_path: Path) -> None:
    make(family, tmp_path)
    write_tokenizer(tmp_path)
    prompts = [[5, 17, 33, 99, 8], list(range(3, 60))]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    tokens, states, hosts = [], [], []
    for tensors in (False, True):
        with LLM(tmp_path, context=96, concurrency=4, tensors=tensors) as llm:
            hosts.append(on_host(llm.parts.runtime.model.device))
            tokens.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
            states.append(llm.embed(prompts))
            needs = needs_torch(llm.parts.runtime.model.checkpoint)
    assert hosts == [not needs, False]
    assert tokens[0] == tokens[1]
    assert states[0] == [pytest.approx(each, abs=1e-3) for each in states[1]]
