"""The server's options: one frozen record next to EngineConfig, turned into flags and config-file keys the same way.

Limits that protect the server have finite defaults. Knows nothing of HTTP; read by the parts it configures.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.config import (
    BY_DEFAULT,
    BY_USER,
    EngineConfig,
    automatic,
    by_option_name,
    check,
    from_environment,
    option,
    option_fields,
    parse_count,
    parse_size,
)
from tokenmill.errors import UserError
from tokenmill.serve.keep_alive import parse_keep_alive
from tokenmill.serve.role_options import PREFILL_KEY, RoleOptions

FILES_PATH = "/v1/files"
_FORM_BYTES = 1 << 16  # of an upload, beside the file
CATALOG_PRICE = "catalog"
KEY_VARIABLE = "TOKENMILL_API_KEY"
SECRET_OPTIONS = ("api_key", PREFILL_KEY)  # never shown
SSL_PASSWORD_VARIABLE = "TOKENMILL_SSL_KEYFILE_PASSWORD"


@dataclass(frozen=True, slots=True)
class ServeConfig(RoleOptions):
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all interfaces.", metavar="ADDRESS")
    port: int = option(8000, "Port to listen on; 0 picks a free one.", metavar="PORT", low=0, high=65535)
    served_model_name: tuple[str, ...] = option(
        (), "Model name in the API. Repeatable; responses carry the first.", metavar="NAME"
    )
    api_key: tuple[str, ...] = option(
        (), f"API key that clients must send. Repeatable; also {KEY_VARIABLE} or --api-keys-file.", metavar="KEY"
    )
    api_keys_file: str = option(
        "",
        "YAML, JSON or TOML file of API keys and their limits, reloaded when it changes. An entry has `key`, or "
        "`key_sha256` as `echo -n KEY | sha256sum` prints it.",
        metavar="FILE",
    )
    cors_origin: tuple[str, ...] = option(
        (), "Web origin that may call the API. Repeatable; none by default.", metavar="ORIGIN"
    )
    allowed_host: tuple[str, ...] = option(
        (),
        "Host name that requests may be addressed to, or *.NAME. Repeatable; by default any with API keys or another "
        "--host, loopback names only without.",
        metavar="NAME",
    )
    uds: str = option("", "Unix socket to listen on, instead of --host and --port.", metavar="PATH")
    uds_permissions: str = option("600", "Permissions of the Unix socket, as three octal digits.", metavar="MODE")
    root_path: str = option("", "Path under which a proxy publishes the API, such as /llm.", metavar="PATH")
    ssl_certfile: str = option("", "TLS certificate with its chain, in PEM; the server then speaks HTTPS only.")
    ssl_keyfile: str = option(
        "",
        f"TLS private key, in PEM, if it is not in --ssl-certfile. {SSL_PASSWORD_VARIABLE} has its password.",
        metavar="FILE",
    )
    ssl_ca_certs: str = option("", "Certificates of the authorities that clients' certificates must come from, in PEM.")
    ssl_cert_reqs: int = option(
        0, "Client certificates: 0 ignored, 1 checked if sent, 2 required.", metavar="N", low=0, high=2
    )
    tls_handshake_timeout: float = option(
        10.0, "Time that a TLS handshake may take.", metavar="SECONDS", low=0.1, high=600
    )
    max_connections: int = option(4096, "Maximum number of open connections.", metavar="CONNECTIONS", low=1)
    max_connections_per_address: int = option(
        1024, "Maximum number of open connections of one remote address.", metavar="CONNECTIONS", low=1
    )
    max_url_bytes: int = option(8 << 10, "Maximum size of a request target.", metavar="SIZE", parse=parse_size, low=1)
    max_header_bytes: int = option(
        32 << 10, "Maximum size of a request line with all headers.", metavar="SIZE", parse=parse_size, low=256
    )
    max_header_count: int = option(128, "Maximum number of request headers.", metavar="HEADERS", low=1)
    header_timeout: float = option(
        10.0,
        "Time that a client may take to send a request line and headers; 0 for no limit.",
        metavar="SECONDS",
        low=0,
    )
    body_timeout: float = option(
        300.0, "Time that a client may take to send a body; 0 for no limit.", metavar="SECONDS", low=0
    )
    min_body_rate: int = option(
        512, "Slowest body in bytes per second, after 10 seconds; 0 for no limit.", metavar="BYTES", low=0
    )
    keep_alive_timeout: float = option(
        5.0, "Time after which an idle connection is closed; 0 for no limit.", metavar="SECONDS", low=0
    )
    write_timeout: float = option(
        30.0, "Time after which a client that reads nothing is cut off; 0 for no limit.", metavar="SECONDS", low=0
    )
    sse_ping: float = option(
        10.0,
        "Interval of keep-alive comments in a stream before its first token; 0 for none.",
        metavar="SECONDS",
        low=0,
    )
    wrong_key_limit: int = option(
        20, "Wrong API keys per minute and remote address before they are answered slowly; 0 for no limit.", low=0
    )
    refusal_limit: int = option(
        10,
        "Refused requests (4xx) per second and API key before their answers are delayed; 0 for no limit, which is also "
        "what a server without keys has.",
        low=0,
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
        0,
        "Maximum size of a request body, such as 8MiB; 0: 1 MiB and 32 bytes per token of the context, at most 8 MiB.",
        metavar="SIZE",
        parse=parse_size,
        low=0,
    )
    max_prompt_chars: int = option(
        2 << 20, "Maximum prompt length, checked before tokenization.", metavar="CHARACTERS", low=1
    )
    max_n: int = option(16, "Maximum number of completions per prompt.", metavar="N", low=1)
    max_prompts: int = option(64, "Maximum number of prompts in one completions request.", metavar="N", low=1)
    max_logprobs: int = option(20, "Maximum number of log-probabilities per token.", metavar="N", low=0)
    max_logprob_entries: int = option(
        1 << 18, "Maximum number of prompt log-probabilities in one answer.", metavar="N", parse=parse_count, low=0
    )
    tool_call_parser: str = option(
        "auto",
        "Format of the model's tool calls: auto (from the chat template), hermes, mistral, llama3_json, pythonic, ...; "
        "docs/serving.md lists them.",
        metavar="NAME",
    )
    tool_parser_plugin: str = option(
        "", "Python file or module that registers tool-call parsers of your own.", metavar="FILE"
    )
    reasoning_parser: str = option(
        "auto",
        "Format of the model's reasoning: auto (from the chat template), deepseek_r1, qwen3, gpt_oss, granite, mistral "
        "or none, which leaves it in the text.",
        metavar="NAME",
    )
    reasoning_parser_plugin: str = option(
        "", "Python file or module that registers reasoning parsers of your own.", metavar="FILE"
    )
    chat_template: str = option(
        "", "Jinja file of a chat template to use instead of the model's own, or the template itself.", metavar="FILE"
    )
    generation_config: str = option(
        "auto",
        "Where sampling defaults come from: auto (the model's generation_config.json), vllm (neutral values) or a "
        "directory with such a file.",
        metavar="auto|vllm|DIR",
    )
    override_generation_config: str = option(
        "", 'Sampling defaults that win over that file, such as {"temperature": 0.5}.', metavar="JSON"
    )
    max_stored_responses: int = option(
        256, "Responses kept per API key for previous_response_id; 0 keeps none.", metavar="RESPONSES", low=0
    )
    max_stored_response_bytes: int = option(
        16 << 20, "Maximum size of these per API key, such as 16MiB.", metavar="SIZE", parse=parse_size, low=0
    )
    background_responses: bool = option(
        False, "Allow requests to /v1/responses with `background`, which run on when their client has left."
    )
    text_workers: int = option(
        3, "Number of processes that render templates, tokenize long texts and check grammars.", metavar="N", low=1
    )
    text_worker_memory: int = option(
        2 << 30, "Memory that one of them may use, such as 2GiB.", metavar="SIZE", parse=parse_size, low=1 << 27
    )
    stall_timeout: float = option(
        30.0, "Time after which a silent engine or an endless step counts as stuck.", metavar="SECONDS", low=0
    )
    shutdown_timeout: float = option(
        30.0, "Time that running requests get to finish after SIGTERM.", metavar="SECONDS", low=0
    )
    read_ahead: bool = option(
        False, "Read the weights into the page cache while the engine process starts. Needs memory for all of them."
    )
    spare_engine: bool = option(
        True, "Keep a process with the engine's libraries loaded (about 160 MB), to replace a failed engine quickly."
    )
    traffic_log: str = option(
        "",
        "Directory to record requests in: arrivals, lengths, hashes of prefixes and latencies, never text. For "
        "optimize, simulate and bench serve (docs/traffic_log.md).",
        metavar="DIR",
    )
    traffic_log_size: int = option(
        256 << 20,
        "Maximum size of --traffic-log, such as 256MiB; the oldest requests are deleted.",
        metavar="SIZE",
        parse=parse_size,
        low=1 << 20,
    )
    files_dir: str = option(
        "",
        "Folder for /v1/files and /v1/batches: what clients upload and what batches answer. Off without it.",
        metavar="DIR",
    )
    max_files_size: int = option(
        1 << 30,
        "Maximum size of all files in --files-dir, such as 1GiB; each API key may fill an equal part of it.",
        metavar="SIZE",
        parse=parse_size,
        low=1 << 16,
    )
    batch_concurrency: int = option(
        0,
        "Requests of batches in flight at most, where the engine has idle slots; 0 for as many as it has slots.",
        metavar="REQUESTS",
        low=0,
    )
    price: str = option(
        "",
        f"Dollars per hour of this device, or `{CATALOG_PRICE}` for what the catalog says: answers then have a "
        "usage.cost, and keys may have budgets.",
        metavar="DOLLARS",
    )
    input_token_price: float = option(
        0.0, "Dollars per million prompt tokens: answers cost by tokens, not by device time.", metavar="DOLLARS", low=0
    )
    cached_token_price: float | None = automatic(
        float, "Dollars per million prompt tokens that were cached; default: as the others.", metavar="DOLLARS", low=0
    )
    output_token_price: float = option(0.0, "Dollars per million generated tokens.", metavar="DOLLARS", low=0)
    usage_file: str = option(
        "",
        "File that keeps what each API key has used and spent, so that budgets outlast a restart. Without it they "
        "begin anew with each start.",
        metavar="FILE",
    )
    max_metric_keys: int = option(
        100, "API keys with numbers of their own on /metrics; the others are added up as `other`.", low=0, high=10_000
    )
    lora_dir: tuple[str, ...] = option(
        (),
        "Directory that adapters may be loaded from while serving (POST /v1/load_lora_adapter); repeatable. Without it "
        "none can be.",
        metavar="DIR",
    )
    max_metric_loras: int = option(
        100, "Adapters with numbers of their own on /metrics; the others are added up as `other`.", low=0, high=10_000
    )
    memory_limit: int = option(
        0,
        "Memory that all models and the server may take together, such as 2GiB; on a GPU that of the models there. "
        "Models that do not fit beside others are loaded when they are asked for. 0: what is free, for several models.",
        metavar="SIZE",
        parse=parse_size,
        low=0,
    )
    keep_alive: str = option(
        "-1",
        "How long a model stays loaded after its last request, such as 5m; 0 for no longer, -1 until its memory is "
        "needed. Ollama's keep_alive in a request wins.",
        metavar="TIME",
    )
    load_timeout: float = option(
        300.0, "Time that a request waits at most for its model to be loaded.", metavar="SECONDS", low=1
    )
    max_recent_requests: int = option(
        32,
        "Requests per API key whose times and prompt tokens are kept in memory, for GET /v1/requests; 0 keeps none.",
        metavar="REQUESTS",
        low=0,
        high=10_000,
    )
    access_log: bool = option(True, "Log one JSON line per request to stderr, never with prompt text.")

    def __post_init__(self) -> None:
        for name in ("price", "keep_alive"):
            if type(getattr(self, name)) in (int, float):  # as a file has it
                object.__setattr__(self, name, str(getattr(self, name)))
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
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise UserError(f"root_path is '{self.root_path}'", "write it like /llm, with a slash only in front")
        if self.price and self.price != CATALOG_PRICE and not _is_amount(self.price):
            raise UserError(f"price is '{self.price}'", f"give dollars per hour, or {CATALOG_PRICE}")
        try:
            parse_keep_alive(self.keep_alive)
        except ValueError as error:
            raise UserError(*str(error).split(": ", 1)) from None
        if self.price and self.bills_tokens:
            raise UserError("there are prices of both the device and tokens", "keep --price or the token prices")

    def for_context(self, context: int) -> ServeConfig:
        """With the limits that follow from the context of the model, where none is set."""
        return replace(self, max_body_bytes=self.max_body_bytes or min((1 << 20) + 32 * context, 8 << 20))

    def body_limit(self, path: str) -> int:
        """Bytes of the body of a request to `path`: an upload may be as large as all files."""
        is_upload = bool(self.files_dir) and path.endswith(FILES_PATH)
        return self.max_files_size + _FORM_BYTES if is_upload else self.max_body_bytes

    @property
    def bills_tokens(self) -> bool:
        return max(self.input_token_price, self.cached_token_price or 0.0, self.output_token_price) > 0

    @property
    def bills(self) -> bool:
        """Whether work has a price."""
        return bool(self.price) or self.bills_tokens

    def all_keys(self) -> tuple[str, ...]:
        """Keys from flags and from the environment."""
        variable = os.environ.get(KEY_VARIABLE, "")
        return (*self.api_key, *(key for key in variable.split(",") if key))


def _is_amount(text: str) -> bool:
    try:
        return 0 <= float(text) < float("inf")
    except ValueError:
        return False


# `auto` looks drafts up only at batch sizes at which it measures that they pay.
SERVE_ENGINE_DEFAULTS = {"scheduling": "fair", "speculate": "auto"}


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
