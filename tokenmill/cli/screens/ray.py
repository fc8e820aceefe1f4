"""Screens of `tokenmill ray`."""

from __future__ import annotations

from tokenmill.cli.render.screen import Cell, Result, Screen, Table, left
from tokenmill.cli.render.units import counted


def applications_screen(result: Result) -> Screen:
    rows = [
        (name, Cell(app["status"], "good" if app["status"] == "RUNNING" else "warning"), each, _states(found))
        for name, app in result["applications"].items()
        for each, found in app["deployments"].items()
    ]
    columns = (left("application"), left("state"), left("deployment"), left("replicas"))
    notes = [Cell(app["message"], "warning") for app in result["applications"].values() if app["message"]]
    headline = counted(len(result["applications"]), "application")
    return Screen(headline, "plain", [Table("", columns, rows)] if rows else [], notes)


def deployed_screen(result: Result) -> Screen:
    until = "; Ctrl-C ends it" if result["own_cluster"] else ""
    return Screen(f"{result['name']} is ready on {result['url']}{until}", "good")


def deleted_screen(result: Result) -> Screen:
    return Screen(f"{result['deleted']} is gone", "good")


def _states(deployment: Result) -> str:
    return ", ".join(f"{number} {state.lower()}" for state, number in deployment["replicas"].items()) or "none"
