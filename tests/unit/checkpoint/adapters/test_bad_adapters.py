"""An adapter that cannot do what its author trained is refused in one line that names the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity.tiny_models import make
from tests.peft_adapters import make_adapter
from tokenmill.checkpoint.adapters.fit import check_base, check_rank
from tokenmill.checkpoint.adapters.peft import read_adapter
from tokenmill.checkpoint.adapters.write import write_adapter
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import UserError

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(base, adapter)."""
    folder = tmp_path_factory.mktemp("sound")
    (folder / "base").mkdir()
    make("llama", folder / "base")
    make_adapter(folder / "base", folder / "adapter")
    return folder / "base", folder / "adapter"


@pytest.fixture
def adapter(sound: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound[1], tmp_path / "adapter"))


def changed_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text()) | changes
        (folder / CONFIG).write_text(json.dumps({key: value for key, value in config.items() if value != "gone"}))

    return change


def changed_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        result = change(tensors.pop(name))
        save_file(tensors if result is None else {**tensors, name: result}, folder / WEIGHTS)

    return apply


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor[1, 2] = float("nan")
    return tensor


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), f"{WEIGHTS} is missing"),
    "no config": (lambda folder: (folder / CONFIG).unlink(), f"{CONFIG} is missing"),
    "no directory": (shutil.rmtree, "does not exist"),
    "pickled": (lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"), "pickled weights"),
    "cut off": (lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-9]), "cannot be read"),
    "not json": (lambda folder: (folder / CONFIG).write_text("{"), "not valid JSON"),
    "nan": (changed_tensor(f"{Q}.lora_A.weight", with_nan), r"q_proj.lora_A.weight' holds NaN"),
    "infinite": (changed_tensor(f"{Q}.lora_B.weight", lambda each: each / 0), r"lora_B.weight' holds NaN or infinite"),
    "half": (changed_tensor(f"{Q}.lora_B.weight", lambda _: None), "has no lora_B"),
    "other rank": (changed_config(r=5), "has rank 4, the config says 5"),
    "no alpha": (changed_config(lora_alpha="gone"), "'lora_alpha' is missing"),
    "no rank": (changed_config(r=0), "'r' is 0"),
    "other type": (changed_config(peft_type="IA3"), "'IA3' are not supported"),
    "pissa": (changed_config(init_lora_weights="pissa_niter_4"), "changes the base too"),
    "biases": (changed_config(bias="all"), "trained biases"),
    "lora biases": (changed_config(lora_bias=True), "biases of adapters"),
    "alora": (changed_config(alora_invocation_tokens=[3]), "aLoRA"),
    "parameters": (changed_config(target_parameters=["mlp.experts.down_proj"]), "expert stacks"),
    "dora without magnitudes": (changed_config(use_dora=True), "no DoRA magnitude"),
    "bad pattern": (changed_config(rank_pattern={"(": 3}), "not a valid pattern"),
    "pattern that hangs": (changed_config(rank_pattern={"(((.*)*)*)*!": 3, "(": 3}), r"'\('.*not a valid pattern"),
    "bad value": (changed_config(alpha_pattern={"q_proj": "x"}), "'alpha_pattern' of 'q_proj' is 'x'"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_by_name(adapter: Path, case: str) -> None:
    spoil, message = BAD[case]
    spoil(adapter)
    with pytest.raises(UserError, match=message) as error:
        read_adapter(adapter)
    assert error.value.remedy
    assert "\n" not in str(error.value)


def test_an_adapter_for_another_base(sound: tuple[Path, Path], tmp_path: Path) -> None:
    adapter, description = read_adapter(sound[1]), open_checkpoint(sound[0]).description
    make("mistral", tmp_path)  # wider heads
    with pytest.raises(UserError, match=r"q_proj is \[64, 64\] there and \[128, 64\] in the base"):
        check_base(adapter, open_checkpoint(tmp_path).description)
    short = replace(description, layers=description.layers[:2])
    with pytest.raises(UserError, match=r"does not fit base .* has no model.layers.2.mlp.down_proj"):
        check_base(adapter, short)


@pytest.mark.parametrize("saved", [False, True])
def test_a_fused_matrix_and_a_part_of_it(tmp_path: Path, saved: bool) -> None:
    make("phi3", tmp_path)
    make_adapter(tmp_path, tmp_path / "fused", target_modules=["qkv_proj"])
    base = open_checkpoint(tmp_path).description
    adapter = read_adapter(tmp_path / "fused")
    assert check_base(adapter, base).matrices
    fused = adapter.matrices["model.layers.0.self_attn.qkv_proj"]
    name = "model.layers.0.self_attn.q_proj"
    queries = base.num_heads * base.head_dim
    if saved:
        whole = {f"model.layers.0.self_attn.{each}.weight": torch.zeros(fused.shape) for each in ("qkv_proj", "q_proj")}
        whole[f"{name}.weight"] = whole[f"{name}.weight"][:queries]
        adapter = replace(adapter, matrices={}, saved=whole)
    else:
        part = replace(fused, name=name, b=fused.b[:queries])
        adapter = replace(adapter, matrices={**adapter.matrices, name: part})
    with pytest.raises(UserError, match=r"layers.0.self_attn.q_proj.* twice: as .*qkv_proj.* and as .*q_proj"):
        check_base(adapter, base)


def test_a_base_of_another_hash(sound: tuple[Path, Path], tmp_path: Path) -> None:
    description = open_checkpoint(sound[0]).description
    stated = replace(check_base(read_adapter(sound[1]), description), base_hash="a" * 64)
    write_adapter(stated, tmp_path / "stated")
    adapter = read_adapter(tmp_path / "stated")
    assert check_base(adapter, description, "a" * 64).matrices
    with pytest.raises(UserError, match="states a base of hash aaaaaaaaaaaa"):
        check_base(adapter, description, "b" * 64)


def test_a_resized_vocabulary(sound: tuple[Path, Path], tmp_path: Path) -> None:
    make_adapter(sound[0], tmp_path / "whole", modules_to_save=["lm_head"])
    wider = replace(open_checkpoint(sound[0]).description, vocab_size=140)
    with pytest.raises(UserError, match=r"lm_head.weight is \[131, 64\] there and \[140, 64\]"):
        check_base(read_adapter(tmp_path / "whole"), wider)


def test_a_rank_over_the_limit(sound: tuple[Path, Path]) -> None:
    adapter = read_adapter(sound[1])
    check_rank(adapter, 4)
    with pytest.raises(UserError, match=r"has rank 4 \(.*\), the limit is 3"):
        check_rank(adapter, 3)
