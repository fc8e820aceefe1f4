"""`tokenmill ps` and `tokenmill stop`: the models of a running server, as Ollama's users expect them."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer

from tokenmill.cli.options import AsJson, Verbose
from tokenmill.cli.output import emit
from tokenmill.cli.screens.models import ps_screen, stopped_screen
from tokenmill.errors import UserError

_DEFAULT_URL = "http://127.0.0.1:8000"
_KEY_VARIABLE = "TOKENMILL_API_KEY"
_SECONDS = 330.0  # a model is stopped when its requests have ended

Url = Annotated[str, typer.Option("--url", metavar="URL", help="Address of the server.", envvar="TOKENMILL_URL")]
Key = Annotated[str, typer.Option("--api-key", metavar="KEY", help=f"Its API key; also {_KEY_VARIABLE}.")]


def ps(url: Url = _DEFAULT_URL, api_key: Key = "", as_json: AsJson = False, _verbose: Verbose = False) -> None:
    """Show the models of a server: which are loaded, asleep or not loaded, and how long they stay."""
    loaded = {each["name"]: each for each in _ask(url, api_key, "/api/ps")["models"]}
    rows = []
    for model in _ask(url, api_key, "/v1/models")["data"]:
        if model["id"] == model["root"]:
            running = loaded.get(model["id"], {})
            rows.append(
                {
                    "name": model["id"],
                    "state": model["tokenmill"].get("state", "loaded"),
                    "bytes": running.get("size", 0),
                    "context": model["max_model_len"],
                    "expires_at": running.get("expires_at"),
                }
            )
    emit({"url": url, "models": rows}, as_json, lambda: ps_screen({"url": url, "models": rows}))


def stop(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name of a model of the server.")],
    url: Url = _DEFAULT_URL,
    api_key: Key = "",
    as_json: AsJson = False,
    _verbose: Verbose = False,
) -> None:
    """Unload a model of a server once its requests have ended; the next request loads it again."""
    _ask(url, api_key, "/api/generate", {"model": model, "keep_alive": 0})
    emit({"stopped": model}, as_json, lambda: stopped_screen({"stopped": model}))


def _ask(url: str, key: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise UserError(f"'{url}' is no address of a server", f"write it like {_DEFAULT_URL}")
    request = urllib.request.Request(url.rstrip("/") + path, headers={"content-type": "application/json"})
    request.data = None if body is None else json.dumps(body).encode()
    key = key or os.environ.get(_KEY_VARIABLE, "").partition(",")[0]
    if key:
        request.add_header("authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        raise UserError(f"{url} answered {error.code}: {_reason(error)}", "check the name, and --api-key") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(f"cannot ask {url}: {reason}", "start it with `tokenmill serve`, or give --url") from None


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        problem = json.load(error)["error"]
        return str(problem["message"] if isinstance(problem, dict) else problem)
    except (ValueError, KeyError, TypeError):
        return str(error.reason)
