"""`tokenmill ray deploy | status | delete`: the server as an application of a Ray cluster."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Annotated, Any

import typer

from tokenmill.cli.options import AsJson, Verbose
from tokenmill.cli.output import emit
from tokenmill.cli.screens.ray import applications_screen, deleted_screen, deployed_screen
from tokenmill.errors import UserError
from tokenmill.serve.config import read_config_file

app = typer.Typer(help="Serve on a Ray cluster: replicas scaled by queue and KV use, replaced without a lost request.")
_Address = Annotated[
    str, typer.Option(metavar="ADDRESS", help="Of the cluster; default: RAY_ADDRESS, or the one on this machine.")
]


@app.callback(invoke_without_command=True)
def group(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def deploy(
    config: Annotated[str, typer.Argument(metavar="FILE", help="YAML of `serve --config`, with a section `ray`.")],
    address: _Address = "",
    as_json: AsJson = False,
    _verbose: Verbose = False,
) -> None:
    """Deploy, or upgrade replica by replica what has this name. Without a cluster one is started here, until Ctrl-C."""
    from tokenmill.ray.settings import read_settings

    settings = read_settings(read_config_file(config), config)
    from tokenmill.ray import app as ray_app

    is_new = ray_app.connect(address)
    url = ray_app.deploy(settings)
    result = {"url": url, "name": settings.name, "own_cluster": is_new}
    emit(result, as_json, lambda: deployed_screen(result))
    sys.stdout.flush()
    if is_new:
        _wait()
        ray_app.end()


@app.command()
def status(address: _Address = "", as_json: AsJson = False, _verbose: Verbose = False) -> None:
    """Applications of the cluster, and their replicas."""
    ray_app = _joined(address)
    found: dict[str, Any] = ray_app.status()
    emit({"applications": found}, as_json, lambda: applications_screen({"applications": found}))


@app.command()
def delete(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the application: `name` of the section `ray`.")],
    address: _Address = "",
    as_json: AsJson = False,
    _verbose: Verbose = False,
) -> None:
    """End an application once its requests have ended."""
    _joined(address).delete(name)
    emit({"deleted": name}, as_json, lambda: deleted_screen({"deleted": name}))


def _joined(address: str) -> Any:
    from tokenmill.ray import app as ray_app

    if not ray_app.join(address):
        raise UserError("there is no Ray cluster here", "give --address, or start one with `ray start --head`")
    return ray_app


def _wait() -> None:
    told = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: told.set())
    told.wait()
