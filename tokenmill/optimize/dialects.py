"""How engines differ behind the OpenAI API: whether prompts may be token ids, and how the output length is fixed.

A table and its lookup by what /v1/models says; an unknown engine gets plain OpenAI. Called by replay.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from tokenmill.bench.serve_datasets import as_text
from tokenmill.errors import unknown_name

_FIND_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Dialect:
    name: str
    takes_ids: bool = True  # token ids as prompts of /v1/completions
    fixed_length: Mapping[str, Any] = field(default_factory=lambda: {"ignore_eos": True})  # for answers of full length
    length_field: str = ""  # a further name of `max_tokens`

    def body(self, model: str, prompt: list[int] | str, output_len: int) -> bytes:
        """A streamed, greedy completion of exactly `output_len` tokens, where the engine can be told so."""
        if not self.takes_ids and not isinstance(prompt, str):
            prompt = as_text(prompt)
        body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": output_len, "temperature": 0.0}
        body |= {"stream": True, "stream_options": {"include_usage": True}, **self.fixed_length}
        if self.length_field:
            body[self.length_field] = output_len
        return json.dumps(body).encode()


DIALECTS = {
    each.name: each
    for each in (
        Dialect("tokenmill"),
        Dialect("vllm"),
        Dialect("sglang"),
        Dialect("llama.cpp", length_field="n_predict"),
        Dialect("ollama", takes_ids=False, fixed_length={}),
        Dialect("openai", takes_ids=False, fixed_length={}),
    )
}
_OWNERS = {"tokenmill": "tokenmill", "vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp", "library": "ollama"}


def get_dialect(name: str) -> Dialect:
    if name not in DIALECTS:
        raise unknown_name("dialect", name, DIALECTS)
    return DIALECTS[name]


def find_dialect(url: str, api_key: str = "") -> tuple[Dialect, str]:
    """(dialect, first model) of the server, by `owned_by` in /v1/models. ("openai", "") if it does not say; never
    raises for what the server does."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        models = httpx.get(f"{url}/v1/models", headers=headers, timeout=_FIND_SECONDS).json()["data"]
        first = models[0]
        dialect = DIALECTS[_OWNERS.get(str(first.get("owned_by", "")).lower(), "openai")]
        return dialect, str(first["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError, AttributeError):
        return DIALECTS["openai"], ""
