"""`tokenmill serve`: the OpenAI-compatible server. Flags, file and environment fill two records; the rest is serve/."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tokenmill.cli.options import DEFAULT_MODEL, AsJson, given_options
from tokenmill.cli.output import print_json
from tokenmill.config import EngineConfig
from tokenmill.log import configure
from tokenmill.serve.config import SERVE_ENGINE_DEFAULTS, ServeConfig, read_config_file
from tokenmill.serve.fleet.catalog import read_catalog


@given_options({"Server": ServeConfig, "Engine": EngineConfig}, SERVE_ENGINE_DEFAULTS)
def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help=f"Aliases, Hugging Face ids, directories or .gguf files. Default: {DEFAULT_MODEL}.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="YAML file with flag names as keys, and `models`; flags take precedence."),
    ] = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Log warnings and errors only.")] = False,
    *,
    given: dict[str, Any],
) -> None:
    """Serve models over HTTP: OpenAI, Ollama and Anthropic APIs, health and metrics. Stop with Ctrl-C or SIGTERM."""
    in_file = read_config_file(config) if config else {}
    named = models or ([] if "models" in in_file else [DEFAULT_MODEL])
    catalog = read_catalog(named, given, in_file, config or "")
    configure("warning" if quiet else "info")
    from tokenmill.route.engine_group import EngineGroup
    from tokenmill.serve.server import run_server

    run_server(catalog, print_json if as_json else None, EngineGroup)
