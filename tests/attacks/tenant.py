"""A well-behaved tenant: streams greedy completions one after the other, under a key of its own, in its own thread.

It knows the right answers from before the attack and records every error, every wrong answer and all times: to the
first token and between tokens. Runs during every attack of the suite, and in benchmarks/under_attack.py.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx

_PROMPTS = ("Once upon a time", "The little dog", "Lily and Tom went", "One day a big bear", "In the garden there")
_NUM_TOKENS = 32


@dataclass(slots=True)
class Times:
    """Seconds, as this tenant saw them."""

    first_tokens: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)

    def clear(self) -> None:
        self.first_tokens.clear()
        self.between_tokens.clear()


class WellBehavedTenant:
    def __init__(self, url: str, key: str | None, timeout: float = 30.0) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout)
        self._stopping = threading.Event()
        self._streamed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.errors: list[str] = []
        self.num_answers = 0
        self.times = Times()
        self._expected = {prompt: self._whole(prompt) for prompt in _PROMPTS}

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.wait_for_answers(1)

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(60)
        self._http.close()

    def wait_for_answers(self, more: int, seconds: float = 60.0) -> None:
        """Until that many further answers have ended, right or wrong."""
        with self._streamed:
            goal = self.num_answers + len(self.errors) + more
            arrived = self._streamed.wait_for(lambda: self.num_answers + len(self.errors) >= goal, seconds)
        assert arrived, "the well-behaved tenant stands still"

    @property
    def longest_wait(self) -> float:
        """Seconds without a token, at the start of an answer or in the middle."""
        return max((*self.times.first_tokens, *self.times.between_tokens), default=0.0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            for prompt in _PROMPTS:
                if self._stopping.is_set():
                    return
                problem = self._stream(prompt)
                with self._streamed:
                    if problem is None:
                        self.num_answers += 1
                    else:
                        self.errors.append(problem)
                    self._streamed.notify_all()
                if problem is not None:
                    self._stopping.wait(0.2)

    def _body(self, prompt: str) -> dict[str, object]:
        return {"prompt": prompt, "max_tokens": _NUM_TOKENS, "temperature": 0, "ignore_eos": True}

    def _whole(self, prompt: str) -> str:
        answer = self._http.post("/v1/completions", json=self._body(prompt))
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def _stream(self, prompt: str) -> str | None:
        """What was wrong with the answer, None if nothing was."""
        text, done = "", False
        last = time.monotonic()
        waits: list[float] = []
        try:
            with self._http.stream("POST", "/v1/completions", json={**self._body(prompt), "stream": True}) as answer:
                if answer.status_code != 200:
                    return f"status {answer.status_code}: {answer.read()[:200]!r}"
                for line in answer.iter_lines():
                    if not line.startswith("data: "):
                        continue
                    if line == "data: [DONE]":
                        done = True
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        return f"error event: {line[:200]}"
                    now = time.monotonic()
                    waits.append(now - last)
                    last = now
                    text += "".join(choice["text"] for choice in event["choices"])
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self.times.first_tokens += waits[:1]
            self.times.between_tokens += waits[1:]
        if not done:
            return "the stream ended without [DONE]"
        return None if text == self._expected[prompt] else f"wrong answer to {prompt!r}: {text!r}"


@contextlib.contextmanager
def streaming(url: str, key: str | None, *, patience: float | None = 15.0) -> Iterator[WellBehavedTenant]:
    """A tenant that must come through what happens inside: no error, right answers, two of them after it.

    `patience`: seconds it never has to wait for a token. What the suite sends froze a server for much longer, and
    costs a defended one far less; None where the engine itself is harmed.
    """
    tenant = WellBehavedTenant(url, key)
    tenant.start()
    try:
        yield tenant
        tenant.wait_for_answers(2)
    finally:
        tenant.stop()
    assert not tenant.errors, tenant.errors[:3]
    if patience is not None:
        assert tenant.longest_wait < patience, f"it waited {tenant.longest_wait:.1f} s for a token"


class Prober:
    """Asks for a page that costs nothing, over and over: how long the event loop of the server stood still."""

    def __init__(self, url: str, key: str | None, path: str = "/version") -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=30)
        self._path = path
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.longest = 0.0
        self.failures: list[str] = []
        self.num_answers = 0

    def _run(self) -> None:
        while not self._stopping.wait(0.02):
            began = time.monotonic()
            try:
                answer = self._http.get(self._path)
                if answer.status_code != 200:
                    self.failures.append(str(answer.status_code))
            except httpx.HTTPError as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            self.longest = max(self.longest, time.monotonic() - began)
            self.num_answers += 1

    def __enter__(self) -> Prober:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(60)
        self._http.close()
