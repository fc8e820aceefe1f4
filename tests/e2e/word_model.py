"""A random model whose words are its tokens: prompts and answers can be told apart token by token.

Token `n` is written `Ġwn` in prompts, and reads ` wn` in answers. For tests of the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.parity.tiny_models import CONFIGS, make

VOCAB_SIZE = CONFIGS["llama"]().vocab_size


def make_word_model(folder: Path, template: str, tags: Mapping[int, str] | None = None, family: str = "llama") -> Path:
    """`tags`: texts of certain tokens instead of their numbers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    make(family, folder)
    words = {(tags or {}).get(number, f"Ġw{number}"): number for number in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="Ġw0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def text_of(*token_ids: int) -> str:
    return " ".join(f"Ġw{token_id}" for token_id in token_ids)
