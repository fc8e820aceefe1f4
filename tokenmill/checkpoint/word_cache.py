"""How much of what clients sent the `tokenizers` library remembers. Called where a tokenizer is built."""

from __future__ import annotations

import tokenizers

_MAX_WORDS = 4096


def bound_cache(backend: tokenizers.Tokenizer) -> None:
    """The library remembers the tokens of 10,000 words. Where nothing splits the text a word is a whole prompt: tens of
    MiB of what clients sent, and one could time whether another has sent the same."""
    resize = getattr(backend.model, "_resize_cache", None)  # BPE and Unigram have one
    if resize is not None:
        splits = backend.pre_tokenizer is not None and len(backend.pre_tokenizer.pre_tokenize_str("a b")) > 1
        resize(_MAX_WORDS if splits else 0)
