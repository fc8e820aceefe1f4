"""Every command of the README is executed here as it stands, or in a shorter form that the table below declares."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.serving import RunningServer

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
AS_IT_STANDS = "as it stands"
# Command -> (how it is executed here, why not as it stands)
COMMANDS = {
    "pip install '.[serve]'": ("make -n", "compiles for minutes: `make` runs the same installation first, see below"),
    "make demo": ("make -n", "runs for minutes: the recipe is expanded, and its verbs have tests of their own"),
    "make test": ("make -n", "runs this very suite: the recipe is expanded"),
    'tokenmill run smollm2 "Why is the sky blue?"': (
        "--max-tokens 8",
        "the whole answer takes longer, not another way",
    ),
    "tokenmill serve smollm2 --port 8000": ("serve", "runs until it is stopped, and port 8000 may be taken"),
    "tokenmill plan llama-3.1-70b --gpu h100x2 --concurrency 32": (AS_IT_STANDS, ""),
}


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def readme_commands() -> list[str]:
    lines = [line for block in code_blocks("bash") for line in block.splitlines()]
    return [re.sub(r"\s+# .*", "", line).strip() for line in lines if line.strip()]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT)


def test_every_command_has_a_way_to_be_executed() -> None:
    assert set(readme_commands()) == set(COMMANDS)
    assert all(form == AS_IT_STANDS or reason for form, reason in COMMANDS.values())


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("command", [each for each, (form, _) in COMMANDS.items() if form == "make -n"])
def test_make_would_run_it(command: str) -> None:
    """`make -n` expands the recipe; a missing target or prerequisite is an error. -B: as if nothing was set up yet."""
    target = command.removeprefix("make ") if command.startswith("make ") else "demo"
    done = run("make", "-n", "-B", target)
    assert done.returncode == 0, done.stderr
    assert "pip install" in done.stdout
    expected = {"make demo": "tokenmill run smollm2", "make test": "pytest", "pip install '.[serve]'": "pip install"}
    assert expected[command] in done.stdout


def test_run_answers(model_path: Callable[[str], Path]) -> None:
    model_path("smollm2")
    command = 'tokenmill run smollm2 "Why is the sky blue?"'
    form, _ = COMMANDS[command]
    done = run(sys.executable, "-m", *shlex.split(command), *form.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_serve_takes_requests(model_path: Callable[[str], Path]) -> None:
    server = RunningServer(model_path("smollm2"))  # on a free port instead of 8000
    try:
        assert server.http.get("/health").status_code == 200
        assert "<html" in server.http.get("/").text.lower()
        question = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        answer = server.http.post("/v1/chat/completions", json=question).json()
        assert answer["choices"][0]["message"]["content"]
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize("command", [each for each, (form, _) in COMMANDS.items() if form == AS_IT_STANDS])
def test_command_runs_as_it_stands(command: str) -> None:
    done = run(sys.executable, "-m", *shlex.split(command))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("number", range(len(code_blocks("python"))))
def test_python_block_runs(number: int, model_path: Callable[[str], Path]) -> None:
    model_path("smollm2")
    done = run(sys.executable, "-c", code_blocks("python")[number])
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_the_table_of_numbers_names_programs_that_exist() -> None:
    rows = README[README.index("| Measured |") :].split("\n\n")[0].splitlines()[2:]
    assert len(rows) == 5
    for row in rows:
        program = re.search(r"`python (benchmarks/\w+\.py)[^`]*` \|$", row)
        assert program is not None
        assert (ROOT / program[1]).is_file()


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", README):
        assert (ROOT / target).exists(), target
