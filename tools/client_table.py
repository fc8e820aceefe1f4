"""Which of vLLM's and Ollama's documented requests the server answers: sends each and writes docs/clients.md.

    python tools/client_table.py http://127.0.0.1:8000            # a running server, any chat model
    python tools/client_table.py                                  # starts one with smollm2

The requests are in tests/data/documented_requests.json, with what is expected of each; tests/clients/test_documented.py
sends them too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "data" / "documented_requests.json"
PAGE = ROOT / "docs" / "clients.md"
_IGNORED_HEADER = "x-tokenmill-ignored"

_OLLAMA = "https://github.com/ollama/ollama/blob/main/docs/api.md"
_HEAD = f"""# Clients and documented requests

Requests from the documentation of [vLLM](https://docs.vllm.ai) and [Ollama]({_OLLAMA}), sent to this server as they are
written there, with the name of its model. Ollama's are sent as `curl -d` sends them, without a content type of their
own. A refused request is answered with the reason shown; an ignored field is named in the header
`x-tokenmill-ignored`.

The page is written by `python tools/client_table.py`; `tests/clients/test_documented.py` sends every request and
compares. The same folder drives the server with clients as they are installed from their packages: `openai`,
`anthropic`, `ollama`, `litellm` (as OpenAI, vLLM, Ollama and Anthropic), `langchain-openai`,
`llama-index-llms-openai-like`, `instructor`, `openai-agents` and lm-eval's `local-completions`: chat, streams, tools,
JSON, embeddings where the client has them, errors. `make test-clients` installs them into an environment of their own
and runs these tests.
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    verdict: str  # "supported", "refused", or what is wrong
    detail: str = ""  # why it is refused, or which fields are ignored


def load() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(TABLE.read_text())
    return rows


def send(http: httpx.Client, row: dict[str, Any], model: str) -> Outcome:
    """Send one request and judge the answer: a status, the fields it must have, or a reason that names the cause."""
    body = json.dumps(row["body"]).replace('"MODEL"', json.dumps(model)) if "body" in row else None
    headers = {"content-type": "application/json"} | row.get("headers", {})
    answer = http.request(row["method"], row["path"], content=body, headers=headers if body is not None else None)
    if answer.status_code >= 500:
        return Outcome(f"failed with {answer.status_code}", answer.text[:200])
    if answer.status_code >= 400:
        error = answer.json()["error"]
        message = error["message"] if isinstance(error, dict) else error
        if row.get("names", "") not in message:
            return Outcome("refused without its name", message)
        return Outcome("refused", message)
    documents = list(_documents(answer))
    for path in row.get("answers", ()):
        if not any(_has(document, path.split(".")) for document in documents):
            return Outcome(f"answered without {path}", answer.text[:200])
    ignored = answer.headers.get(_IGNORED_HEADER, "")
    return Outcome("supported", f"ignored: {ignored}" if ignored else "")


def _documents(answer: httpx.Response) -> Iterator[Any]:
    """All objects of an answer: one, a line each, or the data of events."""
    kind = answer.headers.get("content-type", "")
    if kind.startswith("application/json"):
        yield answer.json()
    elif kind.startswith("application/x-ndjson"):
        yield from map(json.loads, answer.text.splitlines())
    elif kind.startswith("text/event-stream"):
        lines = (line[6:] for line in answer.text.splitlines() if line.startswith("data: "))
        yield from (json.loads(line) for line in lines if line != "[DONE]")


def _has(value: Any, path: list[str]) -> bool:
    for name in path:
        if isinstance(value, list):
            if not name.isdigit() or int(name) >= len(value):
                return False
            value = value[int(name)]
        elif isinstance(value, dict) and value.get(name) is not None:
            value = value[name]
        else:
            return False
    return True


def render(rows: list[dict[str, Any]], outcomes: list[Outcome]) -> str:
    parts = [_HEAD]
    for server in dict.fromkeys(row["server"] for row in rows):
        parts += [f"\n## {server}\n", "| Request | Route | Result |", "|---|---|---|"]
        for row, outcome in zip(rows, outcomes, strict=True):
            if row["server"] == server:
                parts.append(
                    f"| {row['page']}: {row['request']} | `{row['method']} {row['path']}` | {_cell(outcome)} |"
                )
    return "\n".join(parts) + "\n"


def _cell(outcome: Outcome) -> str:
    detail = outcome.detail.replace("|", "\\|").replace("\n", " ")
    return (
        f"{outcome.verdict}: {detail}"
        if outcome.verdict == "refused"
        else "; ".join(filter(None, (outcome.verdict, detail)))
    )


def run(url: str) -> tuple[list[dict[str, Any]], list[Outcome]]:
    rows = load()
    with httpx.Client(base_url=url, timeout=120) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        return rows, [send(http, row, model) for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", default="", help="base URL of a running server; default: start one")
    arguments = parser.parse_args()
    if arguments.url:
        rows, outcomes = run(arguments.url)
    else:
        from tests.clients.conftest import FLAGS
        from tests.e2e.serving import serving

        with serving(Path("smollm2"), *FLAGS) as server:
            rows, outcomes = run(server.url)
    PAGE.write_text(render(rows, outcomes))
    wrong = [
        row for row, outcome in zip(rows, outcomes, strict=True) if outcome.verdict not in ("supported", "refused")
    ]
    for row in wrong:
        print(f"wrong: {row['server']} {row['page']}: {row['request']}", file=sys.stderr)
    print(f"{PAGE.relative_to(ROOT)}: {sum(each.verdict == 'supported' for each in outcomes)} of {len(rows)} supported")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
