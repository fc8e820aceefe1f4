"""The server's configuration: one frozen record beside EngineConfig, made into flags and config-file keys the same way.

Limits that protect the server have finite defaults. Knows nothing of HTTP; read by the parts it configures.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tokenmill.config import EngineConfig, option, parse_count, parse_size
from tokenmill.errors import UserError, unknown_name

KEY_VARIABLE = "TOKENMILL_API_KEY"


@dataclass(frozen=True, slots=True)
class ServeConfig:
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.", low=0)
    served_model_name: tuple[str, ...] = option((), "Name of the model in the API. Repeatable; the first is shown.")
    api_key: tuple[str, ...] = option((), f"A key that clients must bring. Repeatable; or {KEY_VARIABLE}, or a file.")
    api_keys_file: str = option("", "YAML or JSON of keys with names, weights, quotas and lanes.")
    cors_origin: tuple[str, ...] = option((), "A web origin that may call the API. Repeatable; none by default.")
    max_queued_requests: int = option(
        256,
        "Requests that may wait when all slots are taken; more get 429.",
        aliases=("max_num_queued_reqs",),
        low=0,
    )
    max_queued_tokens: int = option(
        1 << 20,
        "Prompt tokens that may wait; more get 429.",
        aliases=("max_num_queued_tokens",),
        parse=parse_count,
        low=1,
    )
    max_body_bytes: int = option(8 << 20, "Largest request body, such as 8MiB.", parse=parse_size, low=1)
    max_prompt_chars: int = option(2 << 20, "Longest prompt in characters, checked before it is tokenized.", low=1)
    max_n: int = option(16, "Most answers to one prompt.", low=1)
    max_prompts: int = option(64, "Most prompts in one completions request.", low=1)
    max_logprobs: int = option(20, "Most log-probabilities for one token.", low=0)
    tool_call_parser: str = option("auto", "How the model writes tool calls: hermes, llama3_json, pythonic or auto.")
    stall_timeout: float = option(
        30.0, "Seconds after which a step that does not end, or an engine that is silent, is stuck.", low=0
    )
    shutdown_timeout: float = option(30.0, "Seconds that requests in flight get to end after SIGTERM.", low=0)
    access_log: bool = option(True, "One JSON line on stderr for each request. Never holds prompt text.")

    def __post_init__(self) -> None:
        for spec in fields(self):
            value, low = getattr(self, spec.name), spec.metadata["low"]
            if isinstance(spec.default, tuple):
                value = (value,) if isinstance(value, str) else tuple(value)
                object.__setattr__(self, spec.name, value)
                if not all(isinstance(each, str) and each for each in value):
                    raise UserError(f"{spec.name} must be texts, got {value!r}", "correct it")
                continue
            if isinstance(spec.default, float) and isinstance(value, int) and not isinstance(value, bool):
                object.__setattr__(self, spec.name, float(value))
            elif type(value) is not type(spec.default):
                raise UserError(f"{spec.name} must be a {type(spec.default).__name__}, got {value!r}", "correct it")
            if low is not None and value < low:
                raise UserError(f"{spec.name} is {value}", f"give at least {low}")
        if self.port > 65535:
            raise UserError(f"port is {self.port}", "give 0 to 65535")

    def all_keys(self) -> tuple[str, ...]:
        """Keys from flags and from the environment."""
        found = os.environ.get(KEY_VARIABLE, "")
        return (*self.api_key, *(each for each in found.split(",") if each))


SERVE_ENGINE_DEFAULTS = {"scheduling": "fair"}


def read_config_file(path: str) -> dict[str, Any]:
    """A YAML (or JSON) mapping with flag names as keys."""
    import yaml  # type: ignore[import-untyped]

    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", "check the path") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}", "correct it") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"{path} is not a mapping of flag names to values", "write lines like `port: 8000`")
    return values


def split_options(*sources: Mapping[str, Any]) -> tuple[ServeConfig, EngineConfig]:
    """Both records from loose options, the first source wins. Aliases count as the option they mean."""
    names: dict[str, tuple[Any, Any]] = {}
    for kind in (ServeConfig, EngineConfig):
        for spec in fields(kind):
            for name in (spec.name, *spec.metadata["aliases"]):
                names[name] = (kind, spec)
    chosen: dict[str, Any] = {}
    for source in sources:
        own: dict[str, Any] = {}
        for key, value in source.items():
            name = key.replace("-", "_")
            if name not in names:
                raise unknown_name("option", key, names)
            spec = names[name][1]
            if spec.name in own:
                raise UserError(f"option '{key}' is given twice (it means {spec.name})", "keep one of them")
            own[spec.name] = value
        chosen = own | chosen
    engine = {name: value for name, value in chosen.items() if names[name][0] is EngineConfig}
    serve: dict[str, Any] = {}
    for name, value in chosen.items():
        record, spec = names[name]
        if record is ServeConfig:
            parse = spec.metadata["parse"]
            serve[name] = parse(value) if parse and isinstance(value, str) else value
    return ServeConfig(**serve), EngineConfig.from_options(SERVE_ENGINE_DEFAULTS | engine)
