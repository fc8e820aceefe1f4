"""The reader of traffic logs on files that were cut, overwritten and mixed up: it only skips lines."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.unit.bench.test_traffic_log_reader import row, write
from tokenmill.bench.traffic_log import log_rows, read_traffic_log
from tokenmill.errors import UserError


def _whole() -> bytes:
    lines = [
        row(1000 + n, 20 + n, n % 5, tuple(range(n % 2)), ttft_ms=1.0 * n, finish_reason="stop") for n in range(30)
    ]
    return b'{"tokenmill_traffic_log":1,"block_tokens":16}\n' + b"".join(lines)


def _damaged(data: bytes, random: Random) -> bytes:
    found = bytearray(data)
    for _ in range(random.randint(1, 8)):
        at = random.randrange(max(1, len(found)))
        match random.randrange(5):
            case 0:
                del found[at:]
            case 1:
                del found[at : at + random.randrange(60)]
            case 2:
                found[at : at + 1] = random.randbytes(1)
            case 3:
                found[at:at] = random.randbytes(random.randrange(40))
            case _:
                found[at:at] = found[: random.randrange(200)]
    return bytes(found)


@pytest.mark.parametrize("seed", range(4))
def test_damage_costs_lines_and_nothing_else(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    data = _whole()
    write(tmp_path)
    for _ in range(150):
        (tmp_path / "traffic-1.jsonl").write_bytes(_damaged(data, random))
        try:
            requests = read_traffic_log(tmp_path)
        except UserError:  # nothing is left of it, or its version is not ours
            continue
        assert all(each.arrival_s >= 0 and each.prompt_tokens >= 1 and each.n >= 1 for each in requests)
        for seconds, prompt, output, blocks in log_rows(requests):
            assert seconds >= 0
            assert output >= 1
            assert 16 * len(blocks) <= prompt


def test_a_file_cut_anywhere_keeps_its_whole_lines(tmp_path: Path) -> None:
    data = _whole()
    write(tmp_path)
    for length in range(data.index(b"\n", 50) + 1, len(data) + 1, 37):
        (tmp_path / "traffic-1.jsonl").write_bytes(data[:length])
        assert len(read_traffic_log(tmp_path)) == data[:length].count(b"\n") - 1
