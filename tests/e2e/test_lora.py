"""Adapters through the engine: the tokens of each are those of a model merged with it, alone, in a mixed batch, after
preemption, with drafts, with pages from a tier; what does not fit is refused by name; eval, run and bench take them."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity.tiny_models import make, write_tokenizer
from tests.random_adapters import make_adapter
from tokenmill.checkpoint.adapters.peft import read_adapter
from tokenmill.cli.main import main
from tokenmill.engine.async_engine import AsyncEngine
from tokenmill.engine.llm import LLM
from tokenmill.errors import UserError
from tokenmill.types import CacheControl, SamplingParams

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
_WEIGHTS = "model.safetensors"


def merged(model: Path, adapter: Path, folder: Path) -> Path:
    """The model with the adapter added to its weights."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / _WEIGHTS)
    for name, matrix in read_adapter(adapter).matrices.items():
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] + matrix.delta()
    save_file(tensors, folder / _WEIGHTS, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make("llama", folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    return {
        "a": make_adapter(model, folder / "a", 1),
        "b": make_adapter(model, folder / "b", 2, rank=8, targets=every),
        "c": make_adapter(model, folder / "c", 3, rank=1, targets=("gate_proj",), strength=3.0),
    }


@pytest.fixture(scope="module")
def expected(
    model: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str | None, list[int]]:
    """What merged models say."""
    folder = tmp_path_factory.mktemp("merged")
    models = {None: model, **{name: merged(model, path, folder / name) for name, path in adapters.items()}}
    said: dict[str | None, list[int]] = {}
    for name, path in models.items():
        with LLM(path, context=64, concurrency=8) as llm:
            said[name] = tokens(llm)
    assert len({tuple(each) for each in said.values()}) == len(said), "the adapters change nothing"
    return said


def tokens(llm: LLM, lora: str | None = None) -> list[int]:
    return llm.generate(PROMPT, GREEDY, lora=lora)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def engine(model: Path, adapters: dict[str, Path]) -> Iterator[LLM]:
    with LLM(model, context=64, concurrency=8, loras=adapters, max_loras=2) as llm:
        yield llm


def test_alone_and_in_a_mixed_batch_each_says_what_its_merged_model_says(
    engine: LLM, expected: dict[str | None, list[int]]
) -> None:
    for name, said in expected.items():
        assert tokens(engine, name) == said
    names = [*expected] * 4  # three adapters over two slots, in one batch
    outputs = engine.generate([PROMPT] * len(names), GREEDY, lora=names)
    assert [output.outputs[0].token_ids for output in outputs] == [expected[name] for name in names]


def test_siblings_have_the_adapter_too(engine: LLM, expected: dict[str | None, list[int]]) -> None:
    (output,) = engine.generate(PROMPT, SamplingParams(n=3, max_tokens=12, temperature=0.0, ignore_eos=True), lora="b")
    assert [each.token_ids for each in output.outputs] == [expected["b"]] * 3


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "self:layers=1", "self:q4_0"])
def test_drafts_are_checked_with_the_adapter(
    drafter: str, model: Path, adapters: dict[str, Path], expected: dict[str | None, list[int]]
) -> None:
    with LLM(model, context=64, concurrency=8, loras=adapters, speculate=drafter) as llm:
        names = [*expected] * 2
        outputs = llm.generate([PROMPT] * len(names), GREEDY, lora=names)
        assert [output.outputs[0].token_ids for output in outputs] == [expected[name] for name in names]


def test_after_preemption_the_adapter_is_the_same(
    model: Path, adapters: dict[str, Path], expected: dict[str | None, list[int]]
) -> None:
    with LLM(model, context=64, concurrency=8, loras=adapters, memory="70KiB", max_loras=1) as llm:
        names = [*expected] * 3
        outputs = llm.generate([PROMPT] * len(names), GREEDY, lora=names)
        assert [output.outputs[0].token_ids for output in outputs] == [expected[name] for name in names]


