"""Automatic options: decided once, by device and model, with the reason; what somebody set is never replaced."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.resolution import DEVICE_DEFAULTS, Facts, reserve_concurrency, resolve, settle

GPU = Facts(device="cuda", device_reason="found a GPU", trained_context=131072, threads=8)
CPU = Facts(device="cpu", trained_context=2048, threads=4)


@pytest.mark.parametrize(
    ("facts", "concurrency", "batch_tokens", "page_size"), [(CPU, 64, 512, 8), (GPU, 256, 8192, 16)]
)
def test_automatic_values_follow_the_device(facts: Facts, concurrency: int, batch_tokens: int, page_size: int) -> None:
    config = resolve(EngineConfig(), facts)
    assert (config.concurrency, config.batch_tokens, config.page_size) == (concurrency, batch_tokens, page_size)
    assert config.context == min(facts.trained_context, 8192)
    assert (config.device, config.threads) == (facts.device, facts.threads)
    assert config.source("batch_tokens").startswith("automatic: ")


def test_a_set_value_that_equals_another_device_s_default_stays() -> None:
    """Finding D6: --concurrency 64 became 256 on a GPU, --batch-tokens 512 became 8192, --page-size 8 became 16."""
    stated = EngineConfig(concurrency=64, batch_tokens=512, page_size=8, kv_cache_dtype="float32")
    config = resolve(stated, GPU)
    assert (config.concurrency, config.batch_tokens, config.page_size) == (64, 512, 8)
    assert config.kv_cache_dtype == "float32"
    assert config.source("concurrency") == "set by you"


@pytest.mark.parametrize("facts", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("device", DEVICE_DEFAULTS)
def test_no_set_value_is_ever_replaced(facts: Facts, device: str) -> None:
    stated = {"context": 100, "draft_tokens": 8, "threads": 3, "kernels": "ref"}
    for name in ("concurrency", "batch_tokens", "page_size", "kv_cache_dtype"):
        stated[name] = getattr(DEVICE_DEFAULTS[device], name)
    config = resolve(EngineConfig(**stated), facts)  # type: ignore[arg-type]
    assert {name: getattr(config, name) for name in stated} == stated
    assert {config.source(name) for name in stated} == {"set by you"}


def test_automatic_pages_suit_the_kv_dtype_and_set_ones_must() -> None:
    facts = replace(CPU, page_multiple=32)
    config = resolve(EngineConfig(kv_cache_dtype="kivi2"), facts)
    assert (config.page_size, config.source("page_size")) == (32, "automatic: KV dtype kivi2 groups 32 tokens")
    assert resolve(EngineConfig(kv_cache_dtype="kivi2", page_size=64), facts).page_size == 64
    with pytest.raises(UserError, match="--page-size 32"):
        resolve(EngineConfig(kv_cache_dtype="kivi2", page_size=8), facts)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"context": 4096}, "lower --context"),
        ({"quantization": "fp8"}, "--device cuda"),
        ({"gpu_memory_utilization": 0.9}, "--memory"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused(options: dict[str, object], remedy: str) -> None:
    with pytest.raises(UserError, match=remedy):
        resolve(EngineConfig.from_options(options), CPU)


def test_a_gpu_computes_in_the_checkpoint_s_own_type() -> None:
    gpu = replace(GPU, gpu_kernels=True)
    found = {
        stored: resolve(EngineConfig(), replace(gpu, stored_dtype=stored))
        for stored in ("float16", "bfloat16", "float32", "")
    }
    assert {stored: config.dtype for stored, config in found.items()} == {
        "float16": "float16", "bfloat16": "bfloat16", "float32": "bfloat16", "": "bfloat16",
    }  # fmt: skip
    assert {config.kv_cache_dtype == config.dtype for config in found.values()} == {True}
    stated = resolve(EngineConfig(dtype="float16", kv_cache_dtype="fp8"), gpu)
    assert (stated.dtype, stated.kv_cache_dtype, stated.source("dtype")) == ("float16", "fp8", "set by you")
    wide = resolve(EngineConfig(dtype="bfloat16"), replace(gpu, stored_dtype="float16"))
    assert (wide.dtype, wide.kv_cache_dtype) == ("bfloat16", "bfloat16")


def test_a_model_that_does_not_run_in_float16_runs_in_bfloat16_and_says_why() -> None:
    facts = replace(GPU, gpu_kernels=True, stored_dtype="float16", no_float16="GPU kernels for experts do not have it")
    config = resolve(EngineConfig(), facts)
    assert (config.dtype, config.kv_cache_dtype) == ("bfloat16", "bfloat16")
    assert config.source("dtype") == "automatic: the checkpoint is float16, but GPU kernels for experts do not have it"
    with pytest.raises(UserError, match="experts") as error:
        resolve(EngineConfig(dtype="float16"), facts)
    assert error.value.remedy == "use --dtype bfloat16"


@pytest.mark.parametrize("facts", [CPU, GPU], ids=["cpu", "reference kernels"])
def test_what_computes_in_float32_takes_no_dtype(facts: Facts) -> None:
    facts = replace(facts, stored_dtype="float16")
    assert resolve(EngineConfig(), facts).dtype == "float32"
    for dtype in ("float16", "bfloat16"):
        with pytest.raises(UserError, match="in float32"):
            resolve(EngineConfig(dtype=dtype), facts)


def test_eager_means_the_device_s_own() -> None:
    assert resolve(EngineConfig(executor="eager"), GPU).executor == "cuda_eager"
    assert resolve(EngineConfig(executor="eager"), CPU).executor == "eager"


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_every_choice_is_logged_with_its_reason() -> None:
    logger, handler = logging.getLogger("tokenmill"), _Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        config = resolve(EngineConfig(concurrency=2), CPU)
        settle(config, executor=("recorded", "first of all"), memory=(1 << 20, "context x concurrency"))
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
    lines = handler.lines
    assert "context = 2048 (automatic: what the model was trained for)" in lines
    assert "executor = recorded (automatic: first of all)" in lines
    assert not any(line.startswith("concurrency") for line in lines)
    assert len(lines) == len(set(lines))


def test_what_loading_decides_does_not_replace_what_was_set() -> None:
    config = resolve(EngineConfig(memory=1 << 30), CPU)
    config = settle(config, memory=(1 << 20, "less was needed"), executor=("recorded", "fastest"))
    assert (config.memory, config.source("memory")) == (1 << 30, "set by you")
    assert (config.executor, config.source("executor")) == ("recorded", "automatic: fastest")


def test_a_job_s_requests_must_fit() -> None:
    assert reserve_concurrency(EngineConfig(), 4, "--batch-size").concurrency is None
    raised = reserve_concurrency(EngineConfig(), 100, "--batch-size")
    assert (raised.concurrency, raised.source("concurrency")) == (100, "automatic: --batch-size 100")
    assert reserve_concurrency(EngineConfig(concurrency=4), 4, "--n").concurrency == 4
    with pytest.raises(UserError, match="raise --concurrency"):
        reserve_concurrency(EngineConfig(concurrency=4), 5, "--n")


def test_kv_pages_are_halves_where_a_cpu_multiplies_them_and_weights_are_coarser() -> None:
    config = resolve(EngineConfig(), replace(CPU, half_pages=True))
    assert config.kv_cache_dtype == "float16"
    assert config.source("kv_cache_dtype").startswith("automatic: this CPU multiplies in it")
    assert resolve(EngineConfig(kv_cache_dtype="float32"), replace(CPU, half_pages=True)).kv_cache_dtype == "float32"
    assert resolve(EngineConfig(), CPU).kv_cache_dtype == "float32"
