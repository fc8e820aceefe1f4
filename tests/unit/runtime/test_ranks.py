"""Messages between ranks, the comparison of their exchanges, and page tables of stages."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parity.tiny_models import make, write_tokenizer
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.rank_description import (
    EMPTY_LAYER,
    grid_problem,
    layer_traffic,
    local_description,
    stage_layers,
)
from tokenmill.engine.llm import LLM
from tokenmill.hardware.kv_layout import build_layout
from tokenmill.hardware.sharding import Grid, step_traffic
from tokenmill.kernels import cpu
from tokenmill.kernels.ref_experts import RoutingSpec, added_in_order, expert_results, route, run_experts
from tokenmill.model.group import RankError
from tokenmill.runtime.ranks import seat as seats
from tokenmill.runtime.ranks.layout import stage_layout
from tokenmill.runtime.ranks.nccl import device_of
from tokenmill.runtime.ranks.threads import ThreadGroup
from tokenmill.runtime.ranks.wire import Step, batch_of, decode, encode, step_of
from tokenmill.types import Batch, SamplingParams

_TWO_RANKS: dict[str, Any] = {
    "context": 64,
    "concurrency": 1,
    "threads": 1,
    "tensor_parallel_size": 2,
    "rank_backend": "threads",
}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3")
    make("gemma3", folder)
    write_tokenizer(folder)
    return folder


def test_a_batch_survives_the_wire() -> None:
    batch = Batch(
        token_ids=torch.tensor([5, 6, 7]),
        positions=torch.tensor([0, 1, 9]),
        query_starts=torch.tensor([0, 2, 3], dtype=torch.int32),
        seq_lens=torch.tensor([2, 10], dtype=torch.int32),
        slots=(torch.tensor([8, 9, 17]), torch.tensor([0, 1, 2])),
        block_tables=(torch.tensor([[1, -1], [2, 3]], dtype=torch.int32),) * 2,
        logit_rows=torch.zeros(0, dtype=torch.int64),
        max_query=2,
        max_seq=10,
        state_slots=torch.tensor([4, 2]),
        begins=(4,),
        drafted=(1,),
        all_hidden=False,
    )
    message = decode(encode(step_of(batch, 7)))
    assert isinstance(message, Step)
    assert message.number == 7
    found = batch_of(message)
    for each in dataclasses.fields(Batch):
        ours, theirs = getattr(batch, each.name), getattr(found, each.name)
        if isinstance(ours, torch.Tensor):
            assert theirs.dtype == ours.dtype
            assert torch.equal(ours, theirs)
        elif isinstance(ours, tuple) and ours and isinstance(ours[0], torch.Tensor):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        else:
            assert ours == theirs, each.name


def test_parts_of_the_experts_add_up_to_the_bits_of_all() -> None:
    """Four experts a token: of three or more, a sum in another order would have other bits."""
    generator = torch.Generator().manual_seed(5)
    experts, tokens, width = 8, 64, 24
    gate_up = torch.randn(experts, 2 * width, width, generator=generator)
    down = torch.randn(experts, width, width, generator=generator)
    x = torch.randn(tokens, width, generator=generator)
    spec = RoutingSpec(experts_per_token=4)
    ids, weights = route(torch.randn(tokens, experts, generator=generator), spec)
    products = (lambda e, rows: rows @ gate_up[e].T), (lambda e, rows: rows @ down[e].T)
    whole = run_experts(x, ids, weights, *products, spec)
    halves = [expert_results(x, ids, weights, *products, spec, own) for own in (range(4), range(4, 8))]
    assert torch.equal(added_in_order(halves[0] + halves[1]), whole)


def test_ranks_that_make_other_exchanges_end_the_engine(gemma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seats, "COMPARED_EVERY", 2)
    llm = LLM(gemma, **_TWO_RANKS)
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    llm.generate([[1, 2, 3]], params)
    llm.parts.runtime.model.group.note(1)  # an exchange that the other rank did not make
    with pytest.raises(RankError, match="rank 1 made other exchanges than rank 0"):
        llm.generate([[1, 2, 3]], params)


@pytest.mark.parametrize("exact", [True, False])
def test_the_formula_counts_what_is_exchanged(gemma: Path, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    collect = ThreadGroup.collect

    def count(group: ThreadGroup, x: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        if group.part == 0:
            counted.append(x.shape[0] * sum(widths[1:]) * x.element_size())
        return collect(group, x, widths)

    monkeypatch.setattr(ThreadGroup, "collect", count)
    with LLM(gemma, exact_ranks=exact, **_TWO_RANKS) as llm:
        llm.generate([list(range(3, 14))], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    description = open_checkpoint(gemma).description
    layers = [layer_traffic(description, layer) for layer in description.layers]
    traffic = step_traffic(layers, Grid(2), 11, 1, description.vocab_size, exact)
    assert (len(counted), sum(counted)) == (traffic.calls, traffic.nbytes)


def test_stages_have_the_page_tables_of_the_whole_model(gemma: Path) -> None:
    description = open_checkpoint(gemma).description
    grid = Grid(1, 2)
    whole = build_layout(description.kv_layers(), 8)
    kept = []
    for rank in range(2):
        local = local_description(description, grid.place(rank))
        assert [layer for layer in local.layers if layer != EMPTY_LAYER]
        layout = stage_layout(description, grid.place(rank), build_layout(local.kv_layers(), 8))
        assert [(group.kind, group.window) for group in layout.groups] == [(g.kind, g.window) for g in whole.groups]
        assert layout.layers_per_page <= whole.layers_per_page
        for number in stage_layers(description, grid)[rank]:
            assert layout.place(number)[0] == whole.place(number)[0]
            kept.append(number)
    assert kept == list(range(description.num_layers))


def test_sizes_that_fit(gemma: Path) -> None:
    description = open_checkpoint(gemma).description
    fitting = [tp for tp in range(1, 9) if not grid_problem(description, Grid(tp))]
    assert fitting == [1, 2, 4]
    assert "stages" in grid_problem(description, Grid(1, 9))
    assert "experts" in grid_problem(description, Grid(2, experts=True))


def test_every_rank_has_a_gpu_of_its_own() -> None:
    assert [device_of("cuda", Grid(4).place(rank)).index for rank in range(4)] == [0, 1, 2, 3]
    assert device_of("cpu", Grid(4).place(3)) == torch.device("cpu")


def _exchange(rank: int, ranks: int, memory: np.ndarray, found: dict[int, list[torch.Tensor]]) -> None:
    exchange = cpu.module().Exchange(memory, ranks, rank, 30.0)
    for number, (rows, widths) in enumerate(_EXCHANGES):
        x = torch.full((rows, widths[rank]), float(10 * number + rank))
        together = torch.empty(rows, sum(widths))
        assert exchange.gather(x, widths, together)
        total = torch.empty(rows, 5)
        assert exchange.sum(torch.full((rows, 5), 1.0 + rank), total)
        found[rank] += [together, total]


_EXCHANGES = [(1, [3, 2, 4]), (7, [1, 1, 1]), (2, [300_000, 5, 200_000]), (300_000, [2, 1, 3]), (1, [1, 0, 2])]


@pytest.mark.skipif(cpu.unavailable(torch.device("cpu")) is not None, reason="needs the C++ module")
def test_exchanges_in_shared_memory() -> None:
    """Also those larger than a buffer, and of ranks that have nothing."""
    memory = np.zeros(cpu.module().Exchange.room_for(3), np.uint8)
    found: dict[int, list[torch.Tensor]] = {rank: [] for rank in range(3)}
    threads = [threading.Thread(target=_exchange, args=(rank, 3, memory, found)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number, (rows, widths) in enumerate(_EXCHANGES):
        wanted = torch.cat([torch.full((rows, width), float(10 * number + r)) for r, width in enumerate(widths)], -1)
        for rank in range(3):
            together, total = found[rank][2 * number : 2 * number + 2]
            assert torch.equal(together, wanted)
            assert torch.equal(total, torch.full((rows, 5), 6.0))


@pytest.mark.skipif(cpu.unavailable(torch.device("cpu")) is not None, reason="needs the C++ module")
def test_nobody_waits_for_ever() -> None:
    memory = np.zeros(cpu.module().Exchange.room_for(3), np.uint8)
    x, total = torch.ones(1, 4), torch.empty(1, 4)
    assert not cpu.module().Exchange(memory, 3, 0, 0.05).sum(x, total)
    # The time was over for one: nobody waits any more.
    assert not cpu.module().Exchange(memory, 3, 1, 3600.0).sum(x, total)
