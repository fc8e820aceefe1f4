"""Texts -> windows of tokens, and which tokens of each are scored: the protocols of perplexity and divergence.

`llama.cpp`: consecutive chunks, the second half of each is scored, BOS opens each where the model wants it.
`stride`: Hugging Face's sliding window; every token of the text but the first is scored once, or with disjoint windows
(the default, as in the papers on quantization) all but the first of each window. Called by all that measure text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.engine.scoring import Passage
from tokenmill.errors import UserError, unknown_name

PROTOCOLS = ("llama.cpp", "stride")


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that the model sees together; those from `first` on are scored (`first` >= 1)."""

    token_ids: list[int]
    first: int

    @property
    def num_scored(self) -> int:
        return len(self.token_ids) - self.first

    @property
    def passage(self) -> Passage:
        """What the model has to compute: token p is predicted by row p - 1, and the last row is not needed."""
        return Passage(self.token_ids[:-1], self.first - 1)


@dataclass(frozen=True, slots=True)
class TextJob:
    """The text and how it is split into windows."""

    text: Path
    context: int = 512
    limit_bytes: int = 0  # 0: the whole text
    max_chunks: int = 0  # 0: all
    protocol: str = "llama.cpp"
    stride: int = 0  # of the protocol `stride`; 0: the context, so that windows do not overlap

    def __post_init__(self) -> None:
        if self.context < 4:
            raise UserError(f"--context is {self.context}", "give at least 4, such as 512")
        if self.limit_bytes < 0 or self.max_chunks < 0:
            raise UserError("a limit is negative", "give --limit-bytes and --max-chunks as 0 or more")
        if self.protocol not in PROTOCOLS:
            raise unknown_name("protocol", self.protocol, PROTOCOLS)
        if self.stride and self.protocol != "stride":
            raise UserError(f"--stride does not apply to the protocol {self.protocol}", "add --protocol stride")
        if not 0 <= self.stride <= self.context:
            raise UserError(f"--stride is {self.stride}", f"give 1 to --context ({self.context})")

    def cut(self, tokenizer: Tokenizer) -> list[Window]:
        return self.windows(tokenizer.encode(read_text(self.text, self.limit_bytes)), tokenizer)

    def windows(self, tokens: list[int], tokenizer: Tokenizer) -> list[Window]:
        if self.protocol == "stride":
            return cut_strides(tokens, self.context, self.stride or self.context, self.max_chunks)
        return cut_chunks(tokens, self.context, added_bos(tokenizer), self.max_chunks)


def read_text(path: Path, limit_bytes: int = 0) -> str:
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


def cut_chunks(tokens: Sequence[int], context: int, bos_id: int | None, max_chunks: int = 0) -> list[Window]:
    """llama.cpp: the token in the middle only opens the half that is scored; a rest shorter than a chunk is left."""
    count = len(tokens) // context
    if count == 0:
        raise UserError(
            f"the text has {len(tokens)} tokens, fewer than one chunk of {context}", "lower --context or give more text"
        )
    chunks = [list(tokens[i * context : (i + 1) * context]) for i in range(min(count, max_chunks or count))]
    if bos_id is not None:
        for chunk in chunks:
            chunk[0] = bos_id
    return [half_scored(chunk) for chunk in chunks]


def half_scored(tokens: list[int]) -> Window:
    return Window(tokens, len(tokens) // 2 + 1)


def cut_strides(tokens: Sequence[int], context: int, stride: int, max_windows: int = 0) -> list[Window]:
    """Windows that begin `stride` apart, each scored where the one before did not reach."""
    if len(tokens) < 2:
        raise UserError(f"the text has {len(tokens)} tokens, nothing can be predicted", "give more text")
    windows: list[Window] = []
    scored = 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + context, len(tokens))
        if end - begin >= 2:
            windows.append(Window(list(tokens[begin:end]), max(scored - begin, 1)))
        scored = end
        if end == len(tokens) or len(windows) == max_windows:
            break
    return windows


def added_bos(tokenizer: Tokenizer) -> int | None:
    """The BOS id if encoding a text puts it first."""
    begins = tokenizer.encode("")[:1]
    return tokenizer.bos_id if begins and begins[0] == tokenizer.bos_id else None
