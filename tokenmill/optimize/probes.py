"""What is asked of an engine besides the text: tasks, prompts to continue, passkeys; answers of a reference are kept.

A probe is asked once of a reference and once of each candidate; its answer is plain JSON. A reference's answers are
files beside its log-probabilities, named by model, probe and numerics, so that other processes and later runs find
them. Knows nothing of limits. Called by quality.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenmill.checkpoint.sources.cache import write_json
from tokenmill.config import EngineConfig
from tokenmill.engine.llm import LLM
from tokenmill.evaluate.identity import model_hash
from tokenmill.evaluate.reference import numerics
from tokenmill.evaluate.reference_cache import cache_folder
from tokenmill.evaluate.task_run import TaskFile
from tokenmill.optimize.generation import Answer, Answers, Prompts, write_answers
from tokenmill.optimize.long_context import Passkey, find_keys


@dataclass(frozen=True, slots=True)
class Probe:
    name: str
    digest: str  # of everything that is asked
    ask: Callable[[LLM], Any]


def task_probe(file: TaskFile, context: int) -> Probe:
    """`context`: of the engine; longer prompts lose their beginning."""
    content = [file.kind, asdict(file.options), file.items, context]
    return Probe(f"task {file.name}", _digest(content), lambda llm: file.accuracies(file.answer(llm)))


def generation_probe(prompts: Prompts) -> Probe:
    return Probe("answers", _digest(asdict(prompts)), lambda llm: asdict(write_answers(llm, prompts)))


def passkey_probe(length: int, items: Sequence[Passkey]) -> Probe:
    return Probe(f"passkeys {length}", _digest([asdict(item) for item in items]), lambda llm: find_keys(llm, items))


def read_answers(content: Mapping[str, Any]) -> Answers:
    return Answers(
        [Answer(**each) for each in content["continuations"]], [Answer(**each) for each in content["json_objects"]]
    )


class AnswerCache:
    """The answers of one model under one configuration."""

    def __init__(self, path: Path, config: EngineConfig) -> None:
        self._name = f"{model_hash(path)[:16]}-{{}}-{numerics(config)}.answers.json"

    def find(self, probe: Probe) -> Any | None:
        try:
            return json.loads(self._file(probe).read_text(encoding="utf-8"))["answer"]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def ask(self, probe: Probe, llm: LLM) -> Any:
        answer = probe.ask(llm)
        file = self._file(probe)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"probe": probe.name, "answer": answer})
        return answer

    def _file(self, probe: Probe) -> Path:
        return cache_folder() / self._name.format(probe.digest[:16])


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
