"""Experts in host memory: the same tokens as with all experts on the GPU, whatever the slots hold.

On a GPU if there is one, else under Triton's interpreter (test_interpreted.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.models import greedy, write_config
from tests.parity.tiny_models import make, write_tokenizer
from tokenmill import LLM
from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.runtime.report import inspect_model

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("no GPU: test_interpreted.py runs this file under the interpreter", allow_module_level=True)

from tokenmill.kernels.ref_experts import RoutingSpec, route, run_experts
from tokenmill.kernels.triton.experts.host import HostCosts, HostExpert, HostExperts
from tokenmill.kernels.triton.experts.layer import GpuExperts
from tokenmill.kernels.triton.experts.stack import GpuExpertStack, bf16_stack, fp8_stack, int4_stack, mxfp4_stack

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
EXPERTS, LAYERS, HIDDEN, WIDTH, PER_TOKEN = 8, 2, 64, 32, 2
EXPERT_BYTES = 3 * HIDDEN * WIDTH * 2
QUARTER = EXPERTS // 4 * EXPERT_BYTES * LAYERS
MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "head_dim": 32,
    "num_experts": EXPERTS,
    "num_experts_per_tok": PER_TOKEN,
    "moe_intermediate_size": WIDTH,
    "norm_topk_prob": True,
}
PROMPTS = [[5, 9, 30, 77, 4, 9, 100, 42], [8, 60, 23], [19, 99, 7, 3, 55, 12]]


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[LLM]:
    device = {"device": "cuda"} if ON_GPU else {"device": "cpu", "kernels": "triton", "kv_cache_dtype": "bfloat16"}
    common = {"load_format": "dummy", "context": 64, "page_size": 16, "batch_tokens": 24, "concurrency": 4}
    with LLM(folder, **(common | device | options)) as llm:
        yield llm


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model whose weights are drawn on the CPU, so that they do not depend on where they go."""
    from tokenmill.model import dummy_reader
    from tokenmill.model.dummy_reader import DummyReader

    monkeypatch.setattr("tokenmill.model.dummy_reader._SPREAD", 0.1)
    monkeypatch.setattr(
        dummy_reader, "DummyReader", lambda checkpoint, _device: DummyReader(checkpoint, torch.device("cpu"))
    )
    return write_config(tmp_path, "llama", **MOE)


def layers(llm: LLM) -> list[HostExperts]:
    return [block.mlp.stacks.kernel.run for block in llm.parts.runtime.model.decoder.blocks]


