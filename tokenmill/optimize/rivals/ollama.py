"""Ollama: a daemon of its own on a free port, with its own folder for models: the user's daemon is not touched."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tokenmill.deploy.render import find_engine
from tokenmill.errors import UserError
from tokenmill.optimize.rivals.base import LOCAL, Rival, RivalWorkload, is_gguf, serving_of
from tokenmill.optimize.rivals.process import RunningServer, free_port

_PREPARE_SECONDS = 600


class OllamaRival(Rival):
    name = "ollama"
    engine = "ollama"
    dialect = "ollama"

    def missing(self) -> str:
        return "" if shutil.which("ollama") else "install it from ollama.com"

    def version(self) -> str:
        said = subprocess.run(["ollama", "--version"], capture_output=True, text=True, timeout=20, check=False)
        return " ".join((said.stdout or said.stderr).split()) or "ollama"

    def serves(self, path: Path) -> str:
        return "" if is_gguf(path) else "Ollama is given GGUF files only"

    def start(self, path: Path, workload: RivalWorkload, log: Path | None = None) -> RunningServer:
        serving = serving_of(path.absolute(), workload)
        launch = find_engine(self.engine).launch(serving)
        port, folder = free_port(), Path(tempfile.mkdtemp(prefix="tokenmill-ollama-"))
        environment = dict(launch.environment)
        environment |= {"OLLAMA_HOST": f"{LOCAL}:{port}", "OLLAMA_MODELS": str(folder / "models")}

        def prepare() -> None:
            """The lines of `deploy` that hand the file to the daemon."""
            for line in launch.prepare:
                done = subprocess.run(
                    ["sh", "-c", line],
                    cwd=folder,
                    env={**os.environ, **environment},
                    capture_output=True,
                    text=True,
                    timeout=_PREPARE_SECONDS,
                    check=False,
                )
                if done.returncode:
                    raise UserError(f"`{line}` failed: {' '.join(done.stderr.split())[-200:]}", "see Ollama's log")

        return RunningServer(
            launch.command,
            f"http://{LOCAL}:{port}",
            model=serving.name,
            environment=environment,
            log=log,
            ready_seconds=workload.ready_seconds,
            prepare=prepare,
            on_stop=lambda: shutil.rmtree(folder, ignore_errors=True),
        )
