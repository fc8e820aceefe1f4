"""What the load generator sends, and when: datasets, traces, arrivals, flags."""

from __future__ import annotations

import gzip
import json
import math
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tokenmill.bench.prompts import random_requests
from tokenmill.bench.serve_arrivals import arrival_offsets, gamma_offsets
from tokenmill.bench.serve_datasets import as_text, load_items
from tokenmill.bench.serve_item import Item
from tokenmill.bench.serve_job import ServeJob
from tokenmill.errors import UserError


def _job(**options: Any) -> ServeJob:
    return ServeJob.from_options({"num_prompts": 12, **options})


def test_random_prompts_are_those_of_the_offline_benchmark() -> None:
    job = _job(random_input_len=20, random_output_len=5, random_range_ratio=0.5, random_prefix_len=3, vocab_size=99)
    items = load_items(job)
    offline = random_requests(99, 12, 20, 5, 0.5, 3, seed=0)
    assert [item.prompt for item in items] == [each.prompt_ids for each in offline]
    assert [item.output_len for item in items] == [each.output_len for each in offline]
    assert load_items(job) == items
    assert load_items(_job(seed=1, random_input_len=20, vocab_size=99)) != items


def test_prefix_repetition_shares_each_prefix_equally() -> None:
    items = load_items(
        _job(
            dataset_name="prefix_repetition",
            prefix_repetition_num_prefixes=3,
            prefix_repetition_prefix_len=8,
            prefix_repetition_suffix_len=4,
        )
    )
    prefixes = [tuple(item.prompt[:8]) for item in items]
    assert sorted(prefixes.count(each) for each in set(prefixes)) == [4, 4, 4]
    assert len({tuple(item.prompt) for item in items}) == 12
    assert all(item.prompt_len == len(item.prompt) == 12 for item in items)


def test_text_keeps_shared_prefixes_and_word_counts() -> None:
    items = load_items(_job(random_prefix_len=10, random_input_len=5, prompt_format="text"))
    texts = [str(item.prompt).split() for item in items]
    assert len({tuple(each[:10]) for each in texts}) == 1
    assert len({tuple(each[10:]) for each in texts}) > 1
    assert {len(each) for each in texts} == {15}
    assert _job(backend="openai-chat").wants_text
    assert not _job().wants_text
    assert as_text([1, 2]) == as_text([1]) + " " + as_text([2])


def test_custom_lines_are_repeated_to_the_number_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "output_tokens": 3}\n\n{"prompt": [4, 5]}\n')
    items = load_items(_job(dataset_name="custom", dataset_path=str(path), num_prompts=3, custom_output_len=7))
    assert items == [Item("one", 0, 3), Item([4, 5], 2, 7), Item("one", 0, 3)]


@pytest.mark.parametrize("line", ["{", "[1]", '{"text": "x"}', '{"prompt": ""}', '{"prompt": "x", "output_tokens": 0}'])
def test_bad_custom_lines_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UserError, match=r"prompts\.jsonl"):
        load_items(_job(dataset_name="custom", dataset_path=str(path)))


def test_equal_blocks_of_a_trace_are_equal_tokens(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    rows = [
        {"timestamp": 1000, "input_length": 1100, "output_length": 4, "hash_ids": [7, 8, 9]},
        {"timestamp": 3000, "input_length": 1024, "output_length": 9, "hash_ids": [7, 5]},
        {"timestamp": 3500, "input_length": 30, "output_length": 1},
    ]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    job = _job(dataset_name="mooncake", dataset_path=str(path), trace_speedup=2)
    first, second, third = load_items(job)
    assert first.prompt[:512] == second.prompt[:512]
    assert first.prompt[512:1024] != second.prompt[512:]
    assert [len(each.prompt) for each in (first, second, third)] == [1100, 1024, 30]
    assert [each.output_len for each in (first, second, third)] == [4, 9, 1]
    assert job.replays
    assert arrival_offsets(job, [first, second, third]) == [0, 1, 1.25]
    half = load_items(_job(dataset_name="timed_trace", dataset_path=str(path), trace_length_scale=0.5))
    assert [len(each.prompt) for each in half] == [550, 512, 15]
    assert half[0].prompt[:256] == half[1].prompt[:256]


def test_the_published_traces_are_read(data_path: Path) -> None:
    traces = data_path / "traces"
    azure = load_items(_job(dataset_name="azure", dataset_path=str(traces / "azure_llm_2023_conv.csv"), num_prompts=50))
    assert (azure[0].prompt_len, azure[0].output_len, azure[0].timestamp) == (374, 44, 0)
    assert azure[1].timestamp == pytest.approx(4.314579, abs=1e-5)
    assert all(left.timestamp <= right.timestamp for left, right in pairwise(azure))
    path = traces / "mooncake_conversation.jsonl.gz"
    mooncake = load_items(_job(dataset_name="mooncake", dataset_path=str(path), num_prompts=4, trace_length_scale=0.1))
    assert len({tuple(item.prompt[:51]) for item in mooncake}) == 1  # all begin with block 0
    with pytest.raises(UserError, match="Azure"):
        load_items(_job(dataset_name="azure", dataset_path=str(path)))


def test_arrivals_have_the_rate_and_the_burstiness() -> None:
    def spread(burstiness: float) -> float:
        offsets = gamma_offsets(4000, 10.0, burstiness, 1)
        assert offsets[-1] == pytest.approx(400)
        gaps = [right - left for left, right in zip([0.0, *offsets], offsets, strict=False)]
        return statistics.stdev(gaps) / statistics.mean(gaps)

    assert spread(math.inf) == pytest.approx(0, abs=1e-6)
    assert spread(1.0) == pytest.approx(1, rel=0.1)  # Poisson
    assert spread(0.25) == pytest.approx(2, rel=0.15)
    assert arrival_offsets(_job(), [Item("a", 1, 1)]) is None  # closed loop


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"backend": "openai-chats"}, "openai-chat"),
        ({"dataset_name": "sharegpt"}, "dataset"),
        ({"dataset_name": "custom"}, "needs a file"),
        ({"goodput": ("ttft:fast",)}, "not a time"),
        ({"goodput": ("tttf:5",)}, "ttft"),
        ({"request_rate": 0.0}, "request_rate"),
        ({"metric_percentiles": "101"}, "percentiles"),
        ({"percentile_metrics": "ttft,tpt"}, "tpot"),
        ({"extra_body": "[]"}, "JSON object"),
        ({"header": ("name",)}, "NAME=VALUE"),
        ({"num_prompts": 0}, "at least 1"),
        ({"backend": "openai-chat", "prompt_format": "ids"}, "token ids"),
        ({"input_len": 4, "random_input_len": 5}, "twice"),
    ],
)
def test_bad_flags_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        _job(**options)


def test_goodput_takes_many_values_in_one_flag() -> None:
    assert _job(goodput=("ttft:500", "tpot:50 e2el:9000")).limits() == {"ttft": 500, "tpot": 50, "e2el": 9000}
