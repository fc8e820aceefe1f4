"""Candidates come from the registries by name; a new registration is considered without a change here."""

from __future__ import annotations

import pytest

from tokenmill.errors import UserError
from tokenmill.model.kvstore import KV_STORES
from tokenmill.optimize.candidates import (
    batch_choices,
    chosen_names,
    parse_weights,
    registered_weights,
    unquantized_kv,
    unquantized_weights,
)
from tokenmill.quantize.ggml.mixes import MIXES
from tokenmill.quantize.schemes import METHODS


def test_every_registered_choice_can_be_parsed() -> None:
    names = registered_weights(stored_is_quantized=True)
    assert {"stored", "Q8_0", "imatrix:Q4_K_M", "gptq-4", "gptq-8", "smoothquant"} <= set(names)
    assert len(set(names)) == len(names)
    for name in names:
        assert parse_weights(name).name == name
    assert {mix.name for mix in MIXES.values() if mix.is_plain} == set(unquantized_weights())
    assert "stored" not in registered_weights(stored_is_quantized=False)


def test_a_new_method_is_considered_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "brandnew", METHODS["rtn"])
    assert {"brandnew-4", "brandnew-8"} <= set(registered_weights(False))


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


def test_unquantized_kv_is_what_holds_floats() -> None:
    assert {"float32", "float16", "bfloat16"} <= set(unquantized_kv())
    assert not {"int8", "int4", "fp8"} & set(unquantized_kv())


def test_batch_sizes_only_where_the_load_can_tell_them_apart() -> None:
    assert len(batch_choices(100)) == 1
    assert len(batch_choices(4000)) > 1