def test_steps_that_watch_attention_have_the_adapters_too(
    model: Path, adapters: dict[str, Path], expected: dict[str | None, list[int]]
) -> None:
    watched = SamplingParams(
        max_tokens=12, temperature=0.0, ignore_eos=True, cache=CacheControl(policy="h2o", budget=64)
    )
    with LLM(model, context=64, concurrency=8, loras=adapters, max_loras=2) as llm:
        for name, said in expected.items():
            assert llm.generate(PROMPT, watched, lora=name)[0].outputs[0].token_ids == said
        names = [*expected] * 2
        outputs = llm.generate([PROMPT] * len(names), [watched, GREEDY] * len(expected), lora=names)
        assert [output.outputs[0].token_ids for output in outputs] == [expected[name] for name in names]
        llm.load_lora("d", adapters["a"])  # its slot is filled while attention is watched
        assert tokens(llm, "d") == expected["a"]


def test_vectors_have_the_one_adapter(model: Path, adapters: dict[str, Path]) -> None:
    with LLM(model, context=64, concurrency=8, loras={"b": adapters["b"]}) as llm:
        (plain,) = llm.embed(PROMPT)
        llm.use_only_lora()
        (adapted,) = llm.embed(PROMPT)
    assert adapted != plain


def test_pages_from_a_tier_are_those_of_the_adapter(
    model: Path, adapters: dict[str, Path], expected: dict[str | None, list[int]], tmp_path: Path
) -> None:
    for _ in range(2):  # the second engine finds what the first one wrote
        with LLM(model, context=64, concurrency=8, loras=adapters, kv_disk=str(tmp_path / "pages")) as llm:
            for name, said in expected.items():
                assert tokens(llm, name) == said


def test_load_replace_and_unload(model: Path, adapters: dict[str, Path], expected: dict[str | None, list[int]]) -> None:
    with LLM(model, context=64, concurrency=8, enable_lora=True) as llm:
        llm.load_lora("x", adapters["a"])
        assert tokens(llm, "x") == expected["a"]
        llm.load_lora("x", adapters["b"], replace=True)
        assert tokens(llm, "x") == expected["b"]  # with the same prompt: its pages are not those of `a`
        llm.unload_lora("x")
        assert llm.loras == []
        assert llm.parts.runtime.runner.adapter_bytes == 0
        with pytest.raises(UserError, match="adapter 'x' is not loaded"):
            tokens(llm, "x")
        assert tokens(llm) == expected[None]


def test_the_streaming_engine_changes_adapters_beside_its_steps(
    model: Path, adapters: dict[str, Path], expected: dict[str | None, list[int]]
) -> None:
    async def said(engine: AsyncEngine, name: str | None, params: SamplingParams = GREEDY) -> list[int]:
        tokens: list[int] = []
        async for update in engine.generate(PROMPT, params, lora=name):
            tokens = update.output.outputs[0].token_ids
        return tokens

    async def scenario() -> None:
        async with AsyncEngine(model, context=64, concurrency=8, enable_lora=True, max_lora_rank=8) as engine:
            await engine.load_lora("x", adapters["a"])
            both = asyncio.gather(said(engine, "x"), said(engine, None))
            await engine.load_lora("y", adapters["b"])
            assert await both == [expected["a"], expected[None]]
            assert await said(engine, "y") == expected["b"]
            with pytest.raises(UserError, match="has already been loaded"):
                await engine.load_lora("x", adapters["b"])
            with pytest.raises(UserError, match="does not exist"):
                await engine.load_lora("z", adapters["a"] / "nothing")
            await engine.unload_lora("x", drain=True)
            with pytest.raises(UserError, match="is not loaded"):
                await engine.unload_lora("x")

    asyncio.run(scenario())


def test_structured_output_works_with_an_adapter(engine: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, allowed_token_ids=(5, 6))
    (output,) = engine.generate(PROMPT, params, lora="a")
    assert set(output.outputs[0].token_ids) <= {5, 6}


# --- bad input: one clear error each, exit code 2 ---


