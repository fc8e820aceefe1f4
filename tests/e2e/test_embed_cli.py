"""`tokenmill embed` on a tiny model: a matrix, lines, and bad input in two lines with exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.embedding_models import TEXTS, save_embedder
from tokenmill import Embedder
from tokenmill.cli.main import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_embedder(tmp_path_factory.mktemp("models") / "tiny", "bert", prompts={"query": "who wrote: "})


def test_vectors_of_a_file(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    lines = [json.dumps({"id": 1, "body": text}) for text in TEXTS]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    out = tmp_path / "new" / "vectors.npy"
    assert main(["embed", str(model), str(tmp_path / "texts.txt"), "--out", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["texts"], report["dimension"]) == (len(TEXTS), 48)
    with Embedder(model) as embedder:
        wanted, asked = embedder.embed(TEXTS), embedder.embed(TEXTS, prompt_name="query")
    np.testing.assert_allclose(np.load(out), wanted, atol=1e-6)
    source = [str(model), str(tmp_path / "texts.jsonl"), "--field", "body", "--prompt-name", "query"]
    assert main(["embed", *source, "--out", str(tmp_path / "vectors.jsonl")]) == 0
    written = [json.loads(line) for line in (tmp_path / "vectors.jsonl").read_text().splitlines()]
    assert [each["index"] for each in written] == list(range(len(TEXTS)))
    np.testing.assert_allclose([each["embedding"] for each in written], asked, atol=1e-6)


@pytest.mark.parametrize(
    ("content", "flags", "problem"),
    [
        ("", [], "no texts"),
        ("a\n\nb\n", [], "line 2"),
        ("a\n", ["--dimensions", "8"], "not trained for shorter"),
        ("a\n", ["--prompt-name", "qery"], "query"),
        ("a\n", ["--out", "vectors.csv"], ".npy or .jsonl"),
        ("a\n", ["--kv-disk", "somewhere"], "kv_disk"),
    ],
)
def test_bad_input_ends_with_a_remedy(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, flags: list[str], problem: str
) -> None:
    (tmp_path / "texts.txt").write_text(content)
    out = ["--out", str(tmp_path / "vectors.npy")]
    assert main(["embed", str(model), str(tmp_path / "texts.txt"), *out, *flags]) == 2
    errors = capsys.readouterr().err
    assert problem in errors
    assert "try:" in errors


def test_verbs_that_generate_name_the_one_to_use(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(model), "hello"]) == 2
    assert "tokenmill embed" in capsys.readouterr().err


def test_a_damaged_model_is_named(model: Path, tmp_path: Path) -> None:
    import shutil

    from tokenmill.errors import CheckpointError

    shutil.copytree(model, tmp_path / "cut")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "cut/config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(CheckpointError, match=r"layers\.3"):
        Embedder(tmp_path / "cut")
    (tmp_path / "cut/config.json").write_text(json.dumps(config | {"intermediate_size": 81}))
    with pytest.raises(CheckpointError, match="shape"):
        Embedder(tmp_path / "cut")
