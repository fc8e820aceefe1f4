"""The validation verb: reading rows, what is refused, and the promised accuracy on a sample of the measured rows."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tokenmill.errors import UserError
from tokenmill.plan.cost.split import SplitDeployment
from tokenmill.plan.question.deployment import Deployment
from tokenmill.plan.validate.poisson_runs import COLUMNS, score_runs, summarize_runs
from tokenmill.plan.validate.ranks import spearman
from tokenmill.plan.validate.score_table import score_table, scores_path
from tokenmill.plan.validate.scores import score, summarize, validate
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
    assert isinstance(d, Deployment)
    assert (d.model.name, d.device.name, d.weights.name, d.tp, d.devices) == ("llama-3.1-70b", "h200-sxm", "fp8", 8, 8)
    assert (row.load.concurrency, row.load.input_tokens, row.load.spread) == (32, 1024, 0.1)


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
def test_parallel_sizes(tmp_path: Path, change: dict[str, str], tp: int, copies: int, ep: int) -> None:
    change = {"model_path": "deepseek-ai/DeepSeek-R1", **change}
    (row,) = read_rows(write(tmp_path / "rows.csv", change))
    assert isinstance(row, SiliconRow)
    d = row.deployment
    assert isinstance(d, Deployment)
    assert (d.tp, d.data_parallel, d.ep) == (tp, copies, ep)


def test_the_data_source_changes_nothing(tmp_path: Path) -> None:
    """Load and deployment come from the columns: who measured a row is not looked at."""
    sources = ("db-dump/2026; silicon_concurrency=7", "source_file=/somewhere/else.csv", "")
    rows = list(read_rows(write(tmp_path / "rows.csv", *({"silicon_data_source": text} for text in sources))))
    assert all(isinstance(row, SiliconRow) for row in rows)
    assert len({(row.deployment, row.load) for row in rows if isinstance(row, SiliconRow)}) == 1


def test_a_split_row_has_two_pools(tmp_path: Path) -> None:
    pools = {
        f"{pool}_{name}": size
        for pool in ("prefill", "decode")
        for name, size in (("tp_size", "8"), ("attention_dp_size", "1"), ("moe_tp_size", "1"), ("moe_ep_size", "8"))
    }
    counts = {"prefill_num_workers": "2", "decode_num_workers": "3", "decode_batch_size": "16"}
    change = {"mode": "disagg", "model_path": "deepseek-ai/DeepSeek-R1", "id": "x_c48_y", **pools, **counts}
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*ROW, *pools, *counts])
        writer.writeheader()
        writer.writerow({**ROW, **change})
    (row,) = read_rows(path)
    assert isinstance(row, SiliconRow)
    assert isinstance(row.deployment, SplitDeployment)
    assert (row.deployment.num_prefill, row.deployment.num_decode, row.load.concurrency) == (2, 3, 48)
    assert row.deployment.devices == 40
    found = validate(path)
    assert (found.rows_split, found.rows_moe) == (1, 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_path": "who/Knows-9B"}, "unknown model"),
        ({"system": "z9000"}, "unknown device"),
        ({"backend": "other"}, "unknown engine"),
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
    with pytest.raises(UserError, match="no rows that can be predicted"):
        validate(write(tmp_path / "rows.csv", {"backend": "other"}))


def test_spearman() -> None:
    assert spearman([1, 2, 3], [10, 20, 40]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(0.866, abs=0.001)


def test_promised_accuracy_over_all_rows(data_path: Path) -> None:
    """The planning call on every measured row; intervals are made of these very scores."""
    scored, skipped = score(data_path / "profiles" / "silicon_dev.csv.gz")
    found = summarize(scored, skipped)
    assert found.rows > 3400
    assert sum(found.skipped.values()) < 20
    assert found.tpot_mape_dense <= 0.13
    assert found.tpot_mape_moe <= 0.19
    assert found.ttft_mape <= 0.28
    assert found.spearman >= 0.93
    assert found.tpot_median_error_split <= 0.5
    stored = json.loads(scores_path().read_text())
    assert score_table(scored, score_runs()) == stored, "run python -m tokenmill.plan.validate FILE --write"


def test_poisson_runs_are_scored(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    row = dict.fromkeys(COLUMNS, "") | {
        "engine": "tokenmill",
        "device": "h200-sxm",
        "model": "llama-3.1-8b",
        "dtype": "bf16",
        "rate": "4",
        "input_tokens": "512",
        "output_tokens": "128",
        "concurrency": "8",
        "output_tok_s": "1500",
        "ttft_p50_ms": "20",
        "itl_p50_ms": "5",
    }
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerow(row)
    (run,) = score_runs(table)
    assert 0.5 < run.itl_ratio < 2
    assert summarize_runs([run])["all runs"]["runs"] == 1
    table.write_text("engine\nvllm\n")
    with pytest.raises(UserError, match="lacks the columns"):
        score_runs(table)
