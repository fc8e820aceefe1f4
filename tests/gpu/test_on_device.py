"""What only a GPU can show: the host waits once per decode step; memory is what was predicted; options stay as set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.models import write_config
from tokenmill import LLM, SamplingParams

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

_WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaMemcpy")


def test_a_decode_step_waits_for_one_event_and_nothing_else(tmp_path: Path) -> None:
    folder = write_config(tmp_path)
    params = SamplingParams(temperature=0.7, max_tokens=40, ignore_eos=True)
    with LLM(folder, load_format="dummy", device="cuda", context=128) as llm:
        core, intake = llm.parts.core, llm.parts.intake
        for number in range(3):
            core.add(intake.request([number, 5, 9], params))
        for _ in range(8):  # the prompt, an eager step, a captured one
            core.step()
        steps = 6
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(steps):
                core.step()
        calls = {event.key: event.count for event in profile.key_averages()}
        assert calls.get("cudaGraphLaunch", 0) == steps, calls
        assert not [name for name in _WAITS if name in calls], calls
        assert calls.get("cudaEventSynchronize", 0) <= steps, calls


def test_no_op_of_a_step_synchronizes(tmp_path: Path) -> None:
    """torch itself raises on any call that would wait for the device, the event at the end of a step apart."""
    with LLM(write_config(tmp_path), load_format="dummy", device="cuda", context=128) as llm:
        core, intake = llm.parts.core, llm.parts.intake
        core.add(intake.request([1, 2, 3], SamplingParams(temperature=0.7, max_tokens=30, ignore_eos=True)))
        for _ in range(4):
            core.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(8):
                core.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_pages_and_weights_take_the_bytes_that_were_predicted(tmp_path: Path) -> None:
    folder = write_config(tmp_path, hidden_size=512, intermediate_size=1024, vocab_size=1024)
    before = torch.cuda.memory_allocated()
    with LLM(folder, load_format="dummy", device="cuda", context=256, concurrency=8, memory="64MiB") as llm:
        runtime: Any = llm.parts.runtime
        assert runtime.store.nbytes == runtime.budget.nbytes
        taken = torch.cuda.memory_allocated() - before
        promised = runtime.model.weight_bytes + runtime.store.nbytes
        assert promised <= taken < promised + (64 << 20)  # rotary tables, input buffers, kernels' scratch
        assert llm.parts.config.page_size == 16


def test_what_was_set_stays_and_the_rest_is_the_gpu_s(tmp_path: Path) -> None:
    folder = write_config(tmp_path)
    with LLM(folder, load_format="dummy", context=128, concurrency=64, batch_tokens=512, page_size=8) as llm:
        config = llm.parts.config
        assert (config.concurrency, config.batch_tokens, config.page_size) == (64, 512, 8)
        assert config.source("concurrency") == "set by you"
        assert (config.device, config.kv_cache_dtype) == ("cuda", "bfloat16")
    with LLM(folder, load_format="dummy", context=128) as llm:
        assert (llm.parts.config.concurrency, llm.parts.config.batch_tokens) == (256, 8192)


def test_a_share_of_the_gpu_limits_weights_pages_and_steps(tmp_path: Path) -> None:
    folder = write_config(tmp_path)
    total = torch.cuda.get_device_properties(0).total_memory
    with LLM(folder, load_format="dummy", device="cuda", context=128, gpu_memory_utilization=0.1) as llm:
        assert llm.parts.runtime.store.nbytes <= total // 10
