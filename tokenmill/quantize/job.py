"""A quantization job from start to finish: check everything, then block by block, then assemble, measure, move into
place.

Resumable after any block; under a memory cap; refuses before any long work what would fail later. The steps are in
other modules; this one has their order. Called by `tokenmill quantize`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tokenmill import __version__
from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.sources import resolve
from tokenmill.checkpoint.tokenizer_files import load_chat_template, load_tokenizer
from tokenmill.errors import UserError
from tokenmill.hardware.machine import usable_cores
from tokenmill.model.formats.files import FILE_FORMATS
from tokenmill.model.formats.files.base import FileFormat
from tokenmill.quantize.block_job import encode_block, from_plain, quantize_block, to_plain, weight_errors
from tokenmill.quantize.calibrate import CalibratedBlock, HiddenStates
from tokenmill.quantize.calibration_text import CalibrationText, read_calibration
from tokenmill.quantize.card import CardContent
from tokenmill.quantize.device import (
    check_room,
    choose_device,
    describe_device,
    full_device_explained,
    peak_device_bytes,
)
from tokenmill.quantize.drawn_text import with_drawing, with_drawn
from tokenmill.quantize.drop_layers import MEASURED, check_droppable, choose_dropped
from tokenmill.quantize.edges import Edges, JobData
from tokenmill.quantize.finish import GATE_CONTEXT, GateRequest, conclude
from tokenmill.quantize.forecast import (
    MIB,
    Forecast,
    as_begun,
    check_cap,
    check_memory,
    forecast_job,
    gate_memory,
    output_bytes,
    peak_bytes,
)
from tokenmill.quantize.kv_scales import KVPeaks, check_kv_scales
from tokenmill.quantize.low_rank import check_low_rank, mend_block, save_pairs, with_low_rank, write_low_rank
from tokenmill.quantize.mixed_job import choose_schemes
from tokenmill.quantize.output import (
    assemble,
    choose_dtype,
    directory_bytes,
    dtype_name,
    file_digest,
    float_config,
    weight_files,
)
from tokenmill.quantize.recipe import MIXED, Recipe, RecipeRequest, build_recipe
from tokenmill.quantize.source import SourceModel
from tokenmill.quantize.train_codes import check_trainable
from tokenmill.quantize.tune_job import LastPass, TunedModel, save_raw, tune_blocks, with_tuning
from tokenmill.quantize.workspace import Workspace

DEFAULT_LENGTH = 512
Progress = Callable[[int, int, float], None]  # blocks done, blocks in total, seconds remaining


@dataclass(frozen=True, slots=True)
class QuantizeJob:
    model: str
    out: Path
    recipe: RecipeRequest = field(default_factory=RecipeRequest)
    format: str = ""  # a name of FILE_FORMATS; empty: the first that holds the scheme
    dtype: str = "auto"  # of what is not quantized
    calibration: Path | None = None
    calibration_samples: int = 128
    calibration_length: int = 0  # 0: 512, or the model's context where that is shorter
    drawn: int = 0  # sequences that the model draws itself, beside those
    memory: int = 0
    threads: int = 0
    device: str = "auto"  # a GPU where there is one, "cpu" or "cuda"
    restart: bool = False
    drop_layers: int = 0  # blocks to leave out: those whose absence costs least
    kv_scales: bool = False  # measure what keys and values reach, and write the scales of an FP8 KV cache
    size: int = 0  # mixed precision: bytes that all weights may take; 0: as the recipe says
    low_rank: int = 0  # rank of an adapter that mends what rounding lost; 0: none
    tune: int = 0  # steps of the end-to-end pass over scales and norms
    train: int = 0  # steps of the one over codes too, instead
    gate: GateRequest = field(default_factory=GateRequest)

    @property
    def last_pass(self) -> LastPass:
        """Over the whole model; without steps there is none."""
        return LastPass(self.tune or self.train, bool(self.train))


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    path: str
    bits_per_weight: float
    bytes: int
    seconds: float
    peak_memory_bytes: int
    peak_device_bytes: int  # on the GPU, 0 without one
    device: str
    fidelity: Mapping[str, Any]
    format: str
    method: str
    forecast: Mapping[str, Any]
    resumed_blocks: int
    layers: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedJob:
    """A job whose inputs are checked; nothing has been written."""

    job: QuantizeJob
    path: Path
    checkpoint: Checkpoint
    source: SourceModel
    recipe: Recipe
    file_format: type[FileFormat]
    dtype: torch.dtype
    device: torch.device
    calibration: CalibrationText | None
    forecast: Forecast

    @property
    def needs_states(self) -> bool:
        """Whether the calibration text goes through the model block by block."""
        return self.recipe.needs_calibration or self.job.kv_scales or bool(self.job.low_rank)

    @property
    def key(self) -> str:
        """Hash of everything that decides the result; a resumed job must have the same."""
        decisive = {
            "version": [__version__, torch.__version__],
            "source": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in weight_files(self.path)],
            "recipe": self.recipe.describe(),
            "format": self.file_format.name,
            "dtype": str(self.dtype),
            "device": self.device.type,
            "calibration": self.calibration.digest if self.calibration else None,
            **({"drawn": self.job.drawn} if self.job.drawn else {}),
            **({"kv_scales": True} if self.job.kv_scales else {}),
            **({"drop_layers": self.job.drop_layers} if self.job.drop_layers else {}),
            **({"low_rank": self.job.low_rank} if self.job.low_rank else {}),
            "tune": self.job.tune,
            **({"train": self.job.train} if self.job.train else {}),
        }
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def prepare(job: QuantizeJob) -> PreparedJob:
    """Check the job; refuses here what would fail later."""
    if job.out.exists():
        raise UserError(f"{job.out} exists", "give another --out, or remove it")
    if not job.out.absolute().parent.is_dir():
        raise UserError(f"{job.out.absolute().parent} is not a directory", "create it, or give another --out")
    torch.set_num_threads(job.threads or usable_cores())
    device = choose_device(job.device)
    path = resolve(job.model).path
    checkpoint = open_checkpoint(path)
    length = _sequence_length(job, checkpoint.description.context_length)
    source = SourceModel(checkpoint, length)
    if job.drop_layers:
        source = SourceModel(checkpoint, length, _choose_dropped(job, path, source, device))
    shapes = {name: source.shape(name) for name in source.layer_linears()}
    dtype = choose_dtype(job.dtype, source)
    recipe = build_recipe(_within_size(job, source, dtype), shapes)
    file_format = _choose_format(job.format, recipe, shapes)
    if job.kv_scales:
        check_kv_scales(file_format, source.description)
    float_config(checkpoint, source.description, dtype_name(dtype))  # refused here rather than after hours
    if job.low_rank:
        check_low_rank(job.low_rank, recipe, job.last_pass.steps)
    check_trainable(job.train, job.tune, recipe, job.calibration_samples + job.drawn)
    calibration, needs_states = None, recipe.needs_calibration or job.kv_scales or bool(job.low_rank)
    if needs_states or job.last_pass.steps:
        template = load_chat_template(path)
        calibration = read_calibration(job.calibration, load_tokenizer(path), template, job.calibration_samples, length)
    size, samples = output_bytes(source, recipe, shapes, dtype), job.calibration_samples + job.drawn
    forecast = forecast_job(source, recipe, (samples, length) if needs_states else None, job.memory, size, device)
    if job.low_rank:
        forecast = with_low_rank(forecast, source)
    if job.last_pass.steps:
        untied = not source.description.tie_embeddings or any(step.turns_states for step in recipe.transforms)
        forecast = with_tuning(forecast, source, job.last_pass, samples, length, untied, device)
    if job.drawn:
        forecast = with_drawing(forecast, source, calibration is not None, job.drawn * length, device)
    check_room(device, forecast.device_bytes)
    check_cap(forecast, job.memory)
    if job.gate.enabled and job.gate.in_turn and device.type == "cpu":
        forecast = _with_gate(forecast, job, max(size, sum(file.stat().st_size for file in weight_files(path))), source)
    free = shutil.disk_usage(job.out.absolute().parent).free
    if free < forecast.disk_bytes:
        raise UserError(
            f"the job needs {forecast.disk_bytes / MIB:,.0f} MiB on the disk of {job.out}, it has {free / MIB:,.0f}",
            "make room, or give an --out on another disk",
        )
    return PreparedJob(job, path, checkpoint, source, recipe, file_format, dtype, device, calibration, forecast)


def _choose_dropped(job: QuantizeJob, path: Path, source: SourceModel, device: torch.device) -> list[int]:
    check_droppable(source, job.drop_layers)
    length = _sequence_length(job, source.description.context_length)
    template, count = load_chat_template(path), min(job.calibration_samples, MEASURED)
    text = read_calibration(job.calibration, load_tokenizer(path), template, count, length)
    return choose_dropped(source, text.sequences, job.drop_layers, device)


def _within_size(job: QuantizeJob, source: SourceModel, dtype: torch.dtype) -> RecipeRequest:
    """The job's recipe; with a size, its linears get what the embedding, head and norms leave over."""
    if not job.size:
        return job.recipe
    if MIXED not in job.recipe.method:
        raise UserError(f"{job.recipe.method} has the size that its bits give", "use --method mixed with --size")
    d = source.description
    kept = d.vocab_size * d.hidden_size * (1 if d.tie_embeddings else 2) * dtype.itemsize
    if job.size <= kept:
        raise UserError(f"the embedding and head alone take {kept:,} bytes", "give a larger --size")
    return replace(job.recipe, options=(*job.recipe.options, ("budget", job.size - kept)))


