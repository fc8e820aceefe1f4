"""`tokenmill route`: the router in front of several servers. Flags and variables fill a record; the rest is route/."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tokenmill.cli.options import AsJson, given_options
from tokenmill.cli.output import print_json
from tokenmill.log import configure
from tokenmill.route.config import RouteConfig


@given_options({"Router": RouteConfig}, {})
def route(
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Log warnings and errors only.")] = False,
    *,
    given: dict[str, Any],
) -> None:
    """Send requests to the replica that has most of the prompt cached and least to do; keep streams alive."""
    config = RouteConfig.from_options(given)
    configure("warning" if quiet else "info")
    from tokenmill.route.process import run_router

    run_router(config, print_json if as_json else None)
