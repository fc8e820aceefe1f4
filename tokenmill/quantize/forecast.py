"""Forecast of a job's memory, time and disk space, and how it is split to stay under the memory cap.

One formula for the forecast and the cap: sequences computed at a time shrink first, then hidden states go to float16,
and what still does not fit is refused with the cap that it would need. Used by the job.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tokenmill.checkpoint.mixers import Recurrent
from tokenmill.errors import UserError
from tokenmill.hardware.machine import available_memory
from tokenmill.quantize.device import free_device_bytes
from tokenmill.quantize.fisher import FISHER_SEQUENCES, GRAM_SEQUENCES, gradient_bytes, gram_bytes
from tokenmill.quantize.recipe import Recipe
from tokenmill.quantize.source import SourceModel
from tokenmill.quantize.workspace import Workspace

MIB = 1 << 20
_BATCH_TOKENS = 4096  # per batch where memory allows: more gains nothing
_ENGINE_BYTES = 384 * MIB  # of an engine, beside its weights, in the gate
_PASSES = 3  # runs of a block's calibration data: to each input in turn, and once through
_TAPED_PASSES = 1.1  # the same where each goes on from the one before
_STATES = "states"  # in the workspace
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class Forecast:
    memory_bytes: int  # peak resident memory of the host, including what this process holds now
    device_bytes: int  # on the GPU; 0 without one
    seconds: float
    disk_bytes: int  # free space the job needs while it runs
    batch: int  # sequences computed at a time
    half_states: bool  # hidden states between blocks are float16
    tapes: bool = False  # passes of a block's calibration data go on from the input that was asked for last


@dataclass(frozen=True, slots=True)
class StatesPlan:
    """How hidden states are kept and moved; the fields of Forecast."""

    batch: int
    half: bool
    tapes: bool


def forecast_job(
    source: SourceModel,
    recipe: Recipe,
    sequences: tuple[int, int] | None,
    cap: int,
    output_bytes: int,
    device: torch.device,
) -> Forecast:
    """`sequences`: (samples, length), None for a data-free job. `cap`: bytes on the host, 0 for none."""
    on_host, kinds = device.type == "cpu", block_kinds(source)
    step = _step_bytes(kinds, recipe)
    grams = gram_bytes(source) if recipe.solver.needs_outputs else 0  # held by the job
    fixed = resident_bytes() + _block_bytes(kinds) + grams + (step if on_host else 0)
    beside = float_bytes(kinds) if recipe.needs_targets else 0  # its float weights, until it is rounded
    fixed += beside if on_host else 0
    samples, length = sequences or (0, 0)
    copies = 2 if recipe.needs_targets else 1
    batch, half, needed = _fit(source, fixed, samples, length, cap, on_host, copies)
    states = copies * _states_bytes(source, samples * length, half)
    disk = 2 * output_bytes + 2 * states + grams
    device_bytes = 0 if on_host else _block_bytes(kinds) + beside + step + batch * _sequence_bytes(source, length)
    kept = copies * _tape_bytes(source, kinds, samples * length)
    tapes = _tapes_fit(kept, needed, device_bytes, cap, device)
    needed, device_bytes = (needed + (kept if tapes and on_host else 0), device_bytes + (kept if tapes else 0))
    # Before the first block: tables are written, then or before that gradients are taken of the whole model.
    turned = any(step.turns_states for step in recipe.transforms)
    needed = max(needed, resident_bytes() + grams + states + _edge_bytes(source, turned))
    if recipe.solver.needs_outputs or recipe.solver.needs_states:
        count = min(samples, GRAM_SEQUENCES if recipe.solver.needs_outputs else FISHER_SEQUENCES)
        on_both, states = gradient_bytes(source, float_bytes(kinds), _sequence_bytes(source, length), count, length)
        tables = _table_bytes(source, 8) if turned else 0
        needed = max(needed, resident_bytes() + grams + states + tables + (on_both if on_host else 0))
        device_bytes = max(device_bytes, grams + on_both)
    device_bytes = 0 if on_host else device_bytes
    seconds = _seconds(kinds, recipe, samples, length, device, _TAPED_PASSES if tapes else _PASSES)
    return Forecast(needed, device_bytes, seconds, disk, batch, half, tapes)


def output_bytes(source: SourceModel, recipe: Recipe, shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype) -> int:
    d = source.description
    tied = d.tie_embeddings and not recipe.transforms  # a transform may make the two differ
    edges = d.vocab_size * d.hidden_size * (1 if tied else 2)
    total = edges * dtype.itemsize
    for name, (out, width) in shapes.items():
        scheme = recipe.scheme_of.get(name)
        total += int(
            out * width * (scheme.bits_per_weight / 8 if scheme and scheme.element != "float" else dtype.itemsize)
        )
    return total


def gate_memory(weight_bytes: int, cap: int) -> int:
    """Bytes of this process while the engine runs a model of that size (its weights once, pages and logits); refused if
    they exceed the cap."""
    needed = resident_bytes() + weight_bytes * 5 // 4 + _ENGINE_BYTES
    if cap and needed > cap:
        raise UserError(
            f"measuring the result takes about {needed / MIB:,.0f} MiB, more than --memory allows",
            f"give --memory {-(-needed // MIB)}MiB, or --no-gate",
        )
    return needed


def states_plan(
    source: SourceModel, samples: int, length: int, cap: int, device: torch.device, copies: int = 1
) -> StatesPlan:
    """Of a job that only collects statistics. `copies`: see _fit."""
    kinds = block_kinds(source)
    fixed = resident_bytes() + _block_bytes(kinds) + (copies - 1) * float_bytes(kinds)
    batch, half, needed = _fit(source, fixed, samples, length, cap, device.type == "cpu", copies)
    on_device = _block_bytes(kinds) + copies * float_bytes(kinds) + batch * _sequence_bytes(source, length)
    tapes = copies * _tape_bytes(source, kinds, samples * length)
    return StatesPlan(batch, half, _tapes_fit(tapes, needed, on_device, cap, device))


def check_cap(forecast: Forecast, cap: int) -> None:
    """Refuse a job whose later parts (the last pass, an adapter) do not fit either."""
    if cap and forecast.memory_bytes > cap:
        raise UserError(
            f"the job needs about {forecast.memory_bytes / MIB:,.0f} MiB, more than --memory allows "
            f"({cap / MIB:,.0f} MiB)",
            f"give --memory {-(-forecast.memory_bytes // MIB)}MiB, or leave out --train-codes, --tune-scales, "
            "--low-rank or metric=fisher where one is given",
        )


def as_begun(forecast: Forecast, workspace: Workspace) -> Forecast:
    """How states are kept and moved decides last bits: a resumed job does as it began, whatever --memory allows now."""
    begun = workspace.read_json(_STATES)
    if begun is None:
        workspace.write_json(_STATES, begun := {"batch": forecast.batch, "half_states": forecast.half_states})
    return replace(forecast, **begun)


def check_memory(cap: int) -> None:
    """Stop a job that has exceeded its memory cap."""
    peak = peak_bytes()
    if cap and peak > cap:
        raise UserError(
            f"the job has used {peak / MIB:,.0f} MiB, more than --memory allows",
            f"its finished blocks are kept: run it again with --memory {-(-peak // MIB) + 64}MiB",
        )


def _fit(
    source: SourceModel, fixed: int, samples: int, length: int, cap: int, on_host: bool, copies: int = 1
) -> tuple[int, bool, int]:
    """(sequences at a time, float16 states, bytes on the host): the fastest choice under the cap. `copies`: of the
    states, two where the float model's run beside them."""
    options = [(0, False)]
    if samples:
        widest = max(1, min(samples, _BATCH_TOKENS // length))
        sizes = sorted({widest, *(2**power for power in range(widest.bit_length()))}, reverse=True)
        options = [(size, half) for half in (False, True) for size in sizes]
    for batch, half in options:
        needed = fixed + copies * _states_bytes(source, samples * length, half)
        needed += batch * _sequence_bytes(source, length) if on_host else 0
        if not cap or needed <= cap:
            return batch, half, needed
    raise UserError(
        f"the job needs at least {needed / MIB:,.0f} MiB, more than --memory allows ({cap / MIB:,.0f} MiB)",
        f"give --memory {-(-needed // MIB)}MiB"
        + (", or fewer --calibration-samples or a shorter --calibration-length" if samples else ""),
    )


def _tape_bytes(source: SourceModel, kinds: Sequence[BlockKind], num_tokens: int) -> int:
    """What is kept at a stop: the widest input of a linear, and the residual stream; and holes that it leaves."""
    widest = max(width for kind in kinds for _, width in kind.sizes)
    return 5 * num_tokens * (widest + source.description.hidden_size)


def _tapes_fit(kept: int, needed: int, on_device: int, cap: int, device: torch.device) -> bool:
    """Only time depends on it, so without a cap half of the memory that is free now decides."""
    if device.type != "cpu":
        return kept + on_device <= free_device_bytes(device) // 2
    return kept > 0 and (needed + kept <= cap if cap else needed - resident_bytes() + kept <= available_memory() // 2)


def _states_bytes(source: SourceModel, num_tokens: int, half: bool) -> int:
    return num_tokens * source.description.hidden_size * (2 if half else 4)


def resident_bytes(key: str = "VmRSS") -> int:
    """Memory of this process now, or at its peak ("VmHWM"); 0 where the system does not say."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def peak_bytes() -> int:
    peak = resident_bytes("VmHWM")
    if not peak:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return peak


@dataclass(frozen=True, slots=True)
class BlockKind:
    """Blocks of the same sizes: of many models all, of mixtures often all but the first."""

    sizes: tuple[tuple[int, int], ...]  # (out, in) of each linear
    stacks: tuple[tuple[int, int], ...]  # (out together, in) of linears that read one input
    count: int = 1

    @property
    def num_weights(self) -> int:
        return sum(out * width for out, width in self.sizes)


def block_kinds(source: SourceModel) -> Sequence[BlockKind]:
    kinds: dict[tuple[tuple[int, int], ...], BlockKind] = {}
    for index in range(source.num_blocks):
        sizes = tuple(source.shape(name) for name in source.linear_names(index))
        if sizes in kinds:
            kinds[sizes] = replace(kinds[sizes], count=kinds[sizes].count + 1)
            continue
        groups = [[source.shape(name) for name in group.names] for group in source.groups(index)]
        stacks = tuple((sum(out for out, _ in group), group[0][1]) for group in groups)
        kinds[sizes] = BlockKind(sizes, stacks)
    return list(kinds.values())


def _block_bytes(kinds: Sequence[BlockKind]) -> int:
    """One block: float32 weights, the codes as bytes, and the packed result."""
    return max(kind.num_weights for kind in kinds) * (4 + 1 + 1)


def float_bytes(kinds: Sequence[BlockKind]) -> int:
    return 4 * max(kind.num_weights for kind in kinds)


def _step_bytes(kinds: Sequence[BlockKind], recipe: Recipe) -> int:
    """The largest memory of any step on any group of one block."""
    return max(step.memory_bytes(stack) for step in recipe.steps for kind in kinds for stack in kind.stacks)


def _table_bytes(source: SourceModel, each: int) -> int:
    return each * source.description.vocab_size * source.description.hidden_size


def _edge_bytes(source: SourceModel, turned: bool) -> int:
    """Embedding and head while they are written, twice in 16 bits, and as floats where they are turned."""
    if turned:
        return _table_bytes(source, 2 * (4 + 4))
    return _table_bytes(source, 4 if source.description.tie_embeddings else 8)


def _sequence_bytes(source: SourceModel, length: int) -> int:
    """Activations that live at once while one sequence runs through a block."""
    d = source.description
    heads = (d.num_heads + 2 * d.num_kv_heads) * d.head_dim
    rows = 6 * d.hidden_size + 4 * heads + 3 * d.intermediate_size + 6 * _recurrent_width(source)
    masked = d.attention_softcap or (d.num_sliding_layers and d.sliding_window < length)
    return 4 * length * (rows + (2 * d.num_heads * length if masked else 0))


def _recurrent_width(source: SourceModel) -> int:
    """Numbers of a token between the projections of a recurrent layer; the widest of the model."""
    mixers = (mixer for layer in source.description.layers for mixer in layer.mixers)
    return max((mixer.convolved for mixer in mixers if isinstance(mixer, Recurrent)), default=0)


def _seconds(
    kinds: Sequence[BlockKind], recipe: Recipe, samples: int, length: int, device: torch.device, passes: float
) -> float:
    """Estimated from the operations of the matrix products and this machine's measured speed."""
    total, num_tokens = 0.0, samples * length
    for kind in kinds:
        weights = kind.num_weights
        operations = 200.0 * weights  # choosing grids and rounding
        operations += sum(step.operations(weights, length) for step in recipe.steps)
        operations += sum(step.stack_operations(stack) for step in recipe.steps for stack in kind.stacks)
        if recipe.needs_calibration:
            squares = sum(width**2 for _, width in kind.stacks)
            cubes = sum(width**3 for _, width in kind.stacks)
            both = 2 if recipe.needs_targets else 1  # models that run; of the second one cross moments
            operations += num_tokens * both * (2.0 * passes * weights + 1.1 * squares) + 2.0 * cubes
        total += kind.count * operations
    return total / operations_per_second(device)


def operations_per_second(device: torch.device) -> float:
    """Of a float32 matrix product, with the threads torch has now."""
    a, b = torch.randn(512, 1024, device=device), torch.randn(1024, 1024, device=device)
    float((a @ b)[0, 0])
    begin, count = time.perf_counter(), 0
    while count < 2 or time.perf_counter() - begin < 0.05:
        float((a @ b)[0, 0])  # waits for the GPU
        count += 1
    return 2.0 * 512 * 1024 * 1024 * count / (time.perf_counter() - begin)
