"""The server's options: one frozen record next to EngineConfig, turned into flags and config-file keys the same way.

Limits that protect the server have finite defaults. Knows nothing of HTTP; read by the parts it configures.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.config import (
    BY_DEFAULT,
    BY_USER,
    EngineConfig,
    by_option_name,
    check,
    from_environment,
    option,
    option_fields,
    parse_count,
    parse_size,
)
from tokenmill.errors import UserError

KEY_VARIABLE = "TOKENMILL_API_KEY"


@dataclass(frozen=True, slots=True)
class ServeConfig:
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all interfaces.", metavar="ADDRESS")
    port: int = option(8000, "Port to listen on; 0 picks a free one.", metavar="PORT", low=0, high=65535)
    served_model_name: tuple[str, ...] = option(
        (), "Model name in the API. Repeatable; responses carry the first.", metavar="NAME"
    )
    api_key: tuple[str, ...] = option(
        (), f"API key that clients must send. Repeatable; also {KEY_VARIABLE} or --api-keys-file.", metavar="KEY"
    )
    api_keys_file: str = option(
        "", "YAML or JSON file of API keys with names, weights, quotas and priorities.", metavar="FILE"
    )
    cors_origin: tuple[str, ...] = option(
        (), "Web origin that may call the API. Repeatable; none by default.", metavar="ORIGIN"
    )
    max_queued_requests: int = option(
        256, "Maximum number of waiting requests; beyond it the answer is 429.", metavar="REQUESTS", low=0
    )
    max_queued_tokens: int = option(
        1 << 20,
        "Maximum number of waiting prompt tokens; beyond it the answer is 429.",
        metavar="TOKENS",
        parse=parse_count,
        low=1,
    )
    max_body_bytes: int = option(
        8 << 20, "Maximum size of a request body, such as 8MiB.", metavar="SIZE", parse=parse_size, low=1
    )
    max_prompt_chars: int = option(
        2 << 20, "Maximum prompt length, checked before tokenization.", metavar="CHARACTERS", low=1
    )
    max_n: int = option(16, "Maximum number of completions per prompt.", metavar="N", low=1)
    max_prompts: int = option(64, "Maximum number of prompts in one completions request.", metavar="N", low=1)
    max_logprobs: int = option(20, "Maximum number of log-probabilities per token.", metavar="N", low=0)
    tool_call_parser: str = option(
        "auto", "Format of the model's tool calls: hermes, llama3_json, pythonic or auto.", metavar="NAME"
    )
    text_workers: int = option(
        2, "Number of processes that render templates, tokenize long texts and check grammars.", metavar="N", low=1
    )
    text_worker_memory: int = option(
        2 << 30, "Memory that one of them may use, such as 2GiB.", metavar="SIZE", parse=parse_size, low=1 << 27
    )
    stall_timeout: float = option(
        30.0, "Time after which a running step or a silent engine counts as stuck.", metavar="SECONDS", low=0
    )
    shutdown_timeout: float = option(
        30.0, "Time that running requests get to finish after SIGTERM.", metavar="SECONDS", low=0
    )
    access_log: bool = option(True, "Log one JSON line per request to stderr, never with prompt text.")

    def __post_init__(self) -> None:
        for spec in option_fields(type(self)):
            value = getattr(self, spec.name)
            if spec.metadata["kind"] is tuple:
                value = (value,) if isinstance(value, str) else tuple(value)
                object.__setattr__(self, spec.name, value)
                if not all(isinstance(each, str) and each for each in value):
                    raise UserError(f"{spec.name} must be non-empty strings, got {value!r}", "correct it")
                continue
            if spec.metadata["kind"] is float and type(value) is int:
                value = float(value)
                object.__setattr__(self, spec.name, value)
            check(spec, value)

    def all_keys(self) -> tuple[str, ...]:
        """Keys from flags and from the environment."""
        variable = os.environ.get(KEY_VARIABLE, "")
        return (*self.api_key, *(key for key in variable.split(",") if key))


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


def split_options(
    options: Mapping[str, Any], in_file: Mapping[str, Any] | None = None, file: str = ""
) -> tuple[ServeConfig, EngineConfig]:
    """Both records from flag values: flags win over the config file, which wins over the environment."""
    server, engine = option_fields(ServeConfig), option_fields(EngineConfig)
    typed = by_option_name(options, (*server, *engine))
    written = by_option_name(in_file or {}, (*server, *engine))
    plain = [spec for spec in server if spec.metadata["kind"] is not tuple]  # api_key's variable is a list: all_keys
    from_variables = {name: value for name, (value, _source) in from_environment(plain, os.environ).items()}
    chosen = from_variables | written | typed
    sources = dict.fromkeys(written, f"from file {file}") | dict.fromkeys(typed, BY_USER)
    engine_names = {spec.name for spec in engine}
    engine_options = {name: value for name, value in chosen.items() if name in engine_names}
    stated = set(engine_options) | set(from_environment(engine, os.environ))
    unset = {name: value for name, value in SERVE_ENGINE_DEFAULTS.items() if name not in stated}
    config = EngineConfig.from_options(unset | engine_options, dict.fromkeys(unset, BY_DEFAULT) | sources)
    return ServeConfig(**{name: value for name, value in chosen.items() if name not in engine_names}), config
