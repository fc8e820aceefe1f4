"""A small form of tools/fuzz.py with a fixed seed: every damaged input is accepted or refused, at every door."""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random

import pytest

from tokenmill.checkpoint.hf_tokenizer import build_tokenizer
from tokenmill.checkpoint.safetensors import INDEX_FILE, SafetensorsCheckpoint
from tokenmill.errors import CheckpointError
from tools.fuzz import fuzz, print_table
from tools.fuzzing.corpus import CONFIGS, tokenizer_documents
from tools.fuzzing.doors import DOORS, Door, Input
from tools.fuzzing.mutations import mutate_json

NUM_INPUTS = 1000


def test_every_door_accepts_or_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports = fuzz(NUM_INPUTS, seed=0, save=tmp_path)
    num_findings = print_table(reports)
    assert num_findings == 0, capsys.readouterr().out
    assert sum(sum(report.outcomes.values()) for report in reports.values()) >= NUM_INPUTS - len(DOORS)
    for (
        name,
        report,
    ) in reports.items():  # a corpus that is refused whole, or mutations that change nothing, prove little
        assert report.outcomes["accepted"] > 0, name
        assert report.outcomes["refused"] > 0, name


def test_an_input_follows_from_its_number() -> None:
    document = {"a": [1, {"b": "c"}], "d": None}
    texts = [mutate_json(Random(f"0:x:{number}"), document, [document]) for number in range(50)]
    assert texts == [mutate_json(Random(f"0:x:{number}"), document, [document]) for number in range(50)]
    assert len(set(texts)) > 25


class Breaking(Door):
    """Wrong in every way that a reader can be."""

    def make(self, random: Random) -> Input:
        return {"number": bytes([random.randrange(256)])}

    def attempt(self, data: Input) -> bool:
        kind = data["number"][0] % 4
        if kind == 0:
            os.abort()
        if kind == 1:
            raise RecursionError
        if kind == 2:
            bytearray(1 << 40)
        return True


def test_crashes_and_exceptions_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DOORS, "breaking", (Breaking, 1))
    reports = fuzz(12, seed=3, only=["breaking"], save=tmp_path)
    kinds = " ".join(reports["breaking"].findings.values())
    assert "ended with code -6" in kinds
    assert "RecursionError" in kinds
    assert "MemoryError" in kinds
    assert sum(reports["breaking"].outcomes.values()) == 12
    assert len(list(tmp_path.iterdir())) == reports["breaking"].outcomes["finding"]


# --- what the fuzzer found, one by one ---


def test_a_shard_name_that_no_file_system_takes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[0]))
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "é" * 200}}))
    with pytest.raises(CheckpointError, match="is not a file name"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        '{"added_tokens_decoder": 5}',
        '{"added_tokens_decoder": {"x": {"content": "a"}}}',
        '{"added_tokens_decoder": {"7": {"content": []}}}',
        '{"added_tokens_decoder": {"7": null}}',
    ],
)
def test_added_tokens_of_wrong_types(tmp_path: Path, config: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_documents()[0][0]))
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        build_tokenizer(tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json")
