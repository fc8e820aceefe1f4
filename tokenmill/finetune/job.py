"""A fine-tuning run from start to finish: check, train step by step, measure, write the adapter.

Every step is a function of the seed and its number, and the state is saved now and then: a killed run continues with
the same losses as one that was not. With a teacher the loss is the divergence from it, and the report says how much of
what the base had lost came back. Called by `tokenmill finetune`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmill import __version__
from tokenmill.checkpoint.adapters.adapter import Adapter
from tokenmill.checkpoint.adapters.join import joined_as_stored
from tokenmill.checkpoint.adapters.write import write_adapter
from tokenmill.checkpoint.configs.tensor_names import naming_of, stored_name
from tokenmill.checkpoint.identity import model_hash
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.sources import resolve
from tokenmill.checkpoint.tokenizer_files import load_chat_template, load_tokenizer
from tokenmill.errors import UserError, unknown_name
from tokenmill.finetune.data import Rows, hold_out, read_rows
from tokenmill.finetune.model import AdapterPlan, TrainableModel
from tokenmill.finetune.report import write_report
from tokenmill.finetune.state import Progress, RunState
from tokenmill.hardware.machine import usable_cores
from tokenmill.quantize.device import choose_device, describe_device, full_device_explained

METHODS = ("auto", "lora", "qlora")
MAX_LENGTH = 512  # of a row, unless another is asked for
_WARMUP = 0.05  # of the steps
_FLOOR = 0.1  # of the peak rate, at the end
_TOKENS_AT_ONCE = 2048
_MAX_NORM = 1.0  # gradients are cut to it
OnStep = Callable[[int, int, float, float | None], None]  # steps done, of how many, loss, held-out loss if measured


@dataclass(frozen=True, slots=True)
class FinetuneJob:
    model: str
    data: Path
    out: Path
    method: str = "auto"
    adapter: AdapterPlan = field(default_factory=AdapterPlan)
    steps: int = 200
    batch: int = 8  # rows a step
    length: int = 0  # tokens of a row; 0: 512, or the model's context where that is shorter
    learning_rate: float = 2e-4
    eval_data: Path | None = None  # None: the last tenth of the data
    eval_every: int = 0  # steps; 0: a tenth of them
    save_every: int = 25
    distill_from: str = ""  # the unquantized model
    device: str = "auto"
    threads: int = 0
    restart: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise unknown_name("method", self.method, METHODS)
        bounds = (
            ("steps", self.steps),
            ("batch", self.batch),
            ("save-every", self.save_every),
            ("rank", self.adapter.rank),
        )
        for name, value in bounds:
            if value < 1:
                raise UserError(f"--{name} is {value}", "give at least 1")
        if self.length and self.length < 8:
            raise UserError(f"--length is {self.length}", "give at least 8")
        if not 0 < self.learning_rate < 1:
            raise UserError(f"--learning-rate is {self.learning_rate:g}", "give a rate such as 2e-4")


@dataclass(frozen=True, slots=True)
class Repair:
    """What the base had lost against the teacher, and what came back, on held-out text. Losses in nats a token."""

    teacher_loss: float
    base_loss: float
    tuned_loss: float
    loss_won_back: float  # share of base_loss - teacher_loss
    base_divergence: float
    tuned_divergence: float
    divergence_won_back: float


@dataclass(frozen=True, slots=True)
class FinetuneReport:
    path: str
    model: str
    method: str
    rank: int
    parameters: int
    modules: int
    steps: int
    resumed_from: int
    tokens: int  # learned from, over all steps
    rows: int
    held_out_tokens: int
    length: int
    losses: list[float]  # of each step
    held_out: list[tuple[int, float]]
    loss_before: float  # on held-out text
    loss_after: float
    seconds: float
    device: str
    repair: Repair | None
    html: str


def finetune(job: FinetuneJob, on_step: OnStep = lambda _step, _all, _loss, _held: None) -> FinetuneReport:
    if job.out.exists():
        raise UserError(f"{job.out} exists", "give another --out, or remove it")
    torch.set_num_threads(job.threads or usable_cores())
    device = choose_device(job.device)
    path = resolve(job.model).path
    checkpoint = open_checkpoint(path)
    length = _row_length(job, checkpoint.description.context_length)
    training, held_out = _read(job, path, length)
    model = TrainableModel(checkpoint, device, length, job.adapter)
    method = _method(job, model)
    teacher = _teacher(job, model, device, length)
    run = _Run(job, model, teacher, training, held_out)
    state = RunState(job.out, _key(job, path, training, held_out), job.restart)
    resumed = run.load(state)
    begin = time.monotonic() - run.progress.seconds
    with full_device_explained(str(job.out)):
        for step in range(run.progress.step, job.steps):
            loss = run.step(step)
            measured = run.measure() if (step + 1) % run.eval_every == 0 or step + 1 == job.steps else None
            run.progress.seconds = time.monotonic() - begin
            if (step + 1) % job.save_every == 0 or step + 1 == job.steps:
                run.save(state)
            on_step(step + 1, job.steps, loss, measured)
        repair = run.repair()
    adapter = joined_as_stored(model.adapter(job.out.name, job.model, model_hash(path)), checkpoint)
    report = FinetuneReport(
        path=str(job.out),
        model=job.model,
        method=method,
        rank=job.adapter.rank,
        parameters=sum(each.numel() for each in model.parameters().values()),
        modules=len(model.factors),
        steps=job.steps,
        resumed_from=resumed,
        tokens=run.tokens_learned(),
        rows=len(training),
        held_out_tokens=held_out.num_targets,
        length=length,
        losses=run.progress.losses,
        held_out=run.progress.held_out,
        loss_before=run.progress.held_out[0][1],
        loss_after=run.progress.held_out[-1][1],
        seconds=run.progress.seconds,
        device=describe_device(device),
        repair=repair,
        html=str(job.out / "report.html"),
    )
    _write(job, report, adapter, checkpoint.description.architecture, state)
    return report


class _Run:
    """The loop's parts: batches, steps, measurements."""

    def __init__(
        self, job: FinetuneJob, model: TrainableModel, teacher: TrainableModel | None, training: Rows, held_out: Rows
    ) -> None:
        self.job, self.model, self.teacher = job, model, teacher
        self.training, self.held_out = training, held_out
        self.parameters = model.parameters()
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=job.learning_rate, weight_decay=0.0)
        self.eval_every = job.eval_every or max(1, job.steps // 10)
        self.progress = Progress()

    def load(self, state: RunState) -> int:
        """Continue an earlier run: the number of steps it had done. A new run is measured before its first step."""
        self.progress = state.load(self.parameters, self.optimizer)
        if not self.progress.held_out:
            self.measure()
        return self.progress.step

    def save(self, state: RunState) -> None:
        state.save(self.progress, self.parameters, self.optimizer)

    def batch(self, step: int) -> Rows:
        """Rows of a step: every row once in an epoch, in an order that only the seed and the epoch decide."""
        count, size = len(self.training), min(self.job.batch, len(self.training))
        places = range(step * size, (step + 1) * size)
        orders = {epoch: self._order(epoch) for epoch in {place // count for place in places}}
        return self.training.take([orders[place // count][place % count] for place in places], self.model.device)

    def _order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.job.adapter.seed * 1_000_003 + epoch)
        order: list[int] = torch.randperm(len(self.training), generator=generator).tolist()
        return order

    def step(self, step: int) -> float:
        rows = self.batch(step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.job.steps, self.job.learning_rate)
        self.optimizer.zero_grad(set_to_none=True)
        targets, total = max(1, rows.num_targets), 0.0
        for piece in _pieces(rows):
            loss = self._loss(piece) / targets
            loss.backward()
            total += float(loss.detach())
        if not math.isfinite(total):
            raise UserError(
                f"the loss is not finite at step {step + 1}", "give a lower --learning-rate, or check the data"
            )
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), _MAX_NORM)
        self.optimizer.step()
        self.progress.losses.append(total)
        self.progress.step = step + 1
        return total

    def _loss(self, rows: Rows) -> Tensor:
        return self.model.text_loss(rows) if self.teacher is None else self.model.divergence(rows, self.teacher)

    def measure(self) -> float:
        """The held-out loss as it is now, noted in the curve."""
        loss = self._mean(self._loss)
        self.progress.held_out.append((self.progress.step, loss))
        return loss

    @torch.no_grad()
    def _mean(self, of: Callable[[Rows], Tensor]) -> float:
        rows = self.held_out.take(slice(None), self.model.device)
        return sum(float(of(piece)) for piece in _pieces(rows)) / max(1, rows.num_targets)

    def repair(self) -> Repair | None:
        teacher = self.teacher
        if teacher is None:
            return None
        tuned, divergence = self._mean(self.model.text_loss), self._mean(self._loss)
        with self.model.base():
            base, base_divergence = self._mean(self.model.text_loss), self._mean(self._loss)
        reference = self._mean(teacher.text_loss)
        return Repair(
            reference,
            base,
            tuned,
            _share(base - tuned, base - reference),
            base_divergence,
            divergence,
            _share(base_divergence - divergence, base_divergence),
        )

    def tokens_learned(self) -> int:
        per_row = self.training.num_targets / len(self.training)
        return round(per_row * min(self.job.batch, len(self.training)) * self.job.steps)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """A linear rise over the first steps, then a cosine down to a tenth."""
    warmup = max(1, round(_WARMUP * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (_FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))


def _pieces(rows: Rows) -> list[Rows]:
    """Rows that are computed together: gradients add up over them."""
    size = max(1, _TOKENS_AT_ONCE // rows.ids.shape[1])
    return [rows.take(slice(begin, begin + size)) for begin in range(0, len(rows), size)]


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


def _row_length(job: FinetuneJob, context: int) -> int:
    if job.length > context:
        raise UserError(
            f"--length {job.length} is more than the model's context of {context}", f"give at most {context}"
        )
    return job.length or min(MAX_LENGTH, context)


def _read(job: FinetuneJob, path: Path, length: int) -> tuple[Rows, Rows]:
    tokenizer, template = load_tokenizer(path), load_chat_template(path)
    rows = read_rows(job.data, tokenizer, template, length)
    if job.eval_data is None:
        return hold_out(rows)
    return rows, read_rows(job.eval_data, tokenizer, template, length)


def _method(job: FinetuneJob, model: TrainableModel) -> str:
    """lora trains on floats, qlora on codes; the two differ in the base only, so a wrong name is a wrong model."""
    found = "qlora" if model.is_quantized else "lora"
    if job.method not in ("auto", found):
        remedy = (
            "give --method qlora"
            if model.is_quantized
            else f"quantize it first (tokenmill quantize {job.model} --out ...), or give --method lora"
        )
        raise UserError(f"{job.model} is {'' if model.is_quantized else 'not '}quantized", remedy)
    return found


def _teacher(job: FinetuneJob, model: TrainableModel, device: torch.device, length: int) -> TrainableModel | None:
    if not job.distill_from:
        return None
    checkpoint = open_checkpoint(resolve(job.distill_from).path)
    ours, theirs = model.checkpoint.description, checkpoint.description
    if ours.vocab_size != theirs.vocab_size:
        raise UserError(
            f"{job.distill_from} has {theirs.vocab_size} tokens, {job.model} has {ours.vocab_size}",
            "distill from the model that this one was quantized from",
        )
    return TrainableModel(checkpoint, device, length)


def _key(job: FinetuneJob, path: Path, training: Rows, held_out: Rows) -> str:
    """Hash of everything that decides the losses."""
    teacher = model_hash(resolve(job.distill_from).path) if job.distill_from else ""
    decisive = [
        *(__version__, torch.__version__, model_hash(path), teacher, training.digest, held_out.digest),
        *(asdict(job.adapter), job.steps, job.batch, job.learning_rate, job.eval_every),
    ]
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def _write(job: FinetuneJob, report: FinetuneReport, adapter: Adapter, architecture: str, state: RunState) -> None:
    """Everything into the run's directory, then one rename."""
    result = state.path / "result"
    write_adapter(adapter, result, partial(stored_name, naming_of(architecture)))
    content: Mapping[str, Any] = asdict(report)
    (result / "finetune.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    write_report(result / "report.html", content)
    os.rename(result, job.out)
    state.remove()
