"""What text work costs the key that asked for it."""

from __future__ import annotations

from tokenmill.serve.keys import Client


def charge_text_work(client: Client, seconds: float) -> None:
    """Called once for every job that ran, with its processor time, whether or not its caller still waits."""
