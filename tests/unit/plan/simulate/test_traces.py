"""Trace files: told by content, read exactly, refused with the number of the bad line."""

from __future__ import annotations

import gzip
import json
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, stdev

import pytest

from tokenmill.errors import UserError
from tokenmill.plan.simulate.question import LoadQuestion, load_of
from tokenmill.plan.simulate.synthetic import SyntheticLoad, at_rate, synthetic_arrivals
from tokenmill.plan.simulate.traces import open_trace
from tokenmill.plan.simulate.workload import Arrival, adjusted

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5000000,374,44\n2023-11-16 18:15:50.7500000,396,0\n"
)
VIDUR = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.8\n2015,156,2171,12.9\n"
MOONCAKE = (
    '{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [3, 4, 5]}\n'
    '{"timestamp": 4000, "input_length": 600, "output_length": 9, "hash_ids": [3, 6]}\n'
)
PLAIN = (
    '{"arrival_s": 2, "prompt_tokens": 7, "completion_tokens": 3}\n\n'
    '{"arrival_s": 1, "prompt_tokens": 8, "completion_tokens": 4}\n'
)


def _file(folder: Path, text: str, name: str = "trace.any") -> str:
    path = folder / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return str(path)


def _rows(path: str) -> list[Arrival]:
    return list(open_trace(path).arrivals())


