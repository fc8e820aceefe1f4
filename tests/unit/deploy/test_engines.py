"""Launch lines: ours is accepted by our own parser, others carry flags that exist today, refusals name the way out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml

from tokenmill.cli.quantize import quantize
from tokenmill.deploy.engines import ENGINES
from tokenmill.deploy.engines.base import COMPRESSED_TENSORS, GGUF_TYPES
from tokenmill.deploy.render import find_engine, render
from tokenmill.deploy.serving import Serving, object_name
from tokenmill.errors import UserError
from tokenmill.hardware.catalog import load_catalog
from tokenmill.model.formats.files import FILE_FORMATS
from tokenmill.quantize.methods import SOLVERS, TRANSFORMS
from tokenmill.serve.config import split_options

CATALOG = load_catalog()
H100 = Serving("org/model-70b", "model-70b", CATALOG.find_device("h100"), tp=4, replicas=2, weights="fp8", kv_bits=8.0)
H200 = Serving("org/model-8b", "model-8b", CATALOG.find_device("h200"), replicas=2)  # one device, as we serve
CPU = Serving("org/model-1b", "model-1b", CATALOG.find_device("xeon-8480"), weights="q4_k_m", stored="q4_k_m")


def flags(command: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for at, word in enumerate(command):
        if word.startswith("--"):
            following = command[at + 1] if at + 1 < len(command) else ""
            found[word] = "" if following.startswith("--") else following
    return found


def test_our_own_line_is_one_we_accept() -> None:
    launch = find_engine("tokenmill").launch(replace(CPU, max_sequences=24, context=4096))
    assert launch.command[:3] == ("tokenmill", "serve", "org/model-1b")
    options = {name[2:]: value for name, value in flags(launch.command).items()}
    server, engine = split_options(options)
    assert (server.host, server.port, server.served_model_name) == ("0.0.0.0", 8000, ("model-1b",))
    assert (engine.context, engine.concurrency, engine.kv_cache_dtype) == (4096, 24, "bfloat16")


def test_our_line_for_a_gpu_is_one_we_accept() -> None:
    serving = replace(H200, weights="fp8", kv_bits=8.0, max_sequences=128, memory_share=0.9, context=16384)
    launch = find_engine("tokenmill").launch(serving)
    assert launch.prepare == ()  # FP8 is rounded at load
    server, engine = split_options({name[2:]: value for name, value in flags(launch.command).items()})
    assert server.served_model_name == ("model-8b",)
    assert (engine.device, engine.quantization, engine.kv_cache_dtype) == ("cuda", "fp8", "fp8")
    assert (engine.gpu_memory_utilization, engine.batch_tokens) == (0.9, 8192)
    assert (engine.context, engine.concurrency) == (16384, 128)


@pytest.mark.parametrize(
    ("weights", "stored", "quantization", "made"),
    [
        ("bf16", "bf16", None, ""),
        ("fp8", "fp8", None, ""),
        ("int4-g128", "bf16", None, "--method gptq"),
        ("int8", "bf16", None, "--method smoothquant+gptq"),
        ("q4_k_m", "q4_k_m", None, ""),
        ("fp8", "bf16", "fp8", ""),
    ],
)
def test_weights_on_a_gpu_are_stored_rounded_at_load_or_made_first(
    weights: str, stored: str, quantization: str | None, made: str
) -> None:
    launch = find_engine("tokenmill").launch(replace(H200, weights=weights, stored=stored))
    assert flags(launch.command).get("--quantization") == quantization
    assert len(launch.prepare) == bool(made)
    assert made in "".join(launch.prepare)


def test_kv_of_eight_bits_is_int8_where_the_gpu_has_no_fp8() -> None:
    a100 = replace(H200, device=CATALOG.find_device("a100-80"), kv_bits=8.0)
    assert flags(find_engine("tokenmill").launch(a100).command)["--kv-cache-dtype"] == "int8"


def test_our_image_follows_the_device() -> None:
    engine = find_engine("tokenmill")
    assert engine.image_for(H200).endswith("-cuda")
    assert not engine.image_for(CPU).endswith("-cuda")
    assert any("Dockerfile.cuda" in note for note in engine.launch(H200).notes)


@pytest.mark.parametrize(
    ("serving", "remedy"),
    [
        (replace(H200, data_parallel=2), "more replicas"),
        (replace(H200, device=CATALOG.find_device("mi300x")), "vllm"),
        (replace(H200, weights="nvfp4"), "int4-g128"),
        (replace(CPU, kv_bits=5.0), "bf16"),
    ],
)
def test_ours_refuses_what_it_cannot_run(serving: Serving, remedy: str) -> None:
    with pytest.raises(UserError, match=remedy):
        find_engine("tokenmill").launch(serving)


def test_vllm_quantizes_fp8_at_load_by_the_name_of_today() -> None:
    found = flags(find_engine("vllm").launch(H100).command)
    assert found["--quantization"] == "fp8_per_tensor"
    assert found["--kv-cache-dtype"] == "fp8"
    assert found["--tensor-parallel-size"] == "4"
    stored = flags(find_engine("vllm").launch(replace(H100, stored="fp8")).command)
    assert "--quantization" not in stored


def test_experts_lie_as_planned() -> None:
    """Attention copied eight times, whole experts on eight devices: each engine has its own words for it."""
    serving = replace(H100, tp=1, data_parallel=8, ep=8)
    assert serving.devices == 8
    vllm = flags(find_engine("vllm").launch(serving).command)
    assert (vllm["--data-parallel-size"], vllm["--max-num-seqs"]) == ("8", "8")  # of each copy
    assert "--enable-expert-parallel" in vllm
    assert "--tensor-parallel-size" not in vllm
    sglang = flags(find_engine("sglang").launch(serving).command)
    assert (sglang["--tp-size"], sglang["--dp-size"], sglang["--ep-size"]) == ("8", "8", "8")
    assert "--enable-dp-attention" in sglang
    trtllm = find_engine("trtllm").launch(serving)
    assert (flags(trtllm.command)["--tp_size"], flags(trtllm.command)["--ep_size"]) == ("8", "8")
    assert yaml.safe_load(trtllm.files["options.yaml"])["enable_attention_dp"] is True


def test_a_plan_with_drafts_says_so() -> None:
    assert any(
        "4 drafts" in note for note in render("command", find_engine("vllm"), replace(H100, draft_tokens=4)).notes
    )
    assert not any("drafts" in note for note in render("command", find_engine("vllm"), H100).notes)


@pytest.mark.parametrize(
    ("device", "bits", "vllm", "sglang"),
    [
        ("h100", 16, "auto", "auto"),
        ("h100", 8, "fp8", "fp8_e4m3"),
        ("a100-80", 8, "int8_per_token_head", "fp8_e5m2"),
        ("b200", 4, "int4_per_token_head", "fp4_e2m1"),
    ],
)
def test_kv_dtypes_follow_the_hardware(device: str, bits: float, vllm: str, sglang: str) -> None:
    serving = replace(H100, device=CATALOG.find_device(device), weights="bf16", kv_bits=bits)
    assert flags(find_engine("vllm").launch(serving).command)["--kv-cache-dtype"] == vllm
    assert flags(find_engine("sglang").launch(serving).command)["--kv-cache-dtype"] == sglang


def test_four_bit_weights_are_made_first() -> None:
    launch = find_engine("vllm").launch(replace(H100, weights="int4-g128"))
    (line,) = launch.prepare
    assert "--bits 4 --group-size 128" in line
    assert launch.command[2] == "/models/model-70b-int4-g128"
    assert f"[ -e {launch.command[2]} ]" in line


def test_recipes_use_flags_and_names_that_quantize_has() -> None:
    known = {"--" + name.replace("_", "-") for name in quantize.__annotations__} | {"--symmetric"}
    for recipe in (*COMPRESSED_TENSORS.values(), *GGUF_TYPES.values()):
        words = tuple(recipe.split())
        assert {word for word in words if word.startswith("--")} <= known
        found = flags(words)
        assert found.get("--format", "compressed-tensors") in FILE_FORMATS
        for method in found.get("--method", "rtn").split("+"):
            assert method in (*SOLVERS, *TRANSFORMS, "imatrix")


def test_trtllm_puts_the_rest_into_its_file() -> None:
    engine = find_engine("trtllm")
    launch = engine.launch(H100, "prefill")
    options = yaml.safe_load(launch.files["options.yaml"])
    assert options["kv_cache_config"]["dtype"] == "fp8"
    assert options["disable_overlap_scheduler"] is True
    assert "disable_overlap_scheduler" not in yaml.safe_load(engine.launch(H100, "decode").files["options.yaml"])
    with pytest.raises(UserError, match="does not run on mi300x"):
        engine.launch(replace(H100, device=CATALOG.find_device("mi300x")))


def test_llamacpp_gives_every_slot_its_context() -> None:
    found = flags(find_engine("llama.cpp").launch(replace(CPU, users=4, context=4096)).command)
    assert (found["--parallel"], found["--ctx-size"]) == ("4", "16384")
    with pytest.raises(UserError, match="cannot serve fp8"):
        find_engine("llamacpp").launch(replace(CPU, weights="fp8", stored="bf16"))


def test_ollama_is_set_up_by_its_environment() -> None:
    launch = find_engine("ollama").launch(replace(CPU, model="/models/m.gguf", kv_bits=8.0))
    environment = dict(launch.environment)
    assert environment["OLLAMA_KV_CACHE_TYPE"] == "q8_0"
    assert environment["OLLAMA_NUM_PARALLEL"] == "4"
    assert any("ollama create model-1b" in line for line in launch.prepare)


def test_every_engine_either_splits_or_says_that_it_cannot() -> None:
    for name in ENGINES:
        engine = find_engine(name)
        serving = CPU if name in ("tokenmill", "llamacpp", "ollama") else H100
        if engine.can_split:
            assert engine.launch(serving, "prefill") != engine.launch(serving, "decode")
            _, router = engine.router(serving, ("a", "b"), ("c",))
            told = json.dumps([router.command, router.files, engine.peers(("a", "b"))])
            assert all(f"{host}:" in told for host in "abc")
        else:
            with pytest.raises(UserError, match="cannot split"):
                engine.launch(serving, "prefill")


@pytest.mark.parametrize(
    ("model", "name"),
    [("meta-llama/Llama-3.1-70B", "llama-3-1-70b"), ("/models/a_b.Q4_K_M.gguf", "a-b-q4-k-m"), ("x/7b-it", "m-7b-it")],
)
def test_names_of_objects(model: str, name: str) -> None:
    assert object_name(model) == name
