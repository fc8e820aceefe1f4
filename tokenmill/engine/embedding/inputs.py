"""Texts and pairs -> token ids, as an embedding or reranking model wants them.

Prompts go before texts; texts that are too long are cut where the caller allows it, and are an error where not; pairs
are joined as the tokenizer of a cross-encoder does, or put into the template of a causal reranker. Imports no torch:
the HTTP process and the offline face use the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenmill.checkpoint.embedding_files import EmbeddingSettings
from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.errors import UserError

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class Input:
    """One text or pair. `second`: where the second text begins; `cut`: tokens that did not fit."""

    token_ids: list[int]
    second: int = 0
    cut: int = 0


class InputMaker:
    def __init__(self, tokenizer: Tokenizer, settings: EmbeddingSettings | None, context: int) -> None:
        """`context`: tokens that the engine takes. Without settings texts are taken as they are."""
        self._tokenizer = tokenizer
        self.settings = settings
        limit = settings.max_tokens if settings is not None else 0
        self.max_tokens = min(context, limit) if limit else context

    # --- single texts ---

    def prepared(self, text: str, prompt: str = "") -> str:
        """A text with its prompt, ready to be encoded with special tokens."""
        whole = prompt + text
        return whole.lower() if self.settings is not None and self.settings.lower_case else whole

    def text(self, ids: list[int], limit: int | None) -> Input:
        """A text that was encoded with special tokens. `limit`: tokens it is cut to; None: too long is an error."""
        if not ids:
            raise UserError("a text has no tokens", "give at least one character")
        return self._within(ids, limit, lambda most: self._tokenizer.cut(ids, most))

    # --- pairs ---

    @property
    def has_template(self) -> bool:
        """Whether pairs are put into the template of a causal reranker."""
        return self.settings is not None and self.settings.kind == "rerank"

    def framed(self, query: str, document: str, instruction: str | None = None) -> str:
        """The question about a document as the text of a causal reranker, without its frame."""
        return f"<Instruct>: {instruction or DEFAULT_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"

    def pair(self, first: list[int], second: list[int], limit: int | None) -> Input:
        """Two texts, encoded without special tokens, for a cross-encoder."""
        ids, start = self._tokenizer.pair(first, second)
        most = self.max_tokens if limit is None else min(limit, self.max_tokens)
        if limit is None or len(ids) <= most:
            return self._within(ids, limit, lambda _: ids, start)
        kept, start = self._tokenizer.pair(first, second, most)
        return Input(kept, start, len(ids) - len(kept))

    def question(self, content: list[int], limit: int | None) -> Input:
        """What `framed` gave, encoded without special tokens, in the frame of a causal reranker."""
        before = self._tokenizer.encode(_BEFORE, add_special_tokens=False, parse_special=True)
        behind = self._tokenizer.encode(_BEHIND, add_special_tokens=False, parse_special=True)
        room = len(before) + len(behind)
        return self._within(
            [*before, *content, *behind], limit, lambda most: [*before, *content[: max(0, most - room)], *behind]
        )

    def score_ids(self) -> tuple[int, ...]:
        """The tokens whose logits are a causal reranker's answer: yes, then no."""
        assert self.settings is not None
        found = []
        for token in self.settings.score_tokens:
            ids = [token] if isinstance(token, int) else self._tokenizer.encode(token, add_special_tokens=False)
            if len(ids) != 1:
                raise UserError(f"'{token}' is not one token of this model", "use a reranker that answers yes or no")
            found += ids
        return tuple(found)

    def _within(self, ids: list[int], limit: int | None, cut: Callable[[int], list[int]], second: int = 0) -> Input:
        most = self.max_tokens if limit is None else min(limit, self.max_tokens)
        if len(ids) <= most:
            return Input(ids, second)
        if limit is None:
            raise UserError(
                f"a text has {len(ids)} tokens, the context of this model holds {most}",
                "shorten it, or allow it to be cut (truncate_prompt_tokens: -1)",
            )
        kept = cut(most)
        return Input(kept, second, len(ids) - len(kept))


def score_of(settings: EmbeddingSettings, logits: Sequence[float]) -> float:
    """One number for a pair: of a cross-encoder its logit, of a causal reranker yes against no; as the model says, as a
    probability."""
    if settings.kind == "classify" and len(logits) != 1:
        raise UserError(
            f"the model is a classifier of {len(logits)} labels: it gives no score", "use a reranker, or /v1/classify"
        )
    value = logits[0] - logits[1] if len(logits) > 1 else logits[0]
    return sigmoid(value) if settings.score_activation == "sigmoid" else value


def probabilities(settings: EmbeddingSettings, logits: Sequence[float]) -> list[float]:
    """Of the labels of a classifier."""
    if settings.multi_label or len(logits) == 1:
        return [sigmoid(value) for value in logits]
    largest = max(logits)
    powers = [math.exp(value - largest) for value in logits]
    total = sum(powers)
    return [power / total for power in powers]


def shortened(vector: Sequence[float], dimension: int, normalize: bool) -> list[float]:
    """The first `dimension` numbers, scaled to length one."""
    kept = list(vector[:dimension])
    if not normalize:
        return kept
    length = math.sqrt(sum(value * value for value in kept)) or 1.0
    return [value / length for value in kept]


def sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0 else math.exp(value) / (1.0 + math.exp(value))