def _with_gate(forecast: Forecast, job: QuantizeJob, weight_bytes: int, source: SourceModel) -> Forecast:
    needed = gate_memory(weight_bytes, job.memory)
    # Two bytes a value. Half of the text is scored, and it may have twice the tokens that its length suggests.
    rows = job.gate.max_chunks * GATE_CONTEXT * 2 * source.description.vocab_size
    return replace(forecast, memory_bytes=max(forecast.memory_bytes, needed), disk_bytes=forecast.disk_bytes + rows)


def run_job(prepared: PreparedJob, on_block: Progress = lambda _done, _all, _left: None) -> QuantizeReport:
    begin = time.monotonic()
    job, source, recipe = prepared.job, prepared.source, prepared.recipe
    workspace = Workspace(job.out, prepared.key, job.restart)
    text = with_drawn(prepared.calibration, prepared.path, workspace, job.drawn, job.threads, job.device)
    prepared = replace(prepared, calibration=text, forecast=as_begun(prepared.forecast, workspace))
    edges = Edges(source, _job_data(prepared, workspace))
    for step in recipe.steps:
        step.begin(edges)
    if recipe.average_bits is not None and text is not None:
        recipe = choose_schemes(recipe, source, text.sequences, prepared.file_format, workspace, prepared.device)
    finished = workspace.num_finished(prepared.needs_states)
    states, float_states = _initial_states(prepared, edges, workspace, finished)
    workspace.save(workspace.edges, edges.stored(prepared.dtype))
    edges.drop_tables()
    on_block(finished, source.num_blocks, prepared.forecast.seconds)
    started = time.monotonic()
    for index in range(finished, source.num_blocks):
        with full_device_explained(f"block {index}"):
            _do_block(prepared, recipe, workspace, index, states, float_states, edges.description.norm_offset)
        spent = (time.monotonic() - started) / (index + 1 - finished)
        on_block(index + 1, source.num_blocks, spent * (source.num_blocks - index - 1))
        check_memory(job.memory)
    del states, float_states
    extras = _tune(prepared, workspace, edges.description.norm_offset)
    stored = dtype_name(prepared.dtype)
    digests = assemble(workspace, source, edges.description, recipe, prepared.file_format, stored, job.kv_scales)
    extras |= write_low_rank(workspace, source.num_blocks, job.low_rank, prepared.dtype, job.out.name)
    layers = [layer for index in range(source.num_blocks) for layer in from_plain(workspace.block_report(index))]
    bits = 8.0 * sum(layer.num_bytes for layer in layers) / sum(layer.num_weights for layer in layers)
    content = CardContent(
        source_name=prepared.checkpoint.description.name or prepared.path.name,
        source_digests={file.name: file_digest(file) for file in weight_files(prepared.path)},
        recipe=recipe.describe() | extras,
        format_name=prepared.file_format.name,
        dtype=stored,
        bits_per_weight=bits,
        calibration=_calibration_words(prepared),
        digests=digests,
        layers=layers,
        gate=None,
        gate_text="",
    )
    held_out = prepared.calibration.held_out if prepared.calibration else ""
    measured = conclude(workspace, job.out, content, job.gate, str(prepared.path), held_out)
    return QuantizeReport(
        path=str(job.out),
        bits_per_weight=bits,
        bytes=directory_bytes(job.out),
        seconds=time.monotonic() - begin,
        peak_memory_bytes=peak_bytes(),
        peak_device_bytes=peak_device_bytes(prepared.device),
        device=describe_device(prepared.device),
        fidelity={**measured, **weight_errors(layers), **extras},
        format=prepared.file_format.name,
        method=recipe.method,
        forecast=asdict(prepared.forecast),
        resumed_blocks=finished,
        layers=[asdict(layer) for layer in layers],
    )


