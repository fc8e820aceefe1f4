"""Every request of vLLM's and Ollama's documentation in the table: answered, or refused by its name with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import MODEL
from tests.e2e.serving import RunningServer
from tools.client_table import PAGE, load, send

_ROWS = load()
_IDS = [f"{row['server']}: {row['page']}: {row['request']}" for row in _ROWS]


@pytest.mark.parametrize("row", _ROWS, ids=_IDS)
def test_a_documented_request(server: RunningServer, row: dict[str, Any]) -> None:
    outcome = send(server.http, row, MODEL)
    assert outcome.verdict == row["expect"], outcome


def test_the_page_has_every_row() -> None:
    lines = PAGE.read_text().splitlines()
    for row in _ROWS:
        shown = [
            line for line in lines if f"| {row['page']}: {row['request']} | `{row['method']} {row['path']}`" in line
        ]
        assert shown, f"run tools/client_table.py: {row['page']}: {row['request']}"
        assert any(line.split(" | ")[-1].startswith(row["expect"]) for line in shown), shown
