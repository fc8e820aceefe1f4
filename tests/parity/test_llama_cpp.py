"""GGUF files and llama.cpp (the package xllamacpp), both ways: it generates from files that we write the tokens that we
generate, and we read the files that it writes. What it cannot load is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.parity import tiny_models
from tests.parity.gguf_models import CHANGED
from tests.parity.tiny_models import CONFIGS
from tests.unit.quantize.ggml.test_export import save_tokenizer
from tokenmill import LLM, SamplingParams
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import UserError
from tokenmill.quantize.ggml.export import quantize_gguf
from tokenmill.quantize.ggml.mixes import find_mix

pytestmark = pytest.mark.skipif(find_spec("xllamacpp") is None, reason="llama.cpp (xllamacpp) is not installed")

_END, _NUM_TOKENS = 2, 16
_GENERATOR = torch.Generator().manual_seed(0)
_PROMPTS = [torch.randint(3, 131, (length,), generator=_GENERATOR).tolist() for length in (37, 5)]

# Generates greedily, then saves the model as llama.cpp writes it. A process of its own: a failed assertion of ggml
# ends it. The structures of llama.h are passed by value as they come from their `default_params`.
_PROGRAM = r"""
import ctypes, json, sys
import xllamacpp
from xllamacpp import xllamacpp as module

path, saved, prompts, count = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
params = xllamacpp.CommonParams()
params.model.path = path
params.n_ctx, params.n_parallel, params.n_gpu_layers, params.warmup = 256, 1, 0, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(params)
settings = {"n_predict": count, "temperature": 0.0, "ignore_eos": True, "n_probs": 1, "cache_prompt": False}
answers = [server.handle_completions({"prompt": ids, **settings}) for ids in prompts]
tokens = [[entry["id"] for entry in each["choices"][0]["logprobs"]["content"]] for each in answers]
print("TOKENS", json.dumps(tokens), flush=True)
del server
if saved:
    class Params(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_char * 512)]
    library = ctypes.CDLL(module.__file__)
    library.llama_model_default_params.restype = Params
    library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Params]
    library.llama_model_load_from_file.restype = ctypes.c_void_p
    library.llama_model_save_to_file.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    library.llama_backend_init()
    model = library.llama_model_load_from_file(path.encode(), library.llama_model_default_params())
    library.llama_model_save_to_file(model, saved.encode())
    print("SAVED", flush=True)
"""


_FAMILIES = {
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "granitemoe": "granitemoe",
    "glm4_moe": "glm4moe",
    "glm4_moe-groups": "glm4moe",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v2-yarn": "deepseek2",
    "deepseek_v3": "deepseek2",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "falcon_mamba": "mamba",
    "jamba": "jamba",
    "jamba-experts": "jamba",
    "granitemoehybrid": "granitehybrid",
    "granitemoehybrid-rope": "granitehybrid",
    "granitemoehybrid-experts": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "falcon_h1-plain": "falcon-h1",
    "qwen3_next": "qwen3next",
    "llama-llama3": "llama",
    "mistral": "llama",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "granite": "granite",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "smollm3": "smollm3",
    "glm": "chatglm",
    "glm4": "glm4",
    "starcoder2": "starcoder2",
    "stablelm": "stablelm",
    "gpt_neox": "gptneox",
    "gpt2": "gpt2",
    "falcon": "falcon",
    "falcon-40b": "falcon",
    "phi-plain": "phi2",
}


def _write(name: str, folder: Path, mix: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    if name in CHANGED:
        monkeypatch.setitem(CONFIGS, name, CHANGED[name])
    source, path = folder / "model", folder / f"model-{mix}.gguf"
    if not source.exists():
        tiny_models.make(name, source)
        save_tokenizer(source, "qwen2")
    quantize_gguf(open_checkpoint(source), path, mix)
    return path


def _llama_cpp_tokens(path: Path, saved: Path | None = None) -> list[list[int]]:
    words = [str(path), str(saved or ""), json.dumps(_PROMPTS), str(_NUM_TOKENS)]
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *words], capture_output=True, text=True, timeout=120, check=False
    )
    said = [line.removeprefix("TOKENS ") for line in run.stdout.splitlines() if line.startswith("TOKENS ")]
    assert said, [line for line in run.stderr.splitlines() if " E " in line or "ASSERT" in line] or run.stderr[-1000:]
    assert saved is None or "SAVED" in run.stdout, run.stderr[-1000:]
    tokens: list[list[int]] = json.loads(said[0])
    return tokens


def _our_tokens(path: Path) -> list[list[int]]:
    """llama.cpp never chooses the end token where it is told to go on behind it."""
    params = SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True, logit_bias={_END: -100.0})
    with LLM(str(path), context=128, concurrency=1, kernels="ref", threads=1) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(_PROMPTS, params)]


@pytest.mark.parametrize("name", _FAMILIES)
def test_the_same_tokens_from_our_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(name, tmp_path, "F32", monkeypatch)
    assert open_checkpoint(path).description.model_type == _FAMILIES[name]
    theirs = _llama_cpp_tokens(path)
    assert all(len(tokens) == _NUM_TOKENS for tokens in theirs)
    assert _our_tokens(path) == theirs


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "mamba", "mamba2", "jamba", "falcon_h1"])
def test_the_same_tokens_from_its_own_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp writes every number it knows, those of other architectures too."""
    saved = tmp_path / "saved.gguf"
    theirs = _llama_cpp_tokens(_write(name, tmp_path, "F32", monkeypatch), saved)
    assert _our_tokens(saved) == theirs


