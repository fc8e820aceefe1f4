"""Triton's recurrent ops against the torch spec: steps, chunks, several sequences, padding, resumed and copied states.

Rows are columns of wider tensors and slots lie apart, as in the engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("no GPU: test_triton.py runs this file under the interpreter", allow_module_level=True)

from tests.interpreter import slow_interpreted
from tokenmill.hardware.kv_layout import KVLayout, LayerState
from tokenmill.kernels import ref_recurrent as ref
from tokenmill.kernels import triton as gpu
from tokenmill.model.state.store import StateStore

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPS = ["convolve", "mamba_scan", "mamba2_scan", "delta_scan"]
SLOTS = 8
ERRORS = {torch.float32: 2e-4, torch.bfloat16: 2e-2}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Case:
    """An op with its parameters; all tensors on the CPU."""

    name: str
    widths: tuple[int, ...]  # of its inputs
    state: tuple[int, ...]  # the shape of a state
    parameters: tuple[Any, ...]

    def inputs(self, count: int, seed: int = 1) -> list[Tensor]:
        return [random(count, width, seed=seed + number) for number, width in enumerate(self.widths)]


def small_case(name: str) -> Case:
    """Numbers that are no powers of two, and heads that share groups or keys."""
    if name == "convolve":
        return Case(name, (24,), (3, 24), (random(4, 24), random(24, seed=1)))
    if name == "mamba_scan":
        return Case(name, (10, 10, 5, 5), (10, 5), (-torch.exp(random(10, 5)), random(10, seed=1)))
    if name == "mamba2_scan":
        heads, dim, size, groups = 4, 12, 10, 2
        parameters = (-torch.exp(random(heads)), random(heads, seed=1), random(heads, seed=2), groups, 1.3, (0.01, 2.0))
        return Case(name, (heads * dim + 2 * groups * size, heads), (heads, dim, size), parameters)
    heads, key_heads, key, value = 4, 2, 12, 20
    parameters = (-torch.exp(random(heads)), random(heads, seed=1), key_heads)
    return Case(name, (2 * key_heads * key + heads * value, heads, heads), (heads, key, value), parameters)


def apart(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The same rows as columns of a wider tensor on the device."""
    wide = torch.full((rows.shape[0], rows.shape[1] + 7), torch.nan)
    wide[:, 3 : 3 + rows.shape[1]] = rows
    return wide.to(DEVICE, dtype)[:, 3 : 3 + rows.shape[1]]


def states_apart(states: Tensor) -> Tensor:
    """The same states with other numbers between the slots."""
    whole = torch.full((states.shape[0], states[0].numel() + 5), torch.nan)
    whole[:, : states[0].numel()] = states.flatten(1)
    return whole.to(DEVICE)[:, : states[0].numel()].unflatten(1, states.shape[1:])


def copied(states: Tensor) -> Tensor:
    """A copy whose slots lie as far apart: with other strides the compiler may sum in another order."""
    copy = states_apart(states.cpu())
    assert copy.stride() == states.stride()
    return copy


def on_device(parameters: Sequence[Any]) -> list[Any]:
    return [each.to(DEVICE) if isinstance(each, Tensor) else each for each in parameters]


def run_kernel(
    case: Case, inputs: list[Tensor], states: Tensor, slots: list[int], starts: list[int], targets: Any = None
) -> Tensor:
    op: Callable[..., Tensor] | None = gpu.find_op(case.name)
    assert op is not None
    keywords = {} if targets is None else {"targets": torch.tensor(targets, device=DEVICE)}
    places = torch.tensor(slots, device=DEVICE), torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    return op(*inputs, states, *places, *on_device(case.parameters), **keywords)


def run_spec(case: Case, inputs: list[Tensor], states: Tensor, slots: list[int], starts: list[int]) -> Tensor:
    y: Tensor = getattr(ref, case.name)(*inputs, states, torch.tensor(slots), torch.tensor(starts), *case.parameters)
    return y


