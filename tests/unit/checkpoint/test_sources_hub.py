"""Hugging Face ids: which files are chosen, and a download from a Hub that runs in the test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.checkpoint.index_server import IndexServer
from tokenmill.checkpoint.sources.hub_files import HubRequest, parse_request, select_files
from tokenmill.errors import UserError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GGUF_REPO = [
    "README.md",
    "m-IQ4_XS.gguf",
    "m-Q4_K_M.gguf",
    "m-Q4_K.gguf",
    "big/m-Q8_0-00001-of-00002.gguf",
    "big/m-Q8_0-00002-of-00002.gguf",
    "mmproj-m-F16.gguf",
]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("org/name", HubRequest("org/name")),
        ("org/name-GGUF:Q4_K_M", HubRequest("org/name-GGUF", quant="Q4_K_M")),
        ("org/name/sub/file.gguf", HubRequest("org/name", file="sub/file.gguf")),
        ("name", None),
        ("org/name/file.bin", None),
        ("../name", None),
        ("https://host/org/name", None),
    ],
)
def test_request_is_parsed(model: str, expected: HubRequest | None) -> None:
    assert parse_request(model) == expected


@pytest.mark.parametrize(
    ("request_", "main", "count"),
    [
        (HubRequest("o/n"), "m-Q4_K_M.gguf", 1),
        (HubRequest("o/n", quant="q4_k"), "m-Q4_K.gguf", 1),
        (HubRequest("o/n", quant="Q8_0"), "big/m-Q8_0-00001-of-00002.gguf", 2),
        (HubRequest("o/n", file="m-IQ4_XS.gguf"), "m-IQ4_XS.gguf", 1),
    ],
)
def test_gguf_is_chosen_by_quant_or_file(request_: HubRequest, main: str, count: int) -> None:
    selection = select_files(request_, GGUF_REPO)
    assert (selection.main, len(selection.files)) == (main, count)


def test_unknown_quant_lists_what_there_is() -> None:
    with pytest.raises(UserError, match="IQ4_XS, Q4_K, Q4_K_M"):
        select_files(HubRequest("o/n", quant="Q3_K_S"), GGUF_REPO)


def test_missing_split_is_refused() -> None:
    with pytest.raises(UserError, match="1 of the 00002 splits"):
        select_files(HubRequest("o/n", quant="Q8_0"), GGUF_REPO[:5])


def test_safetensors_repository_leaves_other_weights_behind() -> None:
    wanted = [
        "config.json",
        "merges.txt",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
    ]
    others = [
        "README.md",
        "consolidated.safetensors",
        "pytorch_model.bin",
        "onnx/model.onnx",
        "original/model.safetensors",
    ]
    selection = select_files(HubRequest("o/n"), wanted + others)
    assert sorted(selection.files) == sorted(wanted)
    assert selection.main == ""


def test_repository_without_weights_we_read() -> None:
    with pytest.raises(UserError, match="neither safetensors nor GGUF"):
        select_files(HubRequest("o/n"), ["config.json", "pytorch_model.bin"])


CHILD = """
import json, sys
from tokenmill.checkpoint.sources import resolve
from tokenmill.errors import UserError
for model in sys.argv[1:]:
    try:
        resolved = resolve(model)
        print(json.dumps([str(resolved.path), resolved.bytes, resolved.source]))
    except UserError as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


def play_hub(server: IndexServer, repo: str, files: dict[str, bytes]) -> None:
    """The part of the Hub's API that a snapshot download uses."""
    listing = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
    info = json.dumps({"id": repo, "sha": COMMIT, "siblings": listing}).encode()
    tree = [{"type": "file", "path": name, "size": len(data), "oid": f"{hash(name)}"} for name, data in files.items()]
    pages = {f"/api/models/{repo}{tail}": info for tail in ("", "/revision/main", f"/revision/{COMMIT}")}
    pages |= {f"/api/models/{repo}/tree/{COMMIT}": json.dumps(tree).encode()}
    server.files |= pages
    server.content_types |= dict.fromkeys(pages, "application/json")
    for name, data in files.items():
        path = f"/{repo}/resolve/{COMMIT}/{name}"
        server.files[path] = data
        server.extra_headers[path] = {"ETag": f'"{len(data)}-{name}"', "X-Repo-Commit": COMMIT}


def run_child(endpoint: str, home: Path, *models: str, **variables: str) -> list[list[object]]:
    """In a process of its own: huggingface_hub reads its variables when it is imported."""
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_XET": "1"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | own | variables
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *models], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_download_offline_reuse_and_errors(tmp_path: Path) -> None:
    files = {"config.json": b"{}", "model.safetensors": bytes(5000), "pytorch_model.bin": bytes(9), "README.md": b"#"}
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / COMMIT
    with IndexServer() as server:
        play_hub(server, "org/name", files)
        play_hub(server, "org/name-GGUF", {"m-Q4_K_M.gguf": bytes(70), "m-Q8_0.gguf": bytes(90)})
        online = run_child(server.url, tmp_path, "org/name", "org/name-GGUF:q8_0", "org/absent")
        url = server.url
    assert online[0] == [str(snapshot), 5002, f"huggingface:org/name@{COMMIT}"]
    assert sorted(path.name for path in snapshot.iterdir()) == ["config.json", "model.safetensors"]
    assert online[1][1] == 90
    assert str(online[1][0]).endswith("m-Q8_0.gguf")
    assert online[2][0] == "UserError"
    assert "org/absent" in str(online[2][1])

    unreachable = run_child(url, tmp_path, "org/name", "org/other")
    assert unreachable[0] == online[0]
    assert unreachable[1][0] == "UnavailableError"

    offline = run_child(url, tmp_path, "org/name", "org/name-GGUF:Q4_K_M", HF_HUB_OFFLINE="1")
    assert offline[0] == online[0]
    assert offline[1][0] == "UnavailableError"
