"""A job whose output is a GGUF: the type of each tensor by llama.cpp's mixes, optionally weighted by importance.

`imatrix` runs calibration text through the float model and hands the mean square of each matrix's input to the ggml
quantizers; `rtn` does without; `mixed` also chooses the type of every matrix by measured divergence (mixed_gguf.py).
The file is measured like any other result. Called by `tokenmill quantize`.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmill import __version__
from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.sources import resolve
from tokenmill.checkpoint.tokenizer_files import load_chat_template, load_tokenizer
from tokenmill.errors import UserError, unknown_name
from tokenmill.hardware.machine import usable_cores
from tokenmill.log import get_logger
from tokenmill.quantize.calibrate import CalibratedBlock, HiddenStates, StatisticsCollector
from tokenmill.quantize.calibration_text import CalibrationText, read_calibration
from tokenmill.quantize.device import choose_device
from tokenmill.quantize.feedback_job import pack_with_feedback
from tokenmill.quantize.finish import GateRequest, measure, refusal
from tokenmill.quantize.forecast import MIB, check_memory, gate_memory, peak_bytes, states_plan
from tokenmill.quantize.ggml.blocks import BLOCK_TYPES
from tokenmill.quantize.ggml.candidates import Matrix, Rounder, find_matrices
from tokenmill.quantize.ggml.export import GGUFReport, plan_gguf, quantize_gguf
from tokenmill.quantize.mixed_gguf import MixForecast, MixRequest, MixSearch, TypeChoice, check_budget, forecast_mix
from tokenmill.quantize.output import weight_files
from tokenmill.quantize.source import HEAD, SourceModel

METHODS = ("rtn", "imatrix", "mixed")
_PADDING = 32  # bytes by which a tensor may be filled up
_LEAST_TOKENS = 0.005  # share of tokens that must reach an expert for its inputs to count
_log = get_logger(__name__)
_TYPE_OF_BITS = {2: "Q2_K", 3: "Q3_K_M", 4: "Q4_K_M", 5: "Q5_K_M", 6: "Q6_K", 8: "Q8_0"}


@dataclass(frozen=True, slots=True)
class GGUFJob:
    model: str
    out: Path
    method: str = "rtn"
    type_name: str = ""  # empty: by `bits`
    bits: int | None = None
    calibration: Path | None = None
    calibration_samples: int = 128
    calibration_length: int = 0
    device: str = "auto"  # that the calibration text runs on; the ggml quantizers run on the host
    size: int = 0  # mixed: bytes of the file; 0: those of the type, or what `max_kld` needs
    types: tuple[str, ...] = BLOCK_TYPES  # mixed: those that matrices may get
    max_kld: float = 0.0  # mixed: make the smallest file that diverges by at most this; 0: by size

    @property
    def mix(self) -> str:
        if self.type_name:
            return self.type_name
        bits = 4 if self.bits is None else self.bits
        if bits not in _TYPE_OF_BITS:
            raise UserError(
                f"no GGUF mix has {bits} bits", f"give --bits {', '.join(map(str, _TYPE_OF_BITS))} or --type"
            )
        return _TYPE_OF_BITS[bits]


def run_gguf_job(
    job: GGUFJob,
    gate: GateRequest,
    memory: int,
    on_block: Callable[[int, int, float], None],
    on_forecast: Callable[[float], None] = lambda _seconds: None,
) -> dict[str, Any]:
    """`on_forecast` is told the seconds that mixed precision will take, before it begins."""
    begin = time.monotonic()
    torch.set_num_threads(gate.threads or usable_cores())
    device = choose_device(job.device)
    _check_request(job)
    path = resolve(job.model).path
    checkpoint = open_checkpoint(path)
    plan = plan_gguf(checkpoint, job.mix)
    parent = job.out.absolute().parent
    if not parent.is_dir():
        raise UserError(f"{parent} is not a directory", "create it, or give another --out")
    free = shutil.disk_usage(parent).free
    if free < plan.nbytes:
        raise UserError(
            f"the file needs {plan.nbytes / MIB:,.0f} MiB on the disk of {job.out}, only {free / MIB:,.0f} are free",
            "make room, or give an --out on another disk",
        )
    if gate.enabled and gate.in_turn and device.type == "cpu":
        gate_memory(max(plan.nbytes, sum(file.stat().st_size for file in weight_files(path))), memory)
    mix = plan_mix(checkpoint, path, job) if job.method == "mixed" else None
    if mix is not None:
        on_forecast(mix.forecast.seconds)
    importance, choice, packed = None, None, None
    if job.method != "rtn":
        importance = collect_importance(checkpoint, path, job, memory, device, on_block)
    if mix is not None:
        assert importance is not None
        choice = choose_types(mix, importance, on_block)
        packed = pack_types(mix, choice, memory, device, on_block)
    partial = job.out.with_name(job.out.name + ".partial")
    report = quantize_gguf(
        checkpoint,
        partial,
        job.mix,
        importance,
        types=choice.types if choice else None,
        packed=packed,
    )
    measured = _conclude(job, gate, partial, str(path), report)
    worst = max(report.tensors, key=lambda tensor: tensor.relative_error)
    return {
        "path": str(job.out),
        "bits_per_weight": report.bits_per_weight,
        "bytes": report.nbytes,
        "seconds": time.monotonic() - begin,
        "peak_memory_bytes": peak_bytes(),
        "fidelity": {**measured, "weight_error_worst": worst.relative_error, "weight_error_worst_layer": worst.name},
        "format": "gguf",
        "method": job.method,
        "type": report.mix,
        **({} if choice is None else {"mixed": {"measured": choice.measured, "seconds": choice.seconds}}),
        "layers": [asdict(tensor) for tensor in report.tensors],
    }


def _check_request(job: GGUFJob) -> None:
    if job.method not in METHODS:
        raise UserError(
            f"a GGUF has quantizers of its own, {job.method} cannot fill it", "use --method rtn, imatrix or mixed"
        )
    if (job.size or job.max_kld) and job.method != "mixed":
        raise UserError(f"{job.method} has the size that its type gives", "use --method mixed with --size")
    if job.size and job.max_kld:
        raise UserError(
            "a size and a limit of divergence are both given", "give --size or --max-kld to mixed, not both"
        )
    for name in job.types:
        if name not in BLOCK_TYPES:
            raise unknown_name("ggml type to quantize to", name, BLOCK_TYPES)
    if job.out.exists():
        raise UserError(f"{job.out} exists", "give another --out, or remove it")


@dataclass(frozen=True, slots=True, eq=False)
class MixPlan:
    """What mixed precision may choose from, and for how many bytes."""

    source: SourceModel
    sequences: Tensor
    matrices: list[Matrix]
    request: MixRequest
    forecast: MixForecast


def plan_mix(checkpoint: Checkpoint, path: Path, job: GGUFJob) -> MixPlan:
    """Refuses what cannot be before any long work."""
    sequences = read_sequences(checkpoint, path, job)
    source = SourceModel(checkpoint, sequences.shape[1])
    plan = plan_gguf(checkpoint, job.mix, num_importances=1)
    matrices = find_matrices(plan, source, job.types)
    free = 0
    if not job.max_kld:
        kept = plan.nbytes - sum(each.nbytes(each.default) for each in matrices)
        free = (job.size or plan.nbytes) - kept - _PADDING * len(matrices)
    request = MixRequest(free, job.max_kld)
    check_budget(matrices, request)
    forecast = forecast_mix(source, matrices, request.repairs, sequences.numel())
    return MixPlan(source, sequences, matrices, request, forecast)


def choose_types(
    mix: MixPlan, importance: dict[str, Tensor], on_block: Callable[[int, int, float], None]
) -> TypeChoice:
    """The types of mixed precision, for the file's size or the limit of divergence."""
    rounder = Rounder(mix.source, mix.matrices, importance)
    search = MixSearch(mix.source, rounder, mix.sequences, mix.forecast)
    search.measure_worth(on_block)
    return search.choose(mix.request)


