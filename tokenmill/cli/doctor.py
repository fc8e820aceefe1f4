"""`tokenmill doctor`: what this machine and this installation can do."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from tokenmill.cli.options import AsJson, Verbose
from tokenmill.cli.output import emit
from tokenmill.cli.screens.doctor import doctor_screen


def doctor(
    network: Annotated[bool, typer.Option("--network", help="Also try to reach the model sources.")] = False,
    as_json: AsJson = False,
    _verbose: Verbose = False,
) -> None:
    """Check versions, machine, kernels and cached models, and let the smallest cached model generate."""
    from tokenmill.engine.diagnosis import diagnose

    found = diagnose(network)
    result: dict[str, Any] = asdict(found)
    result["problems"] = list(found.problems)
    result["network"] = dict(found.network) if network else None
    emit(result, as_json, lambda: doctor_screen(result))
