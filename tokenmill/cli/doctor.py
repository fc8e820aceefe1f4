"""`tokenmill doctor`: what this machine and this installation can do, or what is wrong with a running server."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from tokenmill.cli.options import AsJson, Verbose
from tokenmill.cli.output import emit
from tokenmill.cli.screens.doctor import doctor_screen
from tokenmill.cli.screens.symptoms import symptoms_screen
from tokenmill.errors import UserError


def doctor(
    network: Annotated[bool, typer.Option("--network", help="Also try to reach the model sources.")] = False,
    url: Annotated[
        str, typer.Option(metavar="URL", help="Examine the server there by its metrics: tokenmill, vLLM or llama.cpp.")
    ] = "",
    seconds: Annotated[
        float, typer.Option(help="With --url: time between two looks; 0 looks once, at all since its start.")
    ] = 5.0,
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", metavar="KEY", help="With --url: its API key.", show_envvar=True)
    ] = "",
    as_json: AsJson = False,
    _verbose: Verbose = False,
) -> None:
    """Check versions, machine, kernels and cached models, and let the smallest cached model generate."""
    if url:
        _examine(url, api_key, seconds, as_json)
        return
    from tokenmill.engine.diagnosis import diagnose

    found = diagnose(network)
    result: dict[str, Any] = asdict(found)
    result["problems"] = list(found.problems)
    result["network"] = dict(found.network) if network else None
    emit(result, as_json, lambda: doctor_screen(result))


def _examine(url: str, api_key: str, seconds: float, as_json: bool) -> None:
    from tokenmill.bench.symptoms.job import examine

    if not 0 <= seconds <= 3600:
        raise UserError(f"--seconds is {seconds:g}", "give 0 to 3600")
    result = examine(url, api_key, seconds)
    emit(result, as_json, lambda: symptoms_screen(result))
