"""The reader of traffic logs: order, damage, and what becomes a trace."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tokenmill.bench.serve_datasets import load_items
from tokenmill.bench.serve_job import ServeJob
from tokenmill.bench.traffic_log import LOG_BLOCK_TOKENS, LoggedRequest, is_traffic_log, log_rows, read_traffic_log
from tokenmill.errors import UserError


def row(arrival: float = 1000.0, prompt: int = 40, output: int = 4, hashes: tuple[int, ...] = (), **more: Any) -> bytes:
    packed = base64.b64encode(b"".join(each.to_bytes(8, "big") for each in hashes)).decode()
    fields = {"arrival_unix": arrival, "prompt_tokens": prompt, "output_tokens": output, "prefix": packed, **more}
    return json.dumps(fields).encode() + b"\n"


def write(folder: Path, *lines: bytes, name: str = "traffic-1.jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(b'{"tokenmill_traffic_log":1,"block_tokens":16}\n' + b"".join(lines))
    return folder


def test_requests_of_all_files_come_in_the_order_of_arrival(tmp_path: Path) -> None:
    write(tmp_path, row(1010.5), row(1001), name="traffic-2.jsonl")
    write(tmp_path, row(1000, hashes=(7, 2**64 - 1), ttft_ms=3.5, error="x", n=2, tenant="t"), name="traffic-1.jsonl")
    (tmp_path / "key").write_text("secret")
    found = read_traffic_log(tmp_path)
    assert [request.arrival_s for request in found] == [0, 1, 10.5]
    first = found[0]
    assert first.prefix_hashes == (7, 2**64 - 1)
    assert (first.ttft_ms, first.itl_ms, first.error, first.n, first.tenant) == (3.5, None, "x", 2, "t")


def test_a_line_that_was_cut_is_ignored_and_damaged_ones_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, row(1), row(2)[:30] + b"\n", b"\x00\xff\n", b"[1]\n", b"3\n", row(3), row(4)[:-10])
    with caplog.at_level("WARNING"):
        assert len(read_traffic_log(tmp_path)) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"arrival_unix": float("nan")},
        {"arrival_unix": -1},
        {"arrival_unix": "1"},
        {"arrival_unix": 1e300},
        {"prompt_tokens": 0},
        {"prompt_tokens": True},
        {"prompt_tokens": 2**40},
        {"output_tokens": -1},
        {"output_tokens": 1.5},
        {"prefix": "!!"},
        {"prefix": "AAAA"},
        {"prefix": base64.b64encode(bytes(8 * 3)).decode()},  # three blocks of a prompt of 40
        {"prefix": None},
        {"ttft_ms": float("inf")},
        {"ttft_ms": [1]},
        {"finish_reason": 3},
        {"n": 0},
    ],
)
def test_what_no_server_writes_is_skipped(tmp_path: Path, fields: dict[str, Any]) -> None:
    value = json.loads(row())
    write(tmp_path, json.dumps(value | fields).encode() + b"\n", row(2000))
    assert [request.arrival_unix for request in read_traffic_log(tmp_path)] == [2000]


def test_no_folder_no_files_and_a_later_format_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a folder"):
        read_traffic_log(tmp_path / "none")
    with pytest.raises(UserError, match="no logged requests"):
        read_traffic_log(tmp_path)
    (tmp_path / "traffic-1.jsonl").write_bytes(b'{"tokenmill_traffic_log":2}\n' + row())
    with pytest.raises(UserError, match="upgrade"):
        read_traffic_log(tmp_path)


def test_rows_count_one_answer_and_give_refused_requests_the_typical_one() -> None:
    requests = [
        LoggedRequest(0.0, 40, 30, n=3),
        LoggedRequest(1.0, 40, 10),
        LoggedRequest(2.0, 40, 0, error="queue_full", max_tokens=200),
        LoggedRequest(3.0, 40, 0, error="queue_full", max_tokens=5),
    ]
    assert [output for _, _, output, _ in log_rows(requests)] == [10, 10, 10, 5]
    assert [output for _, _, output, _ in log_rows(requests[2:])] == [1, 1]


def test_larger_blocks_take_the_hash_at_their_end() -> None:
    request = LoggedRequest(0.0, 100, 1, prefix_hashes=(1, 2, 3, 4, 5))
    ((_, _, _, small),) = log_rows([request])
    ((_, _, _, large),) = log_rows([request], 2 * LOG_BLOCK_TOKENS)
    assert small == [1, 2, 3, 4, 5]
    assert large == [2, 4]


@pytest.mark.parametrize("dataset", ["traffic_log", "timed_trace"])
def test_bench_serve_replays_a_log_with_its_shared_prefixes(tmp_path: Path, dataset: str) -> None:
    folder = write(tmp_path / "log", row(5, 50, 4, (1, 2, 3)), row(7, 40, 6, (1, 2)), row(8, 20, 1, (9,)))
    assert is_traffic_log(folder)
    assert not is_traffic_log(tmp_path)
    job = ServeJob(dataset_name=dataset, dataset_path=str(folder), num_prompts=10)
    first, second, third = load_items(job)
    assert first.prompt[:32] == second.prompt[:32]
    assert first.prompt[32:40] != second.prompt[32:40]
    assert first.prompt[0] != third.prompt[0] or first.prompt[1] != third.prompt[1]
    assert [(len(item.prompt), item.output_len, item.timestamp) for item in (first, second, third)] == [
        (50, 4, 0.0),
        (40, 6, 2.0),
        (20, 1, 3.0),
    ]
    assert job.replays
