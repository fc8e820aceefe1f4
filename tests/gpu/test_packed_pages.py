"""Quantized KV pages with the GPU executors: on a GPU if there is one, else under Triton's interpreter
(test_interpreted.py runs this file so)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.models import greedy, worst_choice, write_config
from tests.gpu.test_executors import LENGTH, ON_GPU, config, engine, prompts, same_weights, spec  # noqa: F401
from tokenmill.config import EngineConfig
from tokenmill.resolution import resolve
from tokenmill.runtime.observation.key_conditioning import find_conditioning


@pytest.mark.usefixtures("same_weights")
@pytest.mark.parametrize(
    "dtype", ["int8", "int8_per_token_head", "int4", "turboquant4"] if ON_GPU else ["int8", "int4"]
)
@pytest.mark.parametrize("name", ["llama", "gemma3"] if ON_GPU else ["llama"])
def test_tokens_stay_close_to_the_spec(tmp_path: Path, name: str, dtype: str) -> None:
    folder = config(tmp_path, name)
    asked = prompts(2)
    answers = {}
    for executor in ("cuda_graph", "cuda_eager") if ON_GPU else ("cuda_graph",):
        with engine(folder, executor, kv_cache_dtype=dtype) as llm:
            answers[executor] = greedy(llm, asked, LENGTH)  # across a page, in chunks of prompts beside decodes
            store = llm.parts.runtime.store
            assert all(store.packed_pages(slot) is not None for slot in range(store.layout.layers_per_page))
            assert store.nbytes == llm.parts.runtime.budget.nbytes
            conditioned = [store.packed_pages(slot).keys is not None for slot in range(store.layout.layers_per_page)]
            assert set(conditioned) == {name == "llama" and dtype in ("int4", "turboquant4")}
            if conditioned[0]:
                keys = store.packed_pages(0).keys
                assert bool((keys.scale == 1).all())  # scales are for rounding with feedback
                assert bool((keys.center != 0).any())
    with spec(folder) as reference:
        for prompt, answer in zip(asked, answers["cuda_graph"], strict=True):
            assert worst_choice(reference, prompt, answer) < (0.1 if dtype.startswith("int8") else 0.6)


@pytest.mark.usefixtures("same_weights")
def test_edge_layers_are_floats_beside_quantized_ones(tmp_path: Path) -> None:
    folder = write_config(tmp_path, num_hidden_layers=3)
    (prompt,) = prompts(1, 9)
    with engine(folder, "cuda_graph", kv_cache_dtype="int8", kv_native_layers=1) as llm:
        (answer,) = greedy(llm, [prompt], 2)
        store = llm.parts.runtime.store
        assert [store.packed_pages(slot) is not None for slot in range(3)] == [False, True, False]
    with spec(folder) as reference:
        assert worst_choice(reference, prompt, answer) < 0.1


@pytest.mark.usefixtures("same_weights")
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_keys_are_measured_on_the_device_as_by_the_spec(tmp_path: Path, name: str) -> None:
    folder = config(tmp_path, name)
    with engine(folder, "cuda_eager", kv_cache_dtype="int4") as llm:
        found = find_conditioning(llm.parts.runtime.model, resolve(EngineConfig()), 16)
    with spec(folder) as reference:
        wanted = find_conditioning(reference.parts.runtime.model, resolve(EngineConfig()), 16)
    assert found.keys() == wanted.keys()
    for layer, conditioning in found.items():
        for field in ("center", "scale", "query_moment"):
            mine, theirs = getattr(conditioning, field), getattr(wanted[layer], field)
            assert float((mine - theirs).norm() / theirs.norm()) < 0.03  # bf16 activations


@pytest.mark.skipif(not ON_GPU, reason="calibration computes 2,048 tokens: too many for the interpreter")
@pytest.mark.usefixtures("same_weights")
def test_calibrated_pages_are_read_by_torch(tmp_path: Path) -> None:
    folder = config(tmp_path, "llama")
    (prompt,) = prompts(1, 9)
    with engine(folder, "cuda_eager", kv_cache_dtype="kvquant_k3v4") as llm:
        store = llm.parts.runtime.store
        found = store.meaning()
        (answer,) = greedy(llm, [prompt], 2)
        assert store.gpu_declines(0) is not None
    assert found != type(store)(store.layout, 1, store.device).meaning()
    with spec(folder) as reference:
        assert worst_choice(reference, prompt, answer) < 0.6