def test_a_quarter_of_the_experts_gives_the_same_tokens(folder: Path) -> None:
    with engine(folder) as llm:
        assert not any(isinstance(layer, HostExperts) for layer in layers(llm))
        resident_bytes = llm.parts.runtime.model.weight_bytes
        wanted = greedy(llm, PROMPTS, 4)
    with engine(folder, expert_memory=QUARTER) as llm:
        for layer in layers(llm):  # every missing expert is fetched, whatever was measured on a busy machine
            layer.costs = HostCosts()
        assert greedy(llm, PROMPTS, 4) == wanted
        model = llm.parts.runtime.model
        tables = [layer.residency for layer in layers(llm)]
        assert [table.num_slots for table in tables] == [EXPERTS // 4] * LAYERS
        assert all(table.evicted > 0 for table in tables)
        assert all(table.fetched == table.evicted + len(table.slots) for table in tables)
        assert resident_bytes - model.weight_bytes == EXPERTS * EXPERT_BYTES * LAYERS - QUARTER
        assert [layer.host_bytes for layer in layers(llm)] == [EXPERTS * EXPERT_BYTES] * LAYERS
        assert llm.parts.runtime.executor.name == "cuda_eager"
        declined = dict(llm.parts.runtime.declined_executors)
        assert "experts in host memory" in declined["cuda_graph"]
        for layer in layers(llm):  # every missing expert on the host
            layer.costs = HostCosts(fetch=1.0, first=0.0)
        assert greedy(llm, PROMPTS, 4) == wanted
        assert all(table.computed_on_host > 0 for table in tables)


def test_memory_for_all_experts_keeps_all_on_the_gpu(folder: Path) -> None:
    with engine(folder, expert_memory=EXPERTS * EXPERT_BYTES * LAYERS) as llm:
        assert not any(isinstance(layer, HostExperts) for layer in layers(llm))


def test_memory_for_fewer_experts_than_a_token_needs_is_refused(folder: Path) -> None:
    with (
        pytest.raises(UserError, match="hold 1 experts of each layer, a token needs 2"),
        engine(folder, expert_memory=LAYERS * EXPERT_BYTES),
    ):
        pass


def test_too_little_host_memory_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.model.device_weights.available_memory", lambda: 1000)
    with pytest.raises(UserError, match="of host memory"), engine(folder, expert_memory=QUARTER):
        pass


def test_inspect_says_what_the_gpu_holds(tmp_path: Path) -> None:
    make("qwen3_moe", tmp_path)
    write_tokenizer(tmp_path)
    memory = 3 * 4 * EXPERT_BYTES  # three experts in each of four layers
    options = EngineConfig(device=DEVICE.type, kernels="triton", kv_cache_dtype="bfloat16", expert_memory=memory + 1)
    report = inspect_model(tmp_path, options)
    assert report.executor.runs_on == "cuda_eager"
    assert any("experts in host memory" in reason for reason in report.executor.declined)
    experts = report.experts
    assert experts is not None
    assert (experts.layers, experts.num_experts, experts.experts_per_token) == (4, 8, 2)
    assert experts.bytes == 8 * 4 * 2 * EXPERT_BYTES  # the file is float32
    assert (experts.gpu_slots, experts.gpu_bytes) == (3, memory)


def _stacks(kind: str, rows: int, depth: int, count: int, seed: int) -> tuple[GpuExpertStack, list[GpuExpertStack]]:
    """The same experts as one stack on the device and as stacks of one on the host."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def make(cut: slice, device: torch.device) -> GpuExpertStack:
        parts = [each[cut].to(device) for each in tensors]
        if kind == "bf16":
            return bf16_stack(*parts)
        if kind == "fp8":
            return fp8_stack(*parts)
        return int4_stack(*parts, None) if kind == "int4" else mxfp4_stack(*parts)

    if kind == "bf16":
        tensors = [draw(count, rows, depth) * depth**-0.5, draw(count, rows)]
    elif kind == "fp8":
        tensors = [draw(count, rows, depth).to(torch.float8_e4m3fn), draw(count, rows).abs() * 0.1]
    elif kind == "int4":
        codes = torch.randint(-8, 8, (count, rows, depth), generator=generator, dtype=torch.int8)
        tensors = [codes, draw(count, rows, depth // 32).abs() * 0.02]
    else:
        blocks = torch.randint(0, 256, (count, rows, depth // 2), generator=generator, dtype=torch.uint8)
        tensors = [blocks, torch.randint(118, 124, (count, rows, depth // 32), generator=generator, dtype=torch.uint8)]
    return make(slice(None), DEVICE), [make(slice(e, e + 1), torch.device("cpu")) for e in range(count)]


@pytest.mark.parametrize("kind", ["bf16", "fp8", "int4", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 4, 30])
def test_a_layer_gives_the_same_numbers(kind: str, tokens: int) -> None:
    hidden, inner, slots = 128, 128, 3
    gate_up, gate_up_host = _stacks(kind, 2 * inner, hidden, EXPERTS, 1)
    down, down_host = _stacks(kind, hidden, inner, EXPERTS, 2)
    spec = RoutingSpec(PER_TOKEN)
    resident = GpuExperts(gate_up, down, spec)
    experts = [HostExpert(*pair) for pair in zip(gate_up_host, down_host, strict=True)]
    layer = HostExperts(experts, slots, spec, DEVICE)
    assert layer.nbytes * EXPERTS == resident.nbytes * slots
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        x = torch.randn(tokens, hidden, generator=generator).to(DEVICE, torch.bfloat16)
        logits = torch.randn(tokens, EXPERTS, generator=generator).to(DEVICE)
        assert torch.equal(layer(x, logits), resident(x, logits))


def test_the_host_computes_what_the_specification_says() -> None:
    """With biases, a clamp, and weights on the input."""
    hidden, inner = 64, 32
    _, gate_up = _stacks("bf16", 2 * inner, hidden, EXPERTS, 1)
    _, down = _stacks("bf16", hidden, inner, EXPERTS, 2)
    for spec in (RoutingSpec(PER_TOKEN, clamp=7.0), RoutingSpec(PER_TOKEN, weights_on_input=True)):
        layer = HostExperts([HostExpert(*pair) for pair in zip(gate_up, down, strict=True)], 2, spec, DEVICE)
        layer.costs = HostCosts(fetch=1.0, first=0.0)
        x, logits = torch.randn(5, hidden).bfloat16(), torch.randn(5, EXPERTS)

        def product(stacks: list[GpuExpertStack], expert: int, rows: torch.Tensor) -> torch.Tensor:
            tensors = stacks[expert].tensors
            return torch.nn.functional.linear(rows, tensors.codes.float(), tensors.bias)

        wanted = run_experts(
            x.float(), *route(logits, spec), lambda e, r: product(gate_up, e, r), lambda e, r: product(down, e, r), spec
        )
        got = layer(x.to(DEVICE), logits.to(DEVICE)).cpu().float()
        assert (got - wanted).norm() < 0.01 * wanted.norm()
        assert layer.residency.fetched == 0
