"""Perplexity of a text, by the protocol of llama.cpp's llama-perplexity, so that figures can be compared.

The whole text is tokenized once and cut into consecutive chunks; the first half of each is context only, the second is
scored. Where the model begins sequences with BOS, that token replaces the first of each chunk. Called by
`tokenmill eval perplexity`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.config import EngineConfig
from tokenmill.engine.llm import LLM
from tokenmill.engine.outputs import RequestOutput
from tokenmill.errors import UserError
from tokenmill.types import SamplingParams

CHUNKS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class PerplexityJob:
    text: Path
    context: int = 512
    limit_bytes: int = 0  # 0: the whole text
    max_chunks: int = 0  # 0: all

    def __post_init__(self) -> None:
        if self.context < 4:
            raise UserError(f"--context is {self.context}", "give at least 4, such as 512")
        if self.limit_bytes < 0 or self.max_chunks < 0:
            raise UserError("a limit is negative", "give --limit-bytes and --max-chunks as 0 or more")


@dataclass(frozen=True, slots=True)
class PerplexityReport:
    perplexity: float
    tokens: int  # scored
    stderr: float  # of the perplexity
    chunks: int
    context: int
    text_tokens: int


def measure_perplexity(
    model: str,
    config: EngineConfig,
    job: PerplexityJob,
    on_chunk: Callable[[int, int], None] = lambda _done, _all: None,
) -> PerplexityReport:
    """`on_chunk` is told how many chunks of how many are done."""
    text = read_text(job.text, job.limit_bytes)
    config = replace(config, context=job.context, concurrency=min(config.concurrency, CHUNKS_AT_ONCE))
    with LLM(model, config) as llm:
        tokens = llm.parts.tokenizer.encode(text)
        chunks = cut_chunks(tokens, job.context, _added_bos(llm.parts.tokenizer), job.max_chunks)
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        losses: list[float] = []
        for begin in range(0, len(chunks), CHUNKS_AT_ONCE):
            for output in llm.generate(chunks[begin : begin + CHUNKS_AT_ONCE], params):
                losses += scored_losses(output)
            on_chunk(min(begin + CHUNKS_AT_ONCE, len(chunks)), len(chunks))
    perplexity, stderr = summarize(losses)
    return PerplexityReport(perplexity, len(losses), stderr, len(chunks), job.context, len(tokens))


def read_text(path: Path, limit_bytes: int) -> str:
    """The text, or its first bytes; a character that the limit cuts in two is left out."""
    try:
        with path.open("rb") as file:
            data = file.read(limit_bytes or -1)
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error.strerror}", "give a text file with --text") from None
    try:
        return data.decode("utf-8", errors="ignore" if limit_bytes else "strict")
    except UnicodeDecodeError as error:
        raise UserError(f"'{path}' is not UTF-8 at byte {error.start}", "convert it to UTF-8") from None


def cut_chunks(tokens: list[int], context: int, bos_id: int | None, max_chunks: int = 0) -> list[list[int]]:
    count = len(tokens) // context
    if count == 0:
        raise UserError(
            f"the text has {len(tokens)} tokens, fewer than one chunk of {context}", "lower --context or give more text"
        )
    chunks = [tokens[i * context : (i + 1) * context] for i in range(min(count, max_chunks or count))]
    if bos_id is not None:
        for chunk in chunks:
            chunk[0] = bos_id
    return chunks


def scored_losses(output: RequestOutput) -> list[float]:
    """Negative log-likelihoods of the second half of a chunk. Its first token only opens it, as in llama.cpp."""
    ids, logprobs = output.prompt_token_ids, output.prompt_logprobs
    assert logprobs is not None
    assert len(logprobs) == len(ids)
    return [-entries[ids[i]].logprob for i, entries in enumerate(logprobs) if i > len(ids) // 2 and entries]


def summarize(losses: list[float]) -> tuple[float, float]:
    """(perplexity, its standard error): exp of the mean loss, and that times the standard error of the mean."""
    mean = math.fsum(losses) / len(losses)
    variance = math.fsum((loss - mean) ** 2 for loss in losses) / len(losses)
    perplexity = math.exp(mean)
    return perplexity, perplexity * math.sqrt(variance / max(1, len(losses) - 1))


def _added_bos(tokenizer: Tokenizer) -> int | None:
    """The BOS id if encoding a text puts it first."""
    begins = tokenizer.encode("")[:1]
    return tokenizer.bos_id if begins and begins[0] == tokenizer.bos_id else None
