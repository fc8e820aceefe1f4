"""`tokenmill route`: wrong options are user errors, and nothing heavy is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tokenmill.cli.main import main
from tokenmill.errors import UserError
from tokenmill.route.config import RouteConfig

_URL = "http://10.0.0.5:8000"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no replica"),
        (["--replica", "10.0.0.5:8000"], "is not a URL"),
        (["--replica", "http://"], "is not a URL"),
        (["--replica", "http://host:99999"], "is not a URL"),
        (["--replica", _URL, "--replica", f"{_URL}/"], "given twice"),
        (["--replica", _URL, "--policy", "best"], "best"),
        (["--replica", _URL, "--weights", f"{_URL}=2"], "not a share"),
        (["--replica", _URL, "--weights", "http://other=0.1"], "not a share"),
        (["--replica", _URL, "--upstream", "openai"], "is not a URL"),
        (["--replica", _URL, "--tokenizer-of", "/nowhere/model"], "/nowhere/model"),
    ],
)
def test_wrong_options_end_with_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["route", "--port", "0", *arguments]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "try:" in shown


def test_options_come_from_variables_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_REPLICA", f"{_URL},http://10.0.0.6:8000")
    monkeypatch.setenv("TOKENMILL_UPSTREAM", "https://api.example.com/v1")
    config = RouteConfig.from_options({})
    assert config.replica == (_URL, "http://10.0.0.6:8000")
    assert config.upstream == "https://api.example.com"


def test_shares_may_not_exceed_one() -> None:
    urls = (_URL, "http://b", "http://c")
    with pytest.raises(UserError, match="more than 1"):
        RouteConfig(replica=urls, weights=("http://b=0.7", "http://c=0.7"))


def test_the_router_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\n"
        "import tokenmill.cli.route, tokenmill.route.process\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_router_runs_where_torch_cannot_be_imported() -> None:
    code = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\nimport tokenmill.route.process"
    subprocess.run([sys.executable, "-c", code], check=True)
