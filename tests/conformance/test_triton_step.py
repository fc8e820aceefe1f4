"""The first and the last launch of a decode step: what they read and write in the host's memory, turn by turn."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("no GPU: test_triton.py runs this file under the interpreter", allow_module_level=True)

from tokenmill.kernels import triton as gpu
from tokenmill.runtime.verify import num_held

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TURNS, MOST, ROWS, PAGE = 3, 6, 5, 4


def pinned(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64, pin_memory=DEVICE.type == "cuda")


def device(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device=DEVICE)


class Step:
    """The buffers of a step of ROWS rows over two groups of pages."""

    def __init__(self, followed: Tensor | None = None) -> None:
        self.given, self.turn, self.followed = pinned(TURNS, 3, MOST), device(1, dtype=torch.int32), followed
        self.drawn = torch.arange(70, 70 + MOST, device=DEVICE)
        self.tables = [(torch.arange(MOST * 3).view(MOST, 3) + 100 * g).int().to(DEVICE) for g in range(2)]
        self.ids, self.positions, self.draws = device(ROWS), device(ROWS), device(ROWS)
        self.seq_lens, self.slots = device(ROWS, dtype=torch.int32), [device(MOST), device(MOST)]

    def begin(self) -> None:
        found = (self.ids, self.positions, self.draws, self.seq_lens, self.slots)
        gpu.begin_step(self.given, self.turn, self.followed, self.drawn, self.tables, PAGE, *found)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()


def test_each_step_reads_its_own_turn() -> None:
    step = Step()
    for number in range(1, 5):
        turn = number % TURNS
        step.given[turn, 0] = torch.arange(MOST) + 10 * number
        step.given[turn, 1] = torch.tensor([number, gpu.PADDING_POSITION, number + 4, 0, 11, 0])
        step.given[turn, 2] = torch.tensor([-1, -1, 4, -1, 0, -1])
        step.begin()
        assert step.turn.item() == turn
        assert step.ids.tolist() == [10 * number, 0, 74, 10 * number + 3, 70]
        assert step.positions.tolist() == [number, 0, number + 4, 0, 11]
        assert step.draws.tolist() == step.seq_lens.tolist() == [number + 1, 0, number + 5, 1, 12]
        for group, slots in enumerate(step.slots):
            places = [(0, number), (2, number + 4), (3, 0), (4, 11)]
            own = [(100 * group + 3 * row + place // PAGE) * PAGE + place % PAGE for row, place in places]
            assert slots[:ROWS].tolist() == [own[0], -1, *own[1:]]


def test_rows_follow_what_the_device_has_worked_out() -> None:
    followed = torch.tensor(
        [[5, 6, 7, 8, 9, 0], [2, gpu.PADDING_POSITION, 3, 1, 0, 0], [-1, -1, -1, 2, -1, 0]], device=DEVICE
    )
    step = Step(followed)
    step.given[1, 1] = gpu.POSITION_ON_DEVICE
    step.given[1, 0, 4], step.given[1, 1, 4], step.given[1, 2, 4] = 42, 6, -1  # but not the last row
    step.begin()
    assert step.ids.tolist() == [5, 0, 7, 72, 42]
    assert step.seq_lens.tolist() == [3, 0, 4, 2, 7]
    assert step.slots[1][:ROWS].tolist() == [100 * PAGE + 2, -1, 106 * PAGE + 3, 109 * PAGE + 1, 113 * PAGE + 2]


def test_drawn_ids_are_written_for_the_host_too() -> None:
    logits = torch.randn(3, 300, device=DEVICE)
    floats, whole = torch.ones(3, device=DEVICE), torch.arange(3, device=DEVICE)
    rows = gpu.SamplingTensors(floats, whole.int() * 0, floats, floats * 0, whole, whole, filtered=False)
    echo, turn = pinned(TURNS, MOST) - 1, torch.ones(1, dtype=torch.int32, device=DEVICE)
    echo = echo.pin_memory() if DEVICE.type == "cuda" else echo
    drawn = gpu.sample(logits, rows, ring=gpu.TokenRing(echo, turn)).tolist()
    assert echo.tolist() == [[-1] * MOST, [*drawn, -1, -1, -1], [-1] * MOST]


def test_the_device_accepts_the_drafts_that_verification_accepts() -> None:
    """`follow_drafts` mirrors runtime/verify.py:num_held, the one place that decides which drafts hold."""
    depth, sequences = 3, 200
    generator = torch.Generator().manual_seed(6)
    shape = (sequences, depth + 1)
    ids = torch.randint(0, 3, shape, generator=generator)  # a known token, then its drafts
    sampled = torch.randint(0, 3, shape, generator=generator)
    positions = torch.randint(0, 50, (sequences, 1), generator=generator) + torch.arange(depth + 1)
    drafts = torch.randint(100, 200, (sequences * (depth + 1), depth), generator=generator)
    owners = (torch.arange(sequences) * (depth + 1)).repeat_interleave(depth + 1).int()
    inputs = device(3, sequences * (depth + 1))
    flat = [each.flatten().to(DEVICE) for each in (sampled, ids, positions, owners)]
    gpu.follow_drafts(*flat, drafts.to(DEVICE), inputs)
    seen = set()
    for number in range(sequences):
        held = num_held(ids[number, 1:].tolist(), sampled[number].tolist())
        seen.add(held)
        rows = slice(number * (depth + 1), (number + 1) * (depth + 1))
        following = [int(sampled[number, held]), *drafts[number * (depth + 1) + held].tolist()]
        start = int(positions[number, 0]) + held + 1
        assert inputs[0, rows].tolist() == following
        assert inputs[1, rows].tolist() == list(range(start, start + depth + 1))
    assert seen == set(range(depth + 1))