def pack_types(
    mix: MixPlan,
    choice: TypeChoice,
    memory: int,
    device: torch.device,
    on_block: Callable[[int, int, float], None],
) -> dict[str, Tensor]:
    """The linears of the blocks in their chosen types, with error feedback."""
    samples, length = mix.sequences.shape
    plan = states_plan(mix.source, samples, length, memory, device, copies=2)  # the float model's beside them
    values = mix.source.embed(mix.sequences)
    states = HiddenStates(values.half() if plan.half else values, plan.batch)
    type_of = {prefix: choice.types[each.slot] for each in mix.matrices for prefix in each.prefixes}
    stored = {prefix: each.stored for each in mix.matrices for prefix in each.prefixes}
    return pack_with_feedback(
        mix.source, type_of, stored, states, device, plan.tapes, lambda done, total: on_block(done, total, 0.0)
    )


def read_sequences(checkpoint: Checkpoint, path: Path, job: GGUFJob) -> Tensor:
    """The calibration text as token ids [samples, length]."""
    length = job.calibration_length or min(512, checkpoint.description.context_length)
    text: CalibrationText = read_calibration(
        job.calibration, load_tokenizer(path), load_chat_template(path), job.calibration_samples, length
    )
    return text.sequences


def collect_importance(
    checkpoint: Checkpoint,
    path: Path,
    job: GGUFJob,
    memory: int,
    device: torch.device,
    on_block: Callable[[int, int, float], None],
) -> dict[str, Tensor]:
    """Mean square of the input of every linear, the head included, by name."""
    sequences = read_sequences(checkpoint, path, job)
    length = sequences.shape[1]
    source = SourceModel(checkpoint, length)
    plan = states_plan(source, job.calibration_samples, length, memory, device)
    values = source.embed(sequences)
    states = HiddenStates(values.half() if plan.half else values, plan.batch)
    importance: dict[str, Tensor] = {}
    started = time.monotonic()
    for index in range(source.num_blocks):
        statistics = CalibratedBlock(source, index, states, device).survey(("mean_square",))
        least = _LEAST_TOKENS * states.num_tokens
        rare = [name for name, each in statistics.items() if each.num_tokens < least]
        if rare:
            _log.warning(
                "%d matrices of block %d (%s, ...) received too few tokens: weighted uniformly",
                len(rare),
                index,
                rare[0],
            )
        importance |= {
            name: each.mean_square.cpu()
            for name, each in statistics.items()
            if each.mean_square is not None and name not in rare
        }
        spent = (time.monotonic() - started) / (index + 1)
        on_block(index + 1, source.num_blocks, spent * (source.num_blocks - index - 1))
        check_memory(memory)
    collector = StatisticsCollector(source.description.hidden_size, states.num_tokens, ("mean_square",))
    for _, rows in states.batches():
        collector.add(source.decoder.norm.of_tensor(rows))
    head = collector.finish().mean_square
    assert head is not None
    return {**importance, HEAD: head}


