"""`tokenmill serve`: the OpenAI-compatible server. Flags, file and environment fill two records; the rest is serve/."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tokenmill.cli.options import DEFAULT_MODEL, AsJson, Model, given_options
from tokenmill.cli.output import emit
from tokenmill.config import EngineConfig
from tokenmill.log import configure
from tokenmill.serve.config import SERVE_ENGINE_DEFAULTS, ServeConfig, read_config_file, split_options


@given_options({"Server": ServeConfig, "Engine": EngineConfig}, SERVE_ENGINE_DEFAULTS)
def serve(
    model: Model = DEFAULT_MODEL,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="YAML file with flag names as keys; flags take precedence.")
    ] = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Log warnings and errors only.")] = False,
    *,
    given: dict[str, Any],
) -> None:
    """Serve MODEL over HTTP: OpenAI, Ollama and Anthropic APIs, health and metrics. Stop with Ctrl-C or SIGTERM."""
    server, engine = split_options(given, read_config_file(config) if config else None, config or "")
    configure("warning" if quiet else "info")
    from tokenmill.serve.server import run_server

    run_server(model, server, engine, (lambda result: emit(result, as_json=True)) if as_json else None)
