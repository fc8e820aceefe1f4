"""What the operator states in place of the checkpoint: a chat template, and defaults for sampling.

`--chat-template`, `--generation-config` and `--override-generation-config`, as vLLM has them. Read once, before the
engine starts; every refusal is a UserError. Knows no HTTP; called by the server, the service holds the defaults.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenmill.errors import UserError, unknown_name
from tokenmill.types import SamplingParams

AUTOMATIC, NEUTRAL = "auto", "vllm"
_FILE = "generation_config.json"
_LIMIT = "max_new_tokens"  # the file's name for max_tokens
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", _LIMIT)
_REMEDY = "correct it, or serve with --generation-config vllm"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """For what a request leaves open."""

    values: Mapping[str, Any] = field(default_factory=dict)  # of SamplingParams
    max_tokens: int | None = None  # of chat; a request may ask for more
    source: str = "neutral"

    def __str__(self) -> str:
        limit = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        shown = ", ".join(f"{name} {value}" for name, value in (*self.values.items(), *limit.items()))
        return f"{shown} ({self.source})" if shown else self.source


def read_sampling_defaults(path: Path, where: str = AUTOMATIC, override: str = "") -> SamplingDefaults:
    """From the generation_config.json of the model at `path`, or of the directory `where`; `override` is a JSON object
    whose values win over the file's."""
    file = _generation_file(path, where)
    stored = {name: value for name, value in _read(file).items() if name in _NAMES} if file is not None else {}
    stated = _object(override, "--override-generation-config")
    for name in stated:
        if name not in _NAMES:
            raise unknown_name("field of --override-generation-config", name, _NAMES)
    values = {name: value for name, value in (stored | stated).items() if value is not None}
    sources = [*([str(file.name)] if stored and file is not None else []), *(["as stated"] if stated else [])]
    source = " and ".join(sources) or "neutral"
    max_tokens = values.pop(_LIMIT, None)
    try:
        SamplingParams(**values, **({} if max_tokens is None else {"max_tokens": max_tokens}))
    except UserError as error:
        raise UserError(f"sampling defaults ({source}): {error.problem}", _REMEDY) from None
    return SamplingDefaults(values, max_tokens, source)


def read_template(text: str) -> str:
    """The source of a chat template: from a file, or `text` itself if it is one."""
    if not text:
        return ""
    source = text
    if not any(mark in text for mark in ("{{", "{%", "\n")):
        try:
            source = Path(text).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise UserError(f"cannot read the chat template {text}: {reason}", "give a Jinja file") from None
    _check_template(source)
    return source


def _check_template(source: str) -> None:
    from jinja2.exceptions import TemplateSyntaxError

    from tokenmill.checkpoint.template_sandbox import TemplateEnvironment

    try:
        TemplateEnvironment().parse(source)
    except (TemplateSyntaxError, RecursionError) as error:
        raise UserError(f"the chat template is broken ({error})", "correct --chat-template") from None
    if not source.strip():
        raise UserError("the chat template is empty", "correct --chat-template, or leave it out")


def _generation_file(path: Path, where: str) -> Path | None:
    if where == NEUTRAL:
        return None
    if where == AUTOMATIC:
        file = path / _FILE
        return file if file.is_file() else None  # a GGUF file has none
    stated = Path(where).expanduser()
    file = stated if stated.is_file() else stated / _FILE
    if not file.is_file():
        raise UserError(f"{where} has no {_FILE}", "give auto, vllm, or a directory that has one")
    return file


def _read(file: Path) -> dict[str, Any]:
    try:
        return _object(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}", _REMEDY) from None


def _object(text: str, label: str) -> dict[str, Any]:
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{label} is not a JSON object", "correct it")
    return value