def _job_data(prepared: PreparedJob, workspace: Workspace) -> JobData | None:
    if prepared.calibration is None:
        return None
    sequences, batch = prepared.calibration.sequences, prepared.forecast.batch
    return JobData(sequences, batch, prepared.device, prepared.recipe.scheme_of, workspace)


def _do_block(
    prepared: PreparedJob,
    recipe: Recipe,
    workspace: Workspace,
    index: int,
    states: HiddenStates | None,
    float_states: HiddenStates | None,
    norm_offset: float,
) -> None:
    block = CalibratedBlock(prepared.source, index, states, prepared.device, float_states, prepared.forecast.tapes)
    block.residuals = {} if prepared.job.low_rank or prepared.job.train else None
    quantized = quantize_block(block, recipe)
    tensors, reports = encode_block(quantized, prepared.file_format, prepared.dtype, norm_offset)
    if prepared.job.last_pass.steps:
        save_raw(workspace, index, quantized, block.residuals or {})
    if prepared.job.low_rank:
        save_pairs(workspace, index, mend_block(block, quantized.matrices, prepared.job.low_rank, prepared.dtype))
    if states is not None:
        peaks = KVPeaks()
        block.advance(peaks.add if prepared.job.kv_scales else None)
        tensors |= peaks.tensors(index)
        workspace.save_states(index + 1, states.values, None if float_states is None else float_states.values)
    workspace.save_block(index, tensors, to_plain(reports))
    if states is not None:
        workspace.drop_states(index)


