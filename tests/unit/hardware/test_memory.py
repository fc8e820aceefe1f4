"""The memory model against the engine's own paging, and the closed forms of KV, activations and runtime."""

from __future__ import annotations

import pytest

from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import LayerKV, build_layout
from tokenmill.hardware.memory import GIB, KVNeed, activation_bytes, free_within, sequence_bytes, token_capacity
from tokenmill.hardware.weight_formats import find_format, grouped_bits


@pytest.mark.parametrize("tokens", [1, 16, 17, 511, 512, 513, 4000])
def test_planner_and_engine_page_alike(tokens: int) -> None:
    """15 sliding and 3 full layers, as Gemma 3 270M: the planner's bytes are the engine's pages."""
    layers = [LayerKV("full" if i % 6 == 5 else "sliding", 1, 256, 0 if i % 6 == 5 else 512) for i in range(18)]
    layout = build_layout(layers, 16)
    page_bytes = layout.values_per_page * 2
    needs = [KVNeed("sliding", 15, 2 * 256 * 2, 512), KVNeed("full", 3, 2 * 256 * 2)]
    assert sequence_bytes(needs, tokens, 16) == layout.pages_for(tokens) * page_bytes


def test_a_share_of_the_device_is_of_its_total_memory() -> None:
    """80 GiB, of which 16 are held by this process already and 60 are free: 4 are another's."""
    assert free_within(0.5, 80 * GIB, 60 * GIB, 16 * GIB) == 24 * GIB
    assert free_within(0.1, 80 * GIB, 60 * GIB, 16 * GIB) == 0
    assert free_within(0.95, 80 * GIB, 60 * GIB, 16 * GIB) == 60 * GIB
    with pytest.raises(UserError, match=r"--gpu-memory-utilization 0\.95 or less"):
        free_within(0.96, 80 * GIB, 60 * GIB, 16 * GIB)


def test_groups_pad_to_equal_size() -> None:
    """26 layers as 22 sliding and 4 full: groups of 4, so the sliding kind pays for 24."""
    needs = [KVNeed("sliding", 22, 1.0, 1 << 30), KVNeed("full", 4, 1.0)]
    assert sequence_bytes(needs, 16, 16) == 16 * (24 + 4)


def test_state_does_not_grow_with_length() -> None:
    needs = [KVNeed("state", 10, 0.0, 0, 1000.0)]
    assert sequence_bytes(needs, 10, 16) == sequence_bytes(needs, 100_000, 16) == 10_000


def test_capacity_counts_whole_pages() -> None:
    needs = [KVNeed("full", 2, 8.0)]
    assert token_capacity(needs, 16 * 16 * 2.9, 16) == 32


def test_bits_per_weight_with_scales() -> None:
    assert grouped_bits(4, 128, 16, 4) == pytest.approx(4.156, abs=1e-3)
    assert grouped_bits(4, 128, 16) == 4.125
    assert find_format("nvfp4").bits == 4.5
    assert find_format("mxfp4").bits == 4.25
    assert find_format("fp8-block").bits == pytest.approx(8.002, abs=1e-3)
    assert find_format("q8_0").bits == 8.5


def test_sampler_dominates_activations_of_a_small_model_at_any_tp() -> None:
    """F11: vLLM logged 1.26 GiB for Llama-3-8B at tp 1 and tp 2 alike."""
    for tp in (1, 2):
        assert activation_bytes(8192, 4096, 14336, 128256, tp) / GIB == pytest.approx(1.26, rel=0.05)
