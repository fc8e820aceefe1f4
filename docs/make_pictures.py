"""Makes the pictures of terminal screens in docs/images: runs the commands below and exports what they print as SVG.

    python docs/make_pictures.py

Needs an installed tokenmill and the model `smollm2` (downloaded where it is not cached). Numbers are of this machine.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from tokenmill.cli.render.draw import draw
from tokenmill.cli.render.screen import Result, Screen
from tokenmill.cli.screens.inspection import inspect_screen
from tokenmill.cli.screens.plan import plan_screen

_FOLDER = Path(__file__).parent / "images"
_WIDTH = 104
_PICTURES: dict[str, tuple[str, Callable[[Result], Screen]]] = {
    "plan": ("tokenmill plan llama-3.1-70b --gpu h100x2 --concurrency 32", plan_screen),
    "inspect": ("tokenmill inspect smollm2", inspect_screen),
}
_WEB_FONT = re.compile(r"@font-face\s*{[^}]*}\s*")  # a picture must not load anything


def main() -> None:
    _FOLDER.mkdir(exist_ok=True)
    for name, (command, screen) in _PICTURES.items():
        path = _FOLDER / f"{name}.svg"
        path.write_text(picture(name, command, screen(_result(command))), encoding="utf-8")
        print(path)


def _result(command: str) -> Result:
    words = [sys.executable, "-m", *shlex.split(command), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    result: Result = json.loads(done.stdout.replace(str(Path.home()), "~"))
    return result


def picture(name: str, command: str, screen: Screen) -> str:
    console = Console(
        file=io.StringIO(), record=True, width=_WIDTH, force_terminal=True, color_system="truecolor", highlight=False
    )
    console.print(draw(screen, rich=True), crop=False)
    svg = console.export_svg(title=command, unique_id=f"terminal-{name}")
    return "".join(f"{line.rstrip()}\n" for line in _WEB_FONT.sub("", svg).splitlines())


if __name__ == "__main__":
    main()