def damaged(adapter: Path, folder: Path, what: str) -> Path:
    shutil.copytree(adapter, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(iter(tensors))
    if what == "nan":
        tensors[name][0, 0] = torch.nan
    elif what == "shape":
        tensors = {
            key: torch.zeros(tensor.shape[0], 48) if key.endswith("lora_A.weight") else tensor
            for key, tensor in tensors.items()
        }
    elif what == "missing":
        (folder / "adapter_model.safetensors").unlink()
        return folder
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("what", "says"),
    [("nan", "NaN"), ("shape", "does not fit base"), ("missing", "is missing"), ("rank", "rank 8"), ("gone", "exist")],
)
def test_an_adapter_that_cannot_be_served_ends_the_command(
    what: str, says: str, model: Path, adapters: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = adapters["b"] if what == "rank" else damaged(adapters["a"], tmp_path / what, what)
    limit = ["--max-lora-rank", "4"] if what == "rank" else []
    if what == "gone":
        path = tmp_path / "nowhere"
    arguments = ["bench", "throughput", str(model), "--num-prompts", "1", "--output-len", "2", "--input-len", "4"]
    assert main([*arguments, "--lora", f"x={path}", *limit]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error


def test_memory_that_holds_no_adapter_is_refused(model: Path, adapters: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="--lora-memory"):
        LLM(model, context=64, loras=adapters, lora_memory="1KiB")
    with pytest.raises(UserError, match="keep one"):
        LLM(model, context=64, loras=adapters, lora_memory="1GiB", max_loras=2)
    with pytest.raises(UserError, match="--enable-lora"), LLM(model, context=64) as llm:
        llm.load_lora("a", adapters["a"])


def test_the_memory_says_how_many_lie_on_the_device(model: Path, adapters: dict[str, Path]) -> None:
    with LLM(model, context=64, loras=adapters, lora_memory="1MiB") as llm:
        assert llm.parts.config.max_lora_rank == 8
        assert llm.parts.config.max_loras == llm.parts.core.scheduler.adapters.num_slots > 2


# --- verbs ---


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    found: dict = json.loads(capsys.readouterr().out)
    return found


def test_run_uses_the_one_adapter(
    model: Path,
    adapters: dict[str, Path],
    expected: dict[str | None, list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    ids = ",".join(map(str, PROMPT))
    flags = ["--token-ids", ids, "--max-tokens", "12", "--ignore-eos", "--context", "64"]
    said = run(capsys, "run", str(model), *flags, "--lora", f"b={adapters['b']}")
    assert said["token_ids"] == expected["b"]
    two = [word for name in "ab" for word in ("--lora", f"{name}={adapters[name]}")]
    assert main(["run", str(model), *flags, *two]) == 2
    assert "give one --lora" in capsys.readouterr().err


def test_eval_measures_the_base_with_its_adapter(
    model: Path, adapters: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text(" ".join(f"w{(7 * n * n + 3 * n) % 128}" for n in range(300)))
    flags = ["--text", str(text), "--context", "64"]
    whole = merged(model, adapters["b"], tmp_path / "merged")
    apart = run(capsys, "eval", "perplexity", str(model), *flags, "--lora", f"b={adapters['b']}")
    together = run(capsys, "eval", "perplexity", str(whole), *flags)
    base = run(capsys, "eval", "perplexity", str(model), *flags)
    assert apart["perplexity"] == pytest.approx(together["perplexity"], rel=1e-4)
    assert base["perplexity"] != pytest.approx(apart["perplexity"], rel=1e-2)
    apart = run(
        capsys, "eval", "divergence", str(model), *flags, "--reference", str(whole), "--lora", f"b={adapters['b']}"
    )
    assert apart["kld_mean"] < 1e-6


def test_bench_mixes_adapters(model: Path, adapters: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    loras = [word for name, path in adapters.items() for word in ("--lora", f"{name}={path}")]
    flags = ["--input-len", "8", "--output-len", "4", *loras]
    found = run(capsys, "bench", "throughput", str(model), "--num-prompts", "8", *flags, "--lora-mix", "a=0.5,b=0.25")
    assert found["output_tokens"] == 32
    found = run(capsys, "bench", "latency", str(model), "--batch-size", "4", "--repeat", "1", *flags)
    assert found["decode_tok_s"] > 0
