"""Records which modules of tokenmill run while a request is served, inside the process that serves it.

`install` is called by a sitecustomize.py that request_path.py puts before the traced program, so that the HTTP process
and the engine process both record themselves. Knows nothing about servers or engines: functions are written down while
the file `record` exists in the given folder, and whenever they run below the model's forward pass, because executors
record or capture that pass once, at start-up, and replay it for every request.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = "tokenmill"
_FORWARD_FOLDER = os.sep + os.path.join(PACKAGE, "model", "architectures") + os.sep
_FORWARD_NAMES = ("forward", "logits")
_POLL_SECONDS = 0.02


class Recorder:
    """A profile function (sys.setprofile) that collects module names and code objects."""

    def __init__(self) -> None:
        self.recording = False
        self._depth = threading.local()  # how many forward passes are on this thread's stack
        self._seen: dict[int, tuple[str, CodeType]] = {}  # by identity: equal code in two files is two functions

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event[0] == "c" and event != "call":  # C functions
            return
        code = frame.f_code
        inside = getattr(self._depth, "value", 0)
        if code.co_name in _FORWARD_NAMES and _FORWARD_FOLDER in code.co_filename:
            inside = self._depth.value = inside + (1 if event == "call" else -1)
        if (self.recording or inside) and id(code) not in self._seen:
            self._seen[id(code)] = _module(frame.f_globals), code

    def install(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)

    def modules(self) -> dict[str, int]:
        """Module -> number of its functions that ran; the bodies of modules (imports) do not count."""
        found: dict[str, int] = {}
        for name, code in list(self._seen.values()):
            if name.split(".")[0] == PACKAGE and code.co_name != "<module>":
                found[name] = found.get(name, 0) + 1
        return found


def _module(variables: dict[str, Any]) -> str:
    """By the globals, not by the file name: code that dataclasses generate has no file. By the specification, because a
    module that is run as a program (python -m) is called __main__."""
    specification = variables.get("__spec__")
    name: str = variables.get("__name__", "") if specification is None else specification.name
    return name


def install(folder: Path) -> None:
    """Record this process; its answer is `<pid>.json` in the folder once `record` was there and is gone again."""
    recorder = Recorder()

    def watch() -> None:
        sys.setprofile(None)
        (folder / f"{os.getpid()}.alive").touch()
        while True:
            wanted = (folder / "record").exists()
            if recorder.recording and not wanted:
                recorder.recording = False
                partial = folder / f"{os.getpid()}.partial"
                partial.write_text(json.dumps(recorder.modules()))
                partial.rename(folder / f"{os.getpid()}.json")
                return
            recorder.recording = wanted
            time.sleep(_POLL_SECONDS)

    threading.Thread(target=watch, daemon=True).start()
    recorder.install()
