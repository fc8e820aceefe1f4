"""The validation verb: reading rows, what is refused, and the promised accuracy on a sample of the measured rows."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pytest

from tokenmill.errors import UserError
from tokenmill.plan.validate.scores import residuals, score, spearman, summarize, validate
from tokenmill.plan.validate.silicon_rows import SiliconRow, SkippedRow, read_rows

ROW = {
    "id": "x_c32_tp8",
    "silicon_data_source": "db-dump/2026; silicon_concurrency=32",
    "backend": "vllm",
    "model_path": "meta-llama/Llama-3.1-70B",
    "system": "h200_sxm",
    "mode": "agg",
    "isl": "1024",
    "osl": "1024",
    "gemm_quant_mode": "fp8",
    "batch_size": "32.0",
    "tp_size": "8.0",
    "pp_size": "1.0",
    "attention_dp_size": "1.0",
    "moe_tp_size": "8.0",
    "moe_ep_size": "1.0",
    "silicon_ttft_ms": "140.0",
    "silicon_tpot_ms": "11.0",
}


def write(path: Path, *changes: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROW))
        writer.writeheader()
        writer.writerows({**ROW, **change} for change in changes)
    return path


def test_a_row_becomes_a_deployment(tmp_path: Path) -> None:
    (row,) = read_rows(write(tmp_path / "rows.csv", {}))
    assert isinstance(row, SiliconRow)
    d = row.deployment
    assert (d.model.name, d.device.name, d.weights.name, d.tp, d.devices) == ("llama-3.1-70b", "h200-sxm", "fp8", 8, 8)
    assert (row.load.concurrency, row.load.input_tokens, row.load.spread) == (32, 1024, 0.2)


@pytest.mark.parametrize(
    ("change", "tp", "copies", "ep"),
    [
        ({"tp_size": "64", "moe_tp_size": "8", "moe_ep_size": "8"}, 8, 1, 8),  # written as tp x ep
        ({"tp_size": "1", "attention_dp_size": "64", "moe_tp_size": "8", "moe_ep_size": "8"}, 1, 8, 8),
        ({"tp_size": "4", "attention_dp_size": "4", "moe_tp_size": "1", "moe_ep_size": "16"}, 1, 4, 4),
        ({"tp_size": "8", "moe_tp_size": "1", "moe_ep_size": "8"}, 8, 1, 8),
        ({"tp_size": "1", "attention_dp_size": "8", "moe_tp_size": "1", "moe_ep_size": "8"}, 1, 8, 8),
    ],
)
def test_cuts_of_the_public_sweeps(tmp_path: Path, change: dict[str, str], tp: int, copies: int, ep: int) -> None:
    change = {"model_path": "deepseek-ai/DeepSeek-R1", **change}
    (row,) = read_rows(write(tmp_path / "rows.csv", change))
    assert isinstance(row, SiliconRow)
    d = row.deployment
    assert (d.tp, d.data_parallel, d.ep) == (tp, copies, ep)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mode": "disagg"}, "disaggregated"),
        ({"model_path": "who/Knows-9B"}, "unknown model"),
        ({"system": "z9000"}, "unknown device"),
        ({"backend": "other"}, "unknown engine"),
        ({"tp_size": "72"}, "does not divide"),
    ],
)
def test_rows_that_cannot_be_predicted_are_counted(tmp_path: Path, change: dict[str, str], reason: str) -> None:
    (row,) = read_rows(write(tmp_path / "rows.csv", change))
    assert isinstance(row, SkippedRow)
    assert reason in row.reason


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        validate(tmp_path / "none.csv")
    (tmp_path / "few.csv").write_text("backend,isl\nvllm,1\n")
    with pytest.raises(UserError, match="lacks the columns model_path"):
        validate(tmp_path / "few.csv")
    with pytest.raises(UserError, match="line 3"):
        validate(write(tmp_path / "rows.csv", {}, {"isl": "many"}))
    with pytest.raises(UserError, match="no aggregated rows"):
        validate(write(tmp_path / "rows.csv", {"mode": "disagg"}))


def test_spearman() -> None:
    assert spearman([1, 2, 3], [10, 20, 40]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(0.866, abs=0.001)


def test_promised_accuracy_on_a_sample(data_path: Path, tmp_path: Path) -> None:
    """Every 24th measured row; the whole table is scored by `tokenmill plan --validate` (docs/planner.md)."""
    with gzip.open(data_path / "profiles" / "silicon_dev.csv.gz", "rt", newline="") as file:
        lines = file.readlines()
    sample = tmp_path / "sample.csv.gz"
    sample.write_bytes(gzip.compress("".join([lines[0], *lines[7::24]]).encode()))
    scored, skipped = score(sample)
    found = summarize(scored, skipped)
    assert found.rows > 80
    assert found.tpot_median_error_dense < 0.12
    assert found.tpot_median_error_moe < 0.20
    assert found.ttft_median_error < 0.35
    assert found.steady_tpot_median_error_dense < 0.15  # what plans use
    assert found.steady_tpot_median_error_moe < 0.20
    assert found.spearman > 0.9
    assert "[residual.tpot]" in residuals(scored)
