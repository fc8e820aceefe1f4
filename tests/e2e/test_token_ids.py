"""A checkpoint without a tokenizer: token ids are generated from token ids, text is refused in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_cli import answer, tokenmill
from tests.parity.tiny_models import make
from tokenmill import LLM, SamplingParams
from tokenmill.errors import UserError

_PROMPT = [5, 9, 17, 40]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("without_tokenizer")
    make("llama", folder)
    assert not list(folder.glob("*token*"))
    return folder


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), context=64, concurrency=2, threads=1) as llm:
        yield llm


def test_ids_in_and_out(llm: LLM) -> None:
    (output,) = llm.generate([_PROMPT], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    ids = list(output.outputs[0].token_ids)
    assert len(ids) == 6
    assert output.outputs[0].text == "".join(f"<{token_id}>" for token_id in ids)


def test_text_is_refused(llm: LLM) -> None:
    with pytest.raises(UserError, match="no tokenizer to read text with"):
        llm.generate(["Once upon a time"], SamplingParams(max_tokens=2))
    assert len(llm.generate([_PROMPT], SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2


def test_command_line(model: Path) -> None:
    words = ["run", model, "--max-tokens", "3", "--ignore-eos", "--context", "64"]
    assert len(answer(*words, "--token-ids", ",".join(map(str, _PROMPT)))["token_ids"]) == 3
    refused = tokenmill(*words, "Once upon a time")
    assert refused.returncode == 2
    assert "has no tokenizer to read text with" in refused.stderr
    assert answer("inspect", model)["tokenizer"]["kind"] == "none: prompts are token ids"