def _tune(prepared: PreparedJob, workspace: Workspace, norm_offset: float) -> dict[str, Any]:
    """The end-to-end pass, if the job has one; what it gained."""
    if not prepared.job.last_pass.steps:
        return {}
    assert prepared.calibration is not None
    model = TunedModel(prepared.source, workspace, prepared.file_format, prepared.dtype, norm_offset, prepared.device)
    with full_device_explained("the last pass"):
        gained = tune_blocks(model, prepared.calibration.sequences, prepared.job.last_pass)
    check_memory(prepared.job.memory)
    return gained


def _initial_states(
    prepared: PreparedJob, edges: Edges, workspace: Workspace, finished: int
) -> tuple[HiddenStates | None, HiddenStates | None]:
    """Hidden states at the first block still to do, and the float model's where a method needs them."""
    if prepared.calibration is None or not prepared.needs_states:
        return None, None
    if finished:
        values, float_values = workspace.load_states(finished)
    else:
        values = edges.embed(prepared.calibration.sequences)
        if prepared.forecast.half_states:
            values = values.half()
        float_values = values.clone() if prepared.recipe.needs_targets else None
    batch = prepared.forecast.batch
    return HiddenStates(values, batch), None if float_values is None else HiddenStates(float_values, batch)


def _sequence_length(job: QuantizeJob, context: int) -> int:
    if job.calibration_length > context:
        raise UserError(
            f"--calibration-length {job.calibration_length} is more than the {context} tokens of the model's context",
            f"give at most {context}",
        )
    return job.calibration_length or min(DEFAULT_LENGTH, context)


def _choose_format(name: str, recipe: Recipe, shapes: Mapping[str, tuple[int, int]]) -> type[FileFormat]:
    quantized = {each: shapes[each] for each in recipe.scheme_of}
    if name:
        chosen: type[FileFormat] = FILE_FORMATS.get(name)
        chosen.check(recipe.scheme_of, quantized)
        return chosen
    reasons = []
    for candidate in FILE_FORMATS:
        file_format: type[FileFormat] = FILE_FORMATS.get(candidate)
        try:
            file_format.check(recipe.scheme_of, quantized)
            return file_format
        except UserError as error:
            reasons.append(str(error))
    raise UserError(f"no format holds what {recipe.method} makes: {reasons[0]}", "choose another scheme")


def _calibration_words(prepared: PreparedJob) -> str:
    if prepared.calibration is None:
        return "none (data-free)"
    samples, length = prepared.calibration.sequences.shape
    return f"{samples} sequences of {length} tokens of {prepared.calibration.origin}" + (
        ", hidden states kept as float16" if prepared.forecast.half_states else ""
    )
