"""A client of any OpenAI-compatible endpoint that asks for log-probabilities, and how their answers are read.

Owns the requests, the two shapes that log-probabilities come in, and the errors of an endpoint as one line with the
remedy. Token strings become ids of the reference's vocabulary here. Knows nothing of models or statistics. Called by
endpoint_probe.py and the rivals of `optimize`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.errors import UnavailableError, UserError

_MIN_LOGPROB = -40.0  # servers write a floor such as -9999 for "impossible"; that carries no more information
_MAX_ERROR = 300  # characters of a refusal that are repeated
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_ID_TOKEN = re.compile(r"token_id:(\d+)")


class RefusedError(UserError):
    """The endpoint answers, but refuses this request: it lacks the field, or the path. `status` is HTTP's."""

    def __init__(self, url: str, status: int, text: str) -> None:
        self.status = status
        super().__init__(f"{url} refuses: HTTP {status} {text[:_MAX_ERROR]}", "see the endpoint's log")


@dataclass(frozen=True, slots=True)
class TokenScores:
    """One position: the token there, and the visible tokens by name with their log-probabilities."""

    token: str
    token_bytes: bytes | None
    token_id: int | None
    logprob: float
    visible: tuple[tuple[str, bytes | None, int | None, float], ...]  # name, bytes, id, log-probability


@dataclass(frozen=True, slots=True)
class Completion:
    text: str
    prompt_tokens: int | None
    scores: tuple[TokenScores | None, ...] | None  # None for a first token, which nothing predicts


class EndpointClient:
    """`url` with or without /v1. Without `model`, the only or first one that the endpoint lists."""

    def __init__(self, url: str, model: str = "", api_key: str = "", timeout: float = 120.0) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"'{url}' is not a URL", "write http://127.0.0.1:8000")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(headers=headers, timeout=timeout)
        self.model = model or self._first_model()

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> EndpointClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def complete(self, prompt: str, **fields: Any) -> list[Completion]:
        answer = self._send("POST", "/v1/completions", {"model": self.model, "prompt": prompt, **fields})
        return [_completion(answer, choice, choice.get("text") or "") for choice in _choices(answer, self.url)]

    def chat(self, message: str, **fields: Any) -> list[Completion]:
        messages = [{"role": "user", "content": message}]
        answer = self._send("POST", "/v1/chat/completions", {"model": self.model, "messages": messages, **fields})
        choices = _choices(answer, self.url)
        return [_completion(answer, each, (each.get("message") or {}).get("content") or "") for each in choices]

    def _first_model(self) -> str:
        listed = self._send("GET", "/v1/models").get("data")
        if not isinstance(listed, list) or not listed or not isinstance(listed[0], Mapping):
            raise UserError(f"{self.url} lists no models", "give the name it serves with --model")
        return str(listed[0].get("id"))

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        url = self.url + path
        try:
            answer = self._http.request(method, url, json=body)
        except httpx.TimeoutException:
            raise UnavailableError(f"{self.url} does not answer in time", "give a longer --timeout") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnavailableError(
                f"{self.url} cannot be reached: {error or type(error).__name__}",
                "start the server, or check the host and port",
            ) from None
        if answer.status_code in (401, 403):
            raise UserError(f"{self.url} wants an API key", "give --api-key, or set OPENAI_API_KEY")
        if answer.status_code != 200:
            raise RefusedError(url, answer.status_code, " ".join(answer.text.split()))
        try:
            content = answer.json()
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise UserError(f"{url} answers, but not in the OpenAI format", "give the base URL of an OpenAI-style API")
        return content


def _choices(answer: Mapping[str, Any], url: str) -> Sequence[Mapping[str, Any]]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        raise UserError(f"{url} answers without choices", "give the base URL of an OpenAI-style API")
    return choices


def _completion(answer: Mapping[str, Any], choice: Mapping[str, Any], text: str) -> Completion:
    count = (answer.get("usage") or {}).get("prompt_tokens")
    try:
        scores = read_logprobs(choice.get("logprobs"))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(
            "the endpoint's log-probabilities have a shape that is not known", "report the server and its version"
        ) from None
    return Completion(text, count if isinstance(count, int) else None, scores)


def read_logprobs(field: Any) -> tuple[TokenScores | None, ...] | None:
    """Either shape of the API: lists in parallel, or records under `content`. None where there are none."""
    if not field:
        return None
    if field.get("content") is not None:
        return tuple(_record(each) for each in field["content"]) or None
    tokens, own, top = field.get("tokens"), field.get("token_logprobs"), field.get("top_logprobs")
    if not tokens or not own:
        return None
    rows: list[TokenScores | None] = []
    for number, (token, logprob) in enumerate(zip(tokens, own, strict=True)):
        if logprob is None:
            rows.append(None)
            continue
        visible = {**((top[number] if top else None) or {})}
        visible.setdefault(token, logprob)
        entries = tuple((name, None, _written_id(name), _floored(value)) for name, value in visible.items())
        rows.append(TokenScores(token, None, _written_id(token), _floored(logprob), entries))
    return tuple(rows)


def _record(each: Mapping[str, Any]) -> TokenScores:
    own = _entry(each)
    visible = {entry[:3]: entry for entry in [*map(_entry, each.get("top_logprobs") or ()), own]}
    return TokenScores(own[0], own[1], own[2], own[3], tuple(visible.values()))


def _entry(each: Mapping[str, Any]) -> tuple[str, bytes | None, int | None, float]:
    data, token_id = each.get("bytes"), each.get("id")
    name = str(each["token"])
    return (
        name,
        bytes(data) if data else None,
        int(token_id) if token_id is not None else _written_id(name),
        _floored(float(each["logprob"])),
    )


def _written_id(name: str) -> int | None:
    match = _ID_TOKEN.fullmatch(name)
    return int(match[1]) if match else None


def _floored(logprob: float) -> float:
    return max(float(logprob), _MIN_LOGPROB)


class TokenNames:
    """Token strings of an endpoint -> ids of the reference's vocabulary; None where a string is of several or none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._vocab_size = tokenizer.vocab_size
        self._ids: dict[bytes, int | None] = {}
        self._texts: dict[str, int | None] = {}
        single: dict[bytes, int] = {}  # tokens of one byte, such as a line break; a whole token of that text is meant
        for token_id in range(tokenizer.vocab_size):
            data = tokenizer.token_bytes(token_id)
            if _BYTE_PIECE.fullmatch(tokenizer.id_to_piece(token_id)):
                single[data] = token_id
            elif data:
                self._ids[data] = None if data in self._ids else token_id
                text = data.decode("utf-8", "replace")
                self._texts[text] = None if text in self._texts else token_id
        for data, token_id in single.items():
            self._ids.setdefault(data, token_id)
            if data.isascii():
                self._texts.setdefault(data.decode(), token_id)

    def find(self, name: str, data: bytes | None, token_id: int | None) -> int | None:
        if token_id is not None:
            return token_id if 0 <= token_id < self._vocab_size else None
        if data:
            return self._ids.get(data)
        return None if "\ufffd" in name else self._texts.get(name)  # a broken character may be of any token

    def knows(self, name: str) -> bool:
        """Whether a whole token has this text, even if several do. Broken characters and empty strings say nothing."""
        return not name or "\ufffd" in name or name in self._texts or _written_id(name) is not None