@pytest.mark.parametrize("mix", ["F16", "Q8_0"])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "mamba2"])
def test_the_same_tokens_from_narrower_types(
    name: str, mix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp rounds activations too, so that later tokens may differ; the first ones are far from a tie."""
    path = _write(name, tmp_path, mix, monkeypatch)
    ours, theirs = _our_tokens(path), _llama_cpp_tokens(path)
    assert [tokens[:2] for tokens in ours] == [tokens[:2] for tokens in theirs]


@pytest.mark.parametrize("mix", ["IQ2_XXS", "IQ2_XS", "IQ2_M", "IQ3_XXS", "IQ3_M", "TQ1_0", "TQ2_0"])
def test_the_same_tokens_from_few_bits(mix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 256, so that every matrix has the type that the mix names. Few bits bring the best tokens of random ones
    close together, and llama.cpp rounds activations: its first token is one that is as good as ours."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    monkeypatch.setitem(CONFIGS, "llama-wide", partial(tiny_models._llama, **wide))
    path = _write("llama-wide", tmp_path, mix, monkeypatch)
    found = {slot.type_name for slot in map(open_checkpoint(path).tensor, open_checkpoint(path).names())}
    assert find_mix(mix).default in found
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=4, logit_bias={_END: -100.0})
    with LLM(str(path), context=128, concurrency=1, kernels="ref", threads=1) as llm:
        outputs = llm.generate(_PROMPTS, params)
    for output, theirs in zip(outputs, _llama_cpp_tokens(path), strict=True):
        best = output.outputs[0].logprobs[0]
        assert best[theirs[0]].logprob > max(each.logprob for each in best.values()) - 0.15


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mamba2-limits", "cannot express this model's input_bias, output_bias, time_step_limits"),
        ("mamba-biases", "cannot express this model's convolution_bias, input_bias, output_bias"),
        ("bamba", "a GGUF of architecture 'bamba' cannot be written"),
        ("falcon_h1-norms", "GGUF cannot express this model's norm"),
        ("qwen3_next-experts", "layers without experts in 'qwen3next'"),
        ("qwen2_moe-dense", "layers without experts in 'qwen2moe'"),
        ("olmoe-grouped", "fewer KV heads than heads in 'olmoe'"),
        ("cohere-norms", "norms of heads in 'command-r' with fewer than 64 layers"),
        ("deepseek_v2-dense", "no experts in 'deepseek2'"),
    ],
)
def test_what_llama_cpp_cannot_load_is_refused(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    originals = {"qwen2_moe-dense": "qwen2_moe", "olmoe-grouped": "olmoe", "cohere-norms": "cohere"}
    originals["deepseek_v2-dense"] = "deepseek_v2-yarn"
    monkeypatch.setitem(CONFIGS, name, CONFIGS[originals.get(name, name)])
    with pytest.raises(UserError) as caught:
        _write(name, tmp_path, "F16", monkeypatch)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