def test_azure(tmp_path: Path) -> None:
    path = _file(tmp_path, AZURE)
    assert open_trace(path).kind == "azure"
    first, second = _rows(path)
    assert (first.ms, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.ms == pytest.approx(4250)
    assert second.output_tokens == 1  # nothing generated still needs one token


def test_vidur_has_no_times(tmp_path: Path) -> None:
    trace = open_trace(_file(tmp_path, VIDUR))
    assert (trace.kind, trace.timed) == ("vidur", False)
    assert [(each.prompt_tokens, each.output_tokens) for each in trace.arrivals()] == [(3772, 54), (2015, 156)]
    with pytest.raises(UserError, match="--rate"):
        load_of(LoadQuestion(trace=str(tmp_path / "trace.any")))
    timed = load_of(LoadQuestion(trace=str(tmp_path / "trace.any"), rate=2.0))
    assert next(timed.arrivals()).ms == 0.0


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_mooncake_blocks_are_equal_tokens(tmp_path: Path, name: str) -> None:
    first, second = _rows(_file(tmp_path, MOONCAKE, name))
    assert second.ms == 3000
    left, right = first.prompt_ids(), second.prompt_ids()
    assert (len(left), len(right)) == (1100, 600)
    assert left[:512] == right[:512]
    assert set(left[512:]) & set(right[512:]) == set()


def test_plain_lines_never_go_back_in_time(tmp_path: Path) -> None:
    rows = _rows(_file(tmp_path, PLAIN))
    assert [(each.ms, each.prompt_tokens, each.output_tokens) for each in rows] == [(0.0, 7, 3), (0.0, 8, 4)]


def _servegen(folder: Path, rate: float, variation: float) -> str:
    windows = f"0,0,0,,0,0\r\n600,{rate},{variation},Gamma,1,1\r\n1200,0,0,,0,0\r\n"
    lengths = {"0": {"input_tokens": "{100: 0.25, 300: 0.75}", "output_tokens": "{20: 1.0}", "reason_ratio": "{0: 1}"}}
    lines = [
        {"file": "chunk-0-dataset.json", "kind": "dataset", "data": lengths},
        {"file": "chunk-0-trace.csv", "kind": "trace_csv", "data": windows},
    ]
    return _file(folder, "".join(json.dumps(line) + "\n" for line in lines))


def test_servegen_draws_the_stated_statistics(tmp_path: Path) -> None:
    rows = _rows(_servegen(tmp_path, 5.0, 2.0))
    gaps = [right.ms - left.ms for left, right in pairwise(rows)]
    assert len(rows) == pytest.approx(3000, rel=0.15)
    assert stdev(gaps) / fmean(gaps) == pytest.approx(2.0, rel=0.2)
    assert {each.prompt_tokens for each in rows} == {100, 300}
    assert fmean(each.prompt_tokens == 300 for each in rows) == pytest.approx(0.75, abs=0.05)
    assert rows == _rows(str(tmp_path / "trace.any"))  # the same seed, the same load


def test_a_servegen_client_without_lengths_borrows_them(tmp_path: Path) -> None:
    plain = len(_rows(_servegen(tmp_path, 5.0, 1.0)))
    empty = {"0": {"input_tokens": "{}", "output_tokens": "{}"}}
    lines = [
        {"file": "chunk-1-dataset.json", "kind": "dataset", "data": empty},
        {"file": "chunk-1-trace.csv", "kind": "trace_csv", "data": "0,0,0\r\n600,5,1\r\n1200,0,0"},
    ]
    with (tmp_path / "trace.any").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    rows = _rows(str(tmp_path / "trace.any"))
    assert len(rows) == pytest.approx(2 * plain, rel=0.1)
    assert {each.prompt_tokens for each in rows} == {100, 300}


def test_the_published_traces_are_read(data_path: Path) -> None:
    traces = data_path / "traces"
    expected = {
        "azure_llm_2023_conv.csv": ("azure", 374, 44),
        "mooncake_conversation.jsonl.gz": ("mooncake", 6758, 500),
        "vidur_arxiv_summarization.csv": ("vidur", 3772, 54),
    }
    for name, (kind, prompt, output) in expected.items():
        trace = open_trace(str(traces / name))
        first = next(trace.arrivals())
        assert (trace.kind, first.prompt_tokens, first.output_tokens) == (kind, prompt, output)
    for name in ("servegen_deepseek-r1.jsonl.gz", "servegen_mm-image.jsonl.gz"):
        trace = open_trace(str(traces / name))
        rows = list(islice(trace.arrivals(), 200))
        assert trace.kind == "servegen"
        assert all(left.ms <= right.ms for left, right in pairwise(rows))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "empty"),
        ("hello\n1,2\n", "line 1 "),
        (AZURE + "2023-11-16 18:15:51.0,forty,4\n", "line 4 "),
        (AZURE + "yesterday,40,4\n", "line 4 "),
        (AZURE + "2023-11-16 18:15:51.0,-40,4\n", "line 4 "),
        (AZURE + "2023-11-16 18:15:51.0\n", "line 4 "),
        (VIDUR + "12,x,1,1\n", "line 4 "),
        (MOONCAKE + '{"timestamp": 5000, "input_length": 3}\n', "line 3 "),
        (MOONCAKE + "{oops\n", "line 3 "),
        (MOONCAKE + '{"timestamp": NaN, "input_length": 3, "output_length": 1}\n', "line 3 "),
        ("{oops\n", "line 1 "),
        (PLAIN + '{"arrival_s": 3, "prompt_tokens": 8}\n', "line 4 "),
        (PLAIN + "[1]\n", "line 4 "),
        (
            '{"file": "c-0-d", "kind": "dataset", "data": {}}\n{"file": "c-0-t", "kind": "trace_csv", "data": "0,x"}\n',
            "line 2 ",
        ),
        ('{"file": "c-0-d", "kind": "dataset", "data": {"0": {"input_tokens": "{1:"}}}\n', "line 1 "),
        ('{"file": "c-0-t", "kind": "trace_csv", "data": "0,-1,2"}\n', "line 1 "),
    ],
)
def test_bad_traces_name_the_line(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        _rows(_file(tmp_path, text))


def test_unreadable_files_are_the_users(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        open_trace(str(tmp_path / "absent.csv"))
    (tmp_path / "noise").write_bytes(bytes(range(128, 256)) * 4)
    with pytest.raises(UserError, match="not a text file"):
        open_trace(str(tmp_path / "noise"))
    (tmp_path / "cut.gz").write_bytes(gzip.compress((MOONCAKE * 500).encode())[:-60])
    with pytest.raises(UserError, match="cut"):
        _rows(str(tmp_path / "cut.gz"))


def test_speedup_limit_and_repeat() -> None:
    rows = [Arrival(number, 100.0 * number, 10, 5) for number in range(5)]
    assert [each.ms for each in adjusted(rows, 2.0, 3)] == [0.0, 50.0, 100.0]
    again = list(adjusted(rows, 1.0, 8, repeat=2))
    assert [each.ms for each in again] == [0.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 700.0]
    assert [each.number for each in again] == list(range(8))


def test_arrivals_have_rate_and_burstiness() -> None:
    load = SyntheticLoad(100, 10, 4000, spread=0.5)
    for variation in (0.0, 1.0, 3.0):
        rows = list(at_rate(synthetic_arrivals(load, 1), 20.0, variation, 1))
        gaps = [right.ms - left.ms for left, right in pairwise(rows)]
        assert fmean(gaps) == pytest.approx(50, rel=0.15)
        assert stdev(gaps) / fmean(gaps) == pytest.approx(variation, rel=0.2, abs=1e-6)
    lengths = [each.prompt_tokens for each in rows]
    assert (min(lengths), max(lengths)) == (pytest.approx(50, abs=2), pytest.approx(150, abs=2))
    shared = list(synthetic_arrivals(SyntheticLoad(2048, 10, 50, shared_prefix=1024, prefixes=2), 0))
    assert {each.blocks for each in shared} == {(0, 1), (2, 3)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"input_tokens": 10, "output_tokens": 5},
        {"input_tokens": 10, "output_tokens": 5, "rate": 1.0, "users": 2},
        {"input_tokens": 10, "output_tokens": 5, "rate": -1.0},
        {"input_tokens": 10, "output_tokens": 5, "rate": 1.0, "speedup": 0.0},
        {"input_tokens": 10, "output_tokens": 5, "rate": 1.0, "limit": -1},
        {"input_tokens": 10, "output_tokens": 5, "rate": 1.0, "spread": 1.5},
        {"input_tokens": 10, "output_tokens": 5, "rate": 1.0, "shared_prefix": 11},
        {"trace": "x", "input_tokens": 10},
    ],
)
def test_impossible_loads_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UserError):
        next(load_of(LoadQuestion(**options)).arrivals())  # type: ignore[arg-type]
