"""A text worker: renders templates, tokenizes and checks grammars, one job after the other, until its pipe closes.

Started by the pool as `python -m tokenmill.serve.workers.child` with a Setup on standard input. What a client sends may
hang, crash or exhaust this process: the pool kills it and starts another. Heavy jobs run in a thread of low priority
whose stack is smaller than those of the engine, so that a grammar that passes here does not overflow there.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.errors import UserError
from tokenmill.hardware.priority import lower_session_priority, lower_thread_priority
from tokenmill.log import configure, get_logger
from tokenmill.serve.workers import jobs
from tokenmill.serve.workers.jobs import Accepted, CheckGrammar, Encode, Encoded, Failed, Ready, Rejected, Render

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_log = get_logger(__name__)
_STACK_BYTES = 4 << 20  # half of a main thread's, a fraction of the engine's compiler threads


class TextWorker:
    def __init__(self, setup: jobs.Setup) -> None:
        from tokenmill.checkpoint.tokenizer_files import tokenizer_of

        self._tokenizer, self._template = tokenizer_of(Path(setup.path), setup.load_format, setup.template_source)
        self._vocabulary: LLTokenizer | None = None
        try:
            self._vocabulary = self._build_vocabulary()
        except Exception as error:  # texts and templates need no grammars; a check says what is wrong
            _log.warning("grammars cannot be checked: %s", error)

    def run(self, job: jobs.Job) -> jobs.Result:
        began = time.process_time()
        try:
            result = self._run(job)
        except UserError as error:
            result = Rejected(seconds=0.0, message=str(error))
        except Exception as error:
            if isinstance(error, MemoryError):
                raise
            _log.exception("a text job failed")
            if isinstance(job, CheckGrammar):
                result = Rejected(seconds=0.0, message=f"the {job.kind} could not be compiled: make it simpler")
            else:
                result = Failed(seconds=0.0, message=f"{type(error).__name__} in a text worker")
        result.seconds = time.process_time() - began
        return result

    def _run(self, job: jobs.Job) -> jobs.Result:
        match job:
            case Render():
                assert self._template is not None
                arguments = (job.messages, job.tools, job.add_generation_prompt)
                return jobs.Rendered(seconds=0.0, text=self._template.render(*arguments, **job.variables))
            case Encode():
                special = job.special and not job.chat
                ids = [self._tokenizer.encode(text, special, parse_special=job.chat) for text in job.texts]
                return Encoded(seconds=0.0, token_ids=ids)
            case CheckGrammar():
                self._check(job)
                return Accepted(seconds=0.0)

    def _check(self, job: CheckGrammar) -> None:
        if self._vocabulary is None:
            self._vocabulary = self._build_vocabulary()
        from tokenmill.grammar.check import check_grammar
        from tokenmill.types import StructuredSpec

        check_grammar(StructuredSpec(job.kind, job.text, job.choices), self._vocabulary)

    def _build_vocabulary(self) -> LLTokenizer:
        from tokenmill.grammar.vocabulary import build_vocabulary

        # Which token ends a text makes no difference to a check.
        return build_vocabulary(self._tokenizer, self._tokenizer.eos_ids or (self._tokenizer.vocab_size - 1,))


def main() -> None:
    lower_session_priority()  # it leads a session of its own
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints must not mix with answers
    first = jobs.read_frame(requests)
    if first is None:
        return
    setup = jobs.decode_setup(first)
    configure(setup.log_level)
    _limit_memory(setup.memory_bytes, _mapped_bytes(Path(setup.path)))
    background = _background_thread()
    try:
        worker = background.submit(TextWorker, setup).result()
    except Exception as error:
        answers.write(jobs.framed(Ready(str(error) or repr(error))))
        return
    gc.collect()
    _limit_memory(setup.memory_bytes)
    answers.write(jobs.framed(Ready()))
    while (frame := jobs.read_frame(requests)) is not None:
        job = jobs.decode_job(frame)
        _limit_seconds(jobs.MAX_SECONDS[type(job)])
        heavy = jobs.is_heavy(job, len(frame))
        result = background.submit(worker.run, job).result() if heavy else worker.run(job)
        answers.write(jobs.framed(result))


def _background_thread() -> ThreadPoolExecutor:
    threading.stack_size(_STACK_BYTES)
    executor = ThreadPoolExecutor(1, "heavy", initializer=lower_thread_priority)
    executor.submit(int).result()
    threading.stack_size(0)
    return executor


def _limit_memory(num_bytes: int, mapped: int = 0) -> None:
    """Of private memory; `mapped`: of a file that is mapped for copying on write, which the kernel counts as such."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if num_bytes:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (num_bytes + mapped, hard if mapped else num_bytes))


def _mapped_bytes(path: Path) -> int:
    """Of a checkpoint that is mapped while its tokenizer is read."""
    return path.stat().st_size if path.is_file() else 0


def _limit_seconds(seconds: float) -> None:
    """The kernel ends a job that exceeds its time even when the server, which measures finer, is gone."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(time.process_time() + 2 * seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        main()
