"""The child's side of a contender: one engine, or one build, or one judgement at a time, on command.

Started as `python -m tokenmill.optimize.contender_process`; commands come on standard input, answers leave on standard
output, everything printed goes to standard error. It ends when its input closes, that is, with its parent. An alarm
that needs no interpreter ends it where a command hangs and the parent is gone. Knows no limits of memory.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import queue
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tokenmill.bench.prompts import SyntheticRequest
from tokenmill.bench.throughput import run_requests, warm_up
from tokenmill.config import EngineConfig
from tokenmill.engine.llm import LLM
from tokenmill.errors import UserError
from tokenmill.log import configure
from tokenmill.optimize.artefacts import NotEnoughTimeError, weight_bytes
from tokenmill.optimize.builds import build_weights, train_drafter
from tokenmill.optimize.contender_messages import (
    AskMemory,
    BuildWeights,
    Command,
    Done,
    Failure,
    Judge,
    Load,
    Loaded,
    Memory,
    Ready,
    RunRequests,
    TrainDrafter,
    Unload,
    WarmUp,
    begin,
    decode_command,
    encode_answer,
)
from tokenmill.optimize.quality import QualityJudge, QualityPlan
from tokenmill.optimize.results import Proof, Quality, Run

_ALARM_GRACE = 10.0  # seconds after the parent should have killed this process
_MAX_REASON = 500  # characters; the traceback is in the log


@dataclass(slots=True)
class Workbench:
    """What this process holds: at most one engine, and the judge with its reference."""

    llm: LLM | None = None
    memory_bytes: int = 0
    judge: QualityJudge | None = None
    judge_key: tuple[QualityPlan, Path, EngineConfig] | None = None

    def handle(self, command: Command) -> Any:
        match command:
            case Load(path=path, config=config, device_bytes=device_bytes):
                return self.load(path, config, device_bytes)
            case WarmUp(request=request):
                return self.warm_up(request)
            case RunRequests(requests=requests):
                return self.run(requests)
            case Unload():
                self.unload()
                return Done()
            case AskMemory(device=device):
                return measure_memory(device)
            case BuildWeights():
                self.unload()
                return build_weights(command)
            case TrainDrafter():
                self.unload()
                return train_drafter(command)
            case Judge():
                self.unload()
                return self.compare(command)

    def load(self, path: Path, config: EngineConfig, device_bytes: int) -> Loaded:
        self.unload()
        began = time.monotonic()
        if device_bytes and config.device == "cuda":
            total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, device_bytes / total))
        self.llm = LLM(str(path), config)
        self.llm.tokens_at_once = 1  # one step at a time, as the server runs it
        runtime = self.llm.parts.runtime
        as_loaded = runtime.model.device.type == "cuda" or config.load_format == "dummy"  # else mapped as stored
        self.memory_bytes = (runtime.model.weight_bytes if as_loaded else weight_bytes(path)) + runtime.store.nbytes
        return Loaded(self.memory_bytes, time.monotonic() - began)

    def warm_up(self, request: SyntheticRequest) -> Done:
        assert self.llm is not None
        if self.llm.parts.runtime.model.device.type == "cuda":
            self.llm.warm_up()  # kernels are compiled and graphs captured before anything is timed
        warm_up(self.llm, request)
        return Done()

    def run(self, requests: list[SyntheticRequest]) -> Run:
        assert self.llm is not None
        self.llm.parts.kv.clear()  # an earlier run's prefixes must not speed this one up
        report, outputs = run_requests(self.llm, requests)
        first = [output.metrics.ttft for output in outputs]
        later = [output.metrics.tpot(len(output.outputs[0].token_ids)) for output in outputs]
        return Run(
            report.elapsed_s,
            report.output_tok_s,
            report.total_tok_s,
            1e3 * median(value for value in first if value is not None),
            1e3 * median([value for value in later if value is not None] or [0.0]),
            self.memory_bytes,
        )

    def compare(self, command: Judge) -> Quality | Proof:
        key = (command.plan, command.reference, command.reference_config)
        if self.judge is None or key != self.judge_key:
            self.judge, self.judge_key = QualityJudge(*key), key
        return (self.judge.prove if command.whole else self.judge.check)(command.path, command.config)

    def unload(self) -> None:
        if self.llm is not None:
            self.llm.close()
        self.llm = None
        free_memory()
        if torch.cuda.is_initialized():
            torch.cuda.set_per_process_memory_fraction(1.0)


def measure_memory(device: str) -> Memory:
    return Memory(torch.cuda.mem_get_info()[0] if device == "cuda" else 0)


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def explain(error: BaseException) -> Failure:
    if isinstance(error, NotEnoughTimeError):
        return Failure(str(error), "time")
    if isinstance(error, torch.OutOfMemoryError):
        return Failure("out of GPU memory")
    text = " ".join(str(error).split())
    if isinstance(error, UserError):
        return Failure(text[:_MAX_REASON], "user")
    return Failure(f"{type(error).__name__}: {text}"[:_MAX_REASON] if text else type(error).__name__)


def serve(answers: int) -> None:
    """Runs until the input closes."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    begin(sys.stdin.buffer.readline())
    threading.Thread(target=_receive, args=(lines,), name="commands", daemon=True).start()
    _answer(answers, Ready())
    bench = Workbench()
    while True:
        command, seconds = decode_command(lines.get())
        faulthandler.dump_traceback_later(min(seconds + _ALARM_GRACE, 1e6), exit=True)
        try:
            answer = bench.handle(command)
        except BaseException as error:
            traceback.print_exc()
            answer = explain(error)
        faulthandler.cancel_dump_traceback_later()
        _answer(answers, answer)
        if not isinstance(command, WarmUp | RunRequests | AskMemory | Load):
            free_memory()


def _receive(lines: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)  # the parent is gone, or needs this process no longer


def _answer(descriptor: int, answer: Any) -> None:
    data = encode_answer(answer)
    while data:
        data = data[os.write(descriptor, data) :]


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not look like an answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    with contextlib.suppress(OSError):  # where memory runs out the kernel ends this process, not its parent
        Path("/proc/self/oom_score_adj").write_text("1000")
    configure()
    serve(answers)


if __name__ == "__main__":
    main()