def assert_close(got: Tensor, wanted: Tensor, limit: float) -> None:
    assert got.isfinite().all()
    assert float((got.float().cpu() - wanted).norm() / (wanted.norm() + 1e-6)) < limit


LENGTHS = {
    "steps": [1, 1, 1, 1],
    "one": [1],
    "two rows": [2],
    "mixed": [1, 19, 1, 3],
    "several": [33, 16, 2],
    "long": [70],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", OPS)
def test_outputs_and_states_are_those_of_the_spec(name: str, lengths: list[int], dtype: torch.dtype) -> None:
    case, slots = small_case(name), [5, 2, 7, 0][: len(lengths)]
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    given = [apart(each, dtype) for each in case.inputs(sum(lengths))]
    spec_states = random(SLOTS, *case.state, seed=9)
    states = states_apart(spec_states)
    got = run_kernel(case, given, states, slots, starts)
    wanted = run_spec(case, [each.float().cpu() for each in given], spec_states, slots, starts)
    assert got.dtype == dtype
    assert_close(got, wanted, ERRORS[dtype])
    assert_close(states, spec_states, ERRORS[dtype])
    others = [slot for slot in range(SLOTS) if slot not in slots]
    assert torch.equal(states[others].cpu(), spec_states[others]), "another sequence's state was written"


@pytest.mark.parametrize("splits", [[21], [16, 5], [1, 2, 18], [2, 1, 1, 17]], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_rows_in_parts_are_the_same_rows(name: str, splits: list[int]) -> None:
    """A sequence that is resumed from its state, in rows shorter than the convolution too."""
    case, outputs, begin = small_case(name), [], 0
    given = case.inputs(21)
    spec_states = random(SLOTS, *case.state, seed=9)
    states = states_apart(spec_states)
    for count in splits:
        part = [apart(each[begin : begin + count], torch.float32) for each in given]
        outputs.append(run_kernel(case, part, states, [3], [0, count]))
        begin += count
    assert_close(torch.cat(outputs), run_spec(case, given, spec_states, [3], [0, 21]), ERRORS[torch.float32])
    assert_close(states[3], spec_states[3], ERRORS[torch.float32])


@pytest.mark.parametrize("name", OPS)
def test_a_snapshot_at_a_page_end_is_gone_on_from(name: str) -> None:
    """A row ends at a page end, its slot is copied, the sequence goes on; another one begins with the copy."""
    page, case = 8, small_case(name)
    given = case.inputs(page + 5)
    store = StateStore(_layout(case), SLOTS, DEVICE, joined=True)
    store.clear([1])
    states = store.array(0, 0)
    first, rest = ([apart(each[span], torch.float32) for each in given] for span in (slice(0, page), slice(page, None)))
    run_kernel(case, first, states, [1], [0, page])
    store.copy([(1, 4)])
    kept = states[4].clone()
    straight = run_kernel(case, rest, states, [1], [0, 5])
    assert torch.equal(states[4], kept), "a snapshot was written"
    store.copy([(4, 6)])
    resumed = run_kernel(case, rest, states, [6], [0, 5])
    assert torch.equal(resumed, straight)
    assert torch.equal(states[6], states[1])
    spec_states = torch.zeros(1, *case.state)
    wanted = run_spec(case, given, spec_states, [0], [0, page + 5])
    assert_close(straight, wanted[page:], ERRORS[torch.float32])
    assert_close(states[1], spec_states[0], ERRORS[torch.float32])


def _layout(case: Case) -> KVLayout:
    return KVLayout(8, 1, 0, 0, (), states=(LayerState(0, (case.state, (3,))),))


@pytest.mark.parametrize("name", OPS)
def test_padding_changes_nothing(name: str) -> None:
    """Rows and sequences at the end of a captured step: no state is written, and what they put out is finite."""
    case = small_case(name)
    given = [apart(each, torch.float32) for each in case.inputs(40)]
    states = states_apart(random(SLOTS, *case.state, seed=9))
    padded_states = copied(states)
    wanted = run_kernel(case, [each[:22] for each in given], states, [4, 1], [0, 17, 22])
    got = run_kernel(case, given, padded_states, [4, 1, -1, -1], [0, 17, 22, 22, 22])
    assert torch.equal(got[:22], wanted)
    assert got.isfinite().all()
    assert torch.equal(padded_states, states)
    before = copied(states)
    run_kernel(case, given, states, [-1, -1, -1], [0, 0, 0, 0])
    steps = run_kernel(case, [each[:3] for each in given], states, [-1, 2, -1], [0, 1, 2, 3])
    alone = run_kernel(case, [each[1:2] for each in given], before, [2], [0, 1])
    assert torch.equal(steps[1:2], alone)
    assert torch.equal(states, before)


@pytest.mark.parametrize("lengths", [[1, 1], [9, 4]], ids=["steps", "rows"])
@pytest.mark.parametrize("name", OPS)
def test_states_can_be_written_to_other_slots(name: str, lengths: list[int]) -> None:
    case, starts = small_case(name), [0, lengths[0], sum(lengths)]
    given = [apart(each, torch.float32) for each in case.inputs(sum(lengths))]
    states = states_apart(random(SLOTS, *case.state, seed=9))
    in_place = copied(states)
    wanted = run_kernel(case, given, in_place, [5, 0], starts)
    before = states.clone()
    got = run_kernel(case, given, states, [5, 0], starts, targets=[6, 2])
    assert torch.equal(got, wanted)
    assert torch.equal(states[[6, 2]], in_place[[5, 0]])
    assert torch.equal(states[[0, 1, 3, 4, 5, 7]], before[[0, 1, 3, 4, 5, 7]])


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["mamba2_scan", "delta_scan"])
def test_a_scan_that_convolves_is_both_ops(name: str, dtype: torch.dtype, biased: bool) -> None:
    """Steps and, op by op, rows of prompts; states go to other slots, and padding rows leave none."""
    case = small_case(name)
    width = case.widths[0]
    weight, bias = random(4, width, seed=5).to(DEVICE), random(width, seed=6).to(DEVICE) if biased else None
    for slots, targets, starts in (
        ([5, 0, -1], [6, 2, -1], [0, 1, 2, 3]),
        ([3], [1], [0, 1]),
        ([5, 0], [6, 2], [0, 7, 9]),
    ):
        given = [apart(each, dtype) for each in case.inputs(starts[-1])]
        states = [states_apart(random(SLOTS, *shape, seed=9)) for shape in ((3, width), case.state)]
        apart_states = [copied(each) for each in states]
        places = torch.tensor(slots, device=DEVICE), torch.tensor(starts, dtype=torch.int32, device=DEVICE)
        arguments, written = on_device(case.parameters), torch.tensor(targets, device=DEVICE)
        rows = gpu.convolve(given[0], apart_states[0], *places, weight, bias, written)
        scan: Callable[..., Tensor] = getattr(gpu, name)
        wanted = scan(rows, *given[1:], apart_states[1], *places, *arguments, targets=written)
        convolution = gpu.Convolution(states[0], weight, bias)
        got = scan(*given, states[1], *places, *arguments, targets=written, convolution=convolution)
        assert_close(got, wanted.float().cpu(), ERRORS[dtype] / 2)  # the rows in between are not rounded to 16 bits
        assert torch.equal(states[0].nan_to_num(7.0), apart_states[0].nan_to_num(7.0))
        assert_close(states[1], apart_states[1].cpu(), ERRORS[dtype] / 2)
        kept = [slot for slot in range(SLOTS) if slot not in targets]
        assert torch.equal(states[1][kept], apart_states[1][kept])


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs 9 GB")
@pytest.mark.parametrize("length", [1, 40])
@pytest.mark.parametrize("name", OPS)
def test_states_beyond_two_to_the_31_numbers(name: str, length: int) -> None:
    case = small_case(name)
    size, slots = torch.Size(case.state).numel(), 5
    stride = (1 << 31) // (slots - 1) + 64
    if torch.cuda.mem_get_info()[0] < 5 * slots * stride:
        pytest.skip("too little memory is free")
    whole = torch.empty(slots * stride, device=DEVICE)
    states = whole.as_strided((slots, *case.state), (stride, *torch.empty(case.state).stride()))
    given = [apart(each, torch.float32) for each in case.inputs(length)]
    spec_states = random(1, *case.state, seed=9)
    states[slots - 1] = spec_states[0].to(DEVICE)
    got = run_kernel(case, given, states, [slots - 1], [0, length])
    wanted = run_spec(case, [each.cpu() for each in given], spec_states, [0], [0, length])
    assert size < stride
    assert_close(got, wanted, ERRORS[torch.float32])
    assert_close(states[slots - 1], spec_states[0], ERRORS[torch.float32])


@pytest.mark.parametrize("repeats", [40])
def test_equal_keys_do_not_blow_up_the_delta_rule(repeats: int) -> None:
    """The same token again and again: the updates of a chunk depend on each other as much as they can."""
    case = small_case("delta_scan")
    row = [each.expand(repeats, -1).contiguous() for each in case.inputs(1)]
    row[1] = torch.full_like(row[1], 8.0)  # corrected almost entirely
    row[2] = torch.full_like(row[2], -12.0)  # hardly any decay
    spec_states = torch.zeros(1, *case.state)
    states = states_apart(spec_states)
    got = run_kernel(case, [apart(each, torch.float32) for each in row], states, [0], [0, repeats])
    assert_close(got, run_spec(case, row, spec_states, [0], [0, repeats]), 2e-3)
    assert_close(states, spec_states, 2e-3)


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        pytest.param(Case("mamba_scan", (64, 64, 16, 16), (64, 16), ()), 35, marks=slow_interpreted),
        (Case("mamba2_scan", (2 * 64 + 2 * 128, 2), (2, 64, 128), ()), 130),
        (Case("delta_scan", (2 * 128 + 2 * 128, 2, 2), (2, 128, 128), ()), 50),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=slow_interpreted), torch.bfloat16], ids=str)