def _conclude(job: GGUFJob, gate: GateRequest, partial: Path, reference: str, report: GGUFReport) -> dict[str, Any]:
    """Measure, write the card beside the file, and move both into place or aside."""
    measured: dict[str, Any] = {"gate": "off"}
    reason = words = ""
    if gate.enabled:
        figures, reason, words = measure(partial, gate, reference, "")
        measured = {"gate": "refused" if reason else "passed", **figures}
    final = job.out.with_name(job.out.name + ".rejected") if reason else job.out
    os.replace(partial, final)
    final.with_name(final.name + ".md").write_text(_card(job, report, measured, words), encoding="utf-8")
    if reason:
        final.with_name(final.name + ".reason.txt").write_text(reason + "\n", encoding="utf-8")
        raise refusal(measured, reason, job.out, final, "use a larger type or --method imatrix")
    return measured


def _card(job: GGUFJob, report: GGUFReport, measured: dict[str, Any], words: str) -> str:
    lines = [
        f"# {job.model}, {report.mix} GGUF",
        "",
        f"Made by tokenmill {__version__} with {job.method}; {report.bits_per_weight:.3f} bits a weight in matrices.",
        "",
        f"Measured against the source on {words}:"
        if words
        else "Not measured: the gate was switched off (`--no-gate`).",
        "",
        *(f"- {name.replace('_', ' ')}: {value}" for name, value in measured.items() if name != "gate"),
        "",
        "| Tensor | Type | Relative error |",
        "|---|---|---|",
        *(f"| {tensor.name} | {tensor.type_name} | {tensor.relative_error:.5f} |" for tensor in report.tensors),
        "",
    ]
    return "\n".join(lines)
