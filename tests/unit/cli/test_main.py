"""The command itself: help, versions, exit codes, suggestions; nothing of it loads torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tokenmill import __version__
from tokenmill.cli import main as command
from tokenmill.cli.help import GROUPS
from tokenmill.errors import UserError

VERBS = [
    "pull",
    "list",
    "rm",
    "ps",
    "stop",
    "run",
    "chat",
    "inspect",
    "doctor",
    "bench latency",
    "bench throughput",
    "eval perplexity",
]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tokenmill {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["bench"], ["eval"]], ids=str)
def test_without_a_verb_help_is_printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments) == 0
    assert "Usage: tokenmill" in capsys.readouterr().out


def test_help_lists_every_verb_once_on_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    text = capsys.readouterr().out
    app = command.make_app()
    registered = [each.name for each in (*app.registered_commands, *app.registered_groups)]
    assert sorted(registered) == sorted(verb for verbs in GROUPS.values() for verb in verbs)
    lines = text.splitlines()
    for title, verbs in GROUPS.items():
        first = lines.index(title) + 1
        assert [line.split()[0] for line in lines[first : first + len(verbs)]] == list(verbs)
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in text


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_json(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*verb.split(), "--help"]) == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["rum"], "`tokenmill run`"),
        (["bench", "latncy"], "`tokenmill bench latency`"),
        (["run", "smollm2", "hi", "--max-token", "3"], "--max-tokens"),
        (["run", "smollm2", "hi", "--max-model-length", "3"], "--max-model-len"),
        (["bench", "throughput", "--concurency", "3"], "--concurrency"),
        (["doctor", "--jsn"], "--json"),
    ],
    ids=lambda each: each[-1] if isinstance(each, list) else None,
)
def test_a_misspelt_name_is_refused_with_the_nearest(
    arguments: list[str], suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    problem, remedy = err.splitlines()
    assert problem.startswith("error: ")
    assert remedy.startswith(f"try: {suggestion}, or see `tokenmill")


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["run", "smollm2", "hi", "--temperature", "-1"], "give 0 to 100"),
        (["run", "smollm2", "hi", "--max-tokens", "0"], "give 1 to"),
        (["run", "smollm2", ""], "give one, as in"),
        (["run", "smollm2", "hi", "--token-ids", "1,2"], "keep one"),
        (["run", "smollm2", "--token-ids", "1,x"], "write it like 1,2,3"),
        (["bench", "latency", "--batch-size", "0"], "give at least 1"),
        (["bench", "throughput", "--range-ratio", "2"], "give 0 to below 1"),
        (["eval", "perplexity"], "give a file"),
        (["eval", "perplexity", "--text", "/no/such/file"], "--text"),
        (["run", "smollm2", "hi", "--n", "x"], "--help"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else None,
)
def test_bad_values_are_refused_with_the_remedy(
    arguments: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    problem, advice = err.splitlines()
    assert problem.startswith("error: ")
    assert advice.startswith("try: ")
    assert remedy in advice


@pytest.mark.parametrize(
    ("failure", "code", "text"),
    [
        (UserError("no such thing", "another"), 2, "error: no such thing\ntry: another\n"),
        (KeyboardInterrupt(), 130, ""),
        (ZeroDivisionError("oops"), 1, "error: internal error, ZeroDivisionError: oops\ntry: the same command with"),
    ],
    ids=["user", "interrupt", "ours"],
)
def test_failures_become_exit_codes(
    failure: BaseException,
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr("tokenmill.checkpoint.sources.resolve", fail)
    assert command.main(["pull", "smollm2", "--json"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err
    assert "Traceback" not in err


def test_verbose_shows_the_traceback_of_our_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("tokenmill.checkpoint.sources.resolve", fail)
    assert command.main(["pull", "--verbose"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_help_loads_no_torch() -> None:
    program = (
        "import sys; from tokenmill.cli.main import main; code = main(['run', '--help']); "
        "sys.exit(code or 'torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
