"""Passes that go on from the last stop see what passes from the entrance see, in every architecture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parity.tiny_models import WRITTEN, make
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.model.formats.base import LinearWeight
from tokenmill.quantize.base import LinearGroup
from tokenmill.quantize.calibrate import CalibratedBlock, HiddenStates
from tokenmill.quantize.calibration_ops import CalibrationOps
from tokenmill.quantize.source import SourceModel

_LENGTH = 24
# Blocks that read more than tapes keep: attention beside the MLP, shared experts beside the others, latents of queries.
_FROM_THE_ENTRANCE = ("cohere", "qwen2_moe", "glm4_moe", "deepseek")


def _sequences() -> Tensor:
    return torch.randint(0, 131, (5, _LENGTH), generator=torch.Generator().manual_seed(0))


def _solved(source: SourceModel, index: int, tapes: bool) -> tuple[CalibratedBlock, list[Tensor]]:
    """A block each of whose groups is changed once it has been asked for, and all that was seen meanwhile."""
    states = source.embed(_sequences())
    own, exact = HiddenStates(states * 1.01, batch=2), HiddenStates(states.clone(), batch=2)
    block = CalibratedBlock(source, index, own, float_states=exact, tapes=tapes)
    block.begin_rounding()
    seen: list[Tensor] = []
    for group in block.groups:
        statistics, drift = block.statistics_beside_float(group)
        assert statistics.hessian is not None
        seen.append(statistics.hessian)
        if drift is not None:
            assert torch.equal(drift.square, statistics.hessian)
            seen += [drift.cross, drift.half_cross, drift.half_square]
        for name in group.names:
            block.replace(name, block.weight(name) * 0.98)
    block.advance_float()
    block.advance()
    return block, [*seen, own.values, exact.values]


@pytest.mark.parametrize("name", WRITTEN)
def test_every_architecture_goes_on_where_it_stopped(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(name, tmp_path)
    source = SourceModel(open_checkpoint(tmp_path), _LENGTH)
    calls = 0
    linear = CalibrationOps.linear

    def counted(self: CalibrationOps, x: Tensor, weights: Sequence[LinearWeight]) -> list[Tensor]:
        nonlocal calls
        calls += 1
        return linear(self, x, weights)

    monkeypatch.setattr(CalibrationOps, "linear", counted)
    for index in (0, source.num_blocks - 1):
        calls = 0
        _, expected = _solved(source, index, tapes=False)
        whole, calls = calls, 0
        block, found = _solved(source, index, tapes=True)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        if block.tapes_work:
            assert calls < whole
        else:
            assert name.startswith(_FROM_THE_ENTRANCE)


@pytest.fixture
def source(tmp_path: Path) -> SourceModel:
    make("qwen3", tmp_path)
    return SourceModel(open_checkpoint(tmp_path), _LENGTH)


def _hessian(block: CalibratedBlock, group: LinearGroup) -> Tensor:
    found = block.statistics(group, ("hessian",)).hessian
    assert found is not None
    return found


def test_a_group_may_be_asked_for_in_any_order_and_again(source: SourceModel) -> None:
    def asked(tapes: bool) -> list[Tensor]:
        block = CalibratedBlock(source, 1, HiddenStates(source.embed(_sequences()), batch=2), tapes=tapes)
        first, output, _, down = block.groups
        seen = []
        for group in (down, down, first, output, output, first, down):
            seen.append(_hessian(block, group))
            block.replace(group.names[0], block.weight(group.names[0]) * 0.9)
        return seen

    torch.testing.assert_close(asked(tapes=True), asked(tapes=False))


def test_what_is_changed_behind_the_stop_is_seen(source: SourceModel) -> None:
    """A norm, a bias or a linear of an earlier group: the block runs from its entrance again."""

    def asked(tapes: bool) -> list[Tensor]:
        block = CalibratedBlock(source, 1, HiddenStates(source.embed(_sequences()), batch=2), tapes=tapes)
        first, _, gate_up, down = block.groups
        seen = []
        norm = next(name for name in block.tensors if name.endswith("input_layernorm"))
        for name in (norm, first.names[0], gate_up.names[1]):
            seen.append(_hessian(block, down))
            block.replace(name, block.weight(name) * 0.5)
        return [*seen, _hessian(block, down)]

    found, expected = asked(tapes=True), asked(tapes=False)
    torch.testing.assert_close(found, expected)
    assert all(not torch.allclose(one, other) for one, other in pairwise(expected))


def test_a_block_moves_on_and_its_keys_and_values_are_watched(source: SourceModel) -> None:
    def advanced(tapes: bool) -> list[Tensor]:
        states = HiddenStates(source.embed(_sequences()), batch=2)
        watched: list[Tensor] = []
        for index in range(2):
            block = CalibratedBlock(source, index, states, tapes=tapes)
            _hessian(block, block.groups[-1])
            block.advance(lambda keys, values: watched.extend((keys, values)))
        return [states.values, *watched]

    found = advanced(tapes=True)
    assert len(found) == 1 + 2 * 2 * 3
    torch.testing.assert_close(found, advanced(tapes=False))