def test_real_head_sizes(shape: Case, count: int, dtype: torch.dtype) -> None:
    heads = shape.state[0]
    shape.parameters = {
        "mamba_scan": (-torch.exp(random(*shape.state[:2])), random(heads, seed=1)),
        "mamba2_scan": (-torch.exp(random(heads)), random(heads, seed=1), random(heads, seed=2), 1),
        "delta_scan": (-torch.exp(random(heads)), random(heads, seed=1), 1),
    }[shape.name]
    given = [apart(each, dtype) for each in shape.inputs(count)]
    spec_states = torch.zeros(1, *shape.state)
    states = states_apart(spec_states)
    got = run_kernel(shape, given, states, [0], [0, count])
    wanted = run_spec(shape, [each.float().cpu() for each in given], spec_states, [0], [0, count])
    assert_close(got, wanted, ERRORS[dtype])
    assert_close(states, spec_states, ERRORS[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("weights", [(48,), (1, 48), (4, 12), (12,)], ids=str)
def test_gated_norm(weights: tuple[int, ...], norm_first: bool, dtype: torch.dtype) -> None:
    x, gate = (apart(random(5, 48, seed=seed), dtype) for seed in (1, 2))
    weight = random(*weights, seed=3)
    got = gpu.gated_norm(x, gate, weight.to(DEVICE), 1e-5, norm_first, 0.7)
    wanted = ref.gated_norm(x.float().cpu(), gate.float().cpu(), weight, 1e-5, norm_first, 0.7)
    assert got.dtype == dtype
    assert_close(got, wanted, ERRORS[dtype])


def test_the_op_table_finds_them() -> None:
    from tokenmill.kernels.base import select
    from tokenmill.runtime.executors.eager import RECURRENT_OPS

    assert {select(op, DEVICE, "triton").backend for op in RECURRENT_OPS} == {"triton"}
