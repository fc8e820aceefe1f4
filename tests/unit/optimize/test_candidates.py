"""The search space comes from the registries and their flags; a new registration is tried without a change there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import LayerKV
from tokenmill.model.kvstore import KV_STORES
from tokenmill.model.kvstore.dense import Float16Store
from tokenmill.optimize.candidates import Candidate, chosen_names, parse_weights, unquantized_mixes
from tokenmill.optimize.space import (
    batch_choices,
    drafter_choices,
    engine_options,
    fitting_tokens,
    float_weight_names,
    kv_choices,
    rounded_at_load,
    shares_prefixes,
    weight_names,
)
from tokenmill.quantize.ggml.mixes import MIXES
from tokenmill.quantize.schemes import METHODS
from tokenmill.runtime.executors.base import Draft
from tokenmill.runtime.speculation import DRAFTERS
from tokenmill.runtime.speculation.base import Drafter, Target
from tokenmill.types import ScheduledTokens

_LAYERS = [LayerKV("full", 3, 64)] * 4


class ToyStore(Float16Store):
    name = "toy"


class ToyDrafter(Drafter):
    name = "toy"
    ready_made = True

    @classmethod
    def build(cls, argument: str, target: Target) -> Drafter:
        raise NotImplementedError

    def draft(self, rows: Sequence[ScheduledTokens], limits: Sequence[int]) -> list[Draft]:
        raise NotImplementedError


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_registered_choice_can_be_parsed(device: str) -> None:
    names = weight_names(device, source_quantized=True)
    assert {"stored", "gptq-4", "gptq-8", "awq-4", "autoround-4", "smoothquant", "fp8", "mxfp4"} <= set(names)
    assert ("imatrix:Q4_K_M" in names) == (device == "cpu")
    assert len(set(names)) == len(names)
    for name in names:
        assert parse_weights(name).name == name
    assert "stored" not in weight_names(device, source_quantized=False)


def test_float_weights_are_for_the_baseline() -> None:
    assert {mix.name for mix in MIXES.values() if mix.is_plain} == set(unquantized_mixes())
    assert float_weight_names("cpu", source_quantized=False) == unquantized_mixes()
    assert float_weight_names("cuda", source_quantized=False) == ["stored"]


def test_what_needs_calibration_is_known_by_its_steps() -> None:
    needed = {name for name in weight_names("cpu", True) if parse_weights(name).needs_calibration}
    assert {"imatrix:Q4_0", "gptq-4", "awq-4", "autoround-4", "smoothquant"} <= needed
    assert not {"stored", "Q4_0", "rtn-4", "hqq-4", "mxfp4"} & needed


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_somebody_registers_is_tried(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "toy", METHODS["rtn"])
    KV_STORES.register("toy", ToyStore)
    DRAFTERS.register("toy", ToyDrafter)
    try:
        assert {"toy-4", "toy-8"} <= set(weight_names(device, source_quantized=False))
        assert "toy" in [choice.name for choice in kv_choices(device, _LAYERS)]
        assert "toy" in [choice.speculate for choice in drafter_choices(device, 4)]
    finally:
        KV_STORES.unregister("toy")
        DRAFTERS.unregister("toy")


def test_names_are_parsed_and_typos_refused() -> None:
    assert parse_weights("q4_k_m").mix == "Q4_K_M"
    assert parse_weights("imatrix:q4_0").importance
    choice = parse_weights("smoothquant+gptq")
    assert (choice.method, choice.bits) == ("smoothquant+gptq", None)
    assert parse_weights("gptq-3").bits == 3
    with pytest.raises(UserError, match="Q4_K_M"):
        parse_weights("Q4_K_N")
    with pytest.raises(UserError, match="float16"):
        chosen_names(["flot16"], list(KV_STORES), "KV cache dtype")


def test_kv_dtypes_the_default_first_then_by_their_bits() -> None:
    on_cpu, on_gpu = kv_choices("cpu", _LAYERS), kv_choices("cuda", _LAYERS)
    assert (on_cpu[0].name, on_gpu[0].name) == ("float32", "bfloat16")
    names = [choice.name for choice in on_cpu]
    assert len(names) > 15
    assert not {"fp8", "fp8_e4m3"} <= set(names), "two names of one store are one choice"
    assert names.index("int8") < names.index("int4") < names.index("kivi2")
    floats = {choice.name for choice in on_cpu if choice.is_float}
    assert floats == {"float32", "float16", "bfloat16"}
    without = [choice.has_kernel for choice in on_gpu]
    assert without == sorted(without, reverse=True), "those without a GPU kernel come last"


def test_a_store_that_cannot_be_imported_is_tried_and_may_fail() -> None:
    KV_STORES.register("nowhere", "tests.unit.optimize.nowhere:Store")
    try:
        choices = kv_choices("cpu", _LAYERS)
    finally:
        KV_STORES.unregister("nowhere")
    place = [choice.name for choice in choices].index("nowhere")
    assert len(choices) > 15
    assert not any(choice.has_kernel for choice in choices[place:]), choices  # it comes after those that work


def test_batch_sizes_only_where_the_load_can_tell_them_apart() -> None:
    assert batch_choices("cpu", 100, latency_matters=False) == [512]
    assert batch_choices("cpu", 4000, latency_matters=False) == [512, 2048]
    assert batch_choices("cuda", 4000, latency_matters=True) == [8192, 2048]
    assert batch_choices("cuda", 40_000, latency_matters=True, fitting=1024) == [1024, 4096, 8192]
    assert batch_choices("cuda", 40_000, latency_matters=True, fitting=4096) == [4096, 8192]
    assert batch_choices("cuda", 40_000, latency_matters=True, fitting=16384) == [8192, 32768, 2048]


def test_a_step_fits_into_the_objective_for_gaps() -> None:
    """Forty milliseconds of an H200 are about a thousand tokens of an 8B model, four thousand of a small one."""
    assert fitting_tokens(0.040, 8_000_000_000, 989.0) == 1024
    assert fitting_tokens(0.040, 1_500_000_000, 989.0) == 4096
    assert fitting_tokens(0.001, 70_000_000_000, 989.0) == 128


def test_drafters_with_and_without_training() -> None:
    found = drafter_choices("cpu", 12)
    names = [choice.speculate for choice in found]
    assert {"ngram", "suffix", "self:q2_k", "self:layers=6"} <= set(names)
    assert [choice.name for choice in found if choice.needs_training] == ["tree", "head"]
    assert not any(name.startswith("draft") for name in names), "it needs a second model"
    assert "self:int4" in [choice.speculate for choice in drafter_choices("cuda", 12)]


def test_prefix_caching_and_tiers_where_prompts_share_more_than_fits() -> None:
    prefix = list(range(40))
    shared = [[*prefix, 1], [*prefix, 2]]
    assert shares_prefixes(shared)
    assert not shares_prefixes([[*prefix, 1]] * 3), "a repeated prompt is no shared prefix"
    assert engine_options("cpu", True, False, 100, 10, "/tier") == []
    assert engine_options("cpu", True, True, 5, 10, "/tier") == [{"prefix_caching": False}]
    assert engine_options("cpu", True, True, 100, 10, "/tier")[1] == {"kv_disk": "/tier"}
    assert engine_options("cuda", True, True, 100, 10, "/tier")[1] == {"kv_host_memory": 200}


def test_a_gpu_rounds_weights_while_it_loads_them() -> None:
    assert rounded_at_load("cuda") == {"fp8": "fp8", "int4": "rtn-4"}
    assert rounded_at_load("cpu") == {}


def test_names_of_candidates_tell_all_settings_apart() -> None:
    options: dict[str, Any] = {"prefix_caching": False}
    names = {
        Candidate("Q4_0", "float32", 512).name,
        Candidate("Q4_0", "float32", 512, "ngram").name,
        Candidate("Q4_0", "float32", 512, options=options).name,
    }
    assert len(names) == 3
    assert Candidate("Q4_0", "float32", 512, options=options).result().options == options
