"""The client of endpoints: shapes of log-probabilities, token strings, and what a user is told when it fails."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tokenmill.checkpoint.tokenizer_files import load_tokenizer
from tokenmill.errors import UserError
from tokenmill.evaluate.endpoint import EndpointClient, RefusedError, TokenNames, read_logprobs
from tokenmill.evaluate.endpoint_probe import ProbePlan, Prober, cut_passages
from tokenmill.optimize.rivals.process import free_port

_MODELS = {"data": [{"id": "m"}]}


@contextmanager
def _server(answer: Callable[[str, dict[str, object]], tuple[int, object]]) -> Iterator[str]:
    """A server whose answers are made by `answer(path, body)`."""

    class Handler(BaseHTTPRequestHandler):
        def _reply(self, body: dict[str, object]) -> None:
            status, content = answer(self.path, body)
            data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_lists_in_parallel() -> None:
    first, second = read_logprobs(
        {"tokens": ["a", " b"], "token_logprobs": [None, -1.5], "top_logprobs": [None, {" c": -0.5, " d": -9999}]}
    ) or (None, None)
    assert first is None
    assert second is not None
    assert (second.token, second.logprob) == (" b", -1.5)
    assert {name: value for name, _, _, value in second.visible} == {" c": -0.5, " d": -40.0, " b": -1.5}


def test_records_with_bytes_and_ids() -> None:
    top = [{"token": " x", "bytes": [32, 120], "id": 7, "logprob": -0.1}, {"token": "\ufffd", "logprob": -3.0}]
    rows = read_logprobs({"content": [{**top[0], "top_logprobs": top}]})
    assert rows is not None
    assert rows[0] is not None
    assert (rows[0].token_id, rows[0].token_bytes) == (7, b" x")
    assert len(rows[0].visible) == 2  # the token itself is not repeated


def test_ids_written_as_strings_are_read() -> None:
    rows = read_logprobs({"tokens": ["token_id:5"], "token_logprobs": [-1.0], "top_logprobs": [{"token_id:9": -2.0}]})
    assert rows is not None
    assert rows[0] is not None
    assert {token_id for _, _, token_id, _ in rows[0].visible} == {5, 9}


@pytest.mark.parametrize("field", [None, {}, {"content": []}, {"tokens": [], "token_logprobs": []}])
def test_nothing_is_none(field: object) -> None:
    assert read_logprobs(field) is None


def test_token_strings_find_their_ids(vocabulary: Callable[[str], Path]) -> None:
    tokenizer = load_tokenizer(vocabulary("phi-3"))
    names = TokenNames(tokenizer)
    ids = tokenizer.encode("once upon a time\n", add_special_tokens=False)
    texts = [tokenizer.token_bytes(each).decode() for each in ids]
    assert [names.find(text, None, None) for text in texts] == ids  # the line break is a token of one byte
    assert names.find("", None, 3) == 3
    assert names.find("", None, tokenizer.vocab_size) is None
    assert not names.knows("a string of no token")
    assert names.knows("\ufffd")
    assert names.find("\ufffd", None, None) is None  # the vocabulary has that character, but it also stands for parts


def test_an_unreachable_url_is_one_line_with_the_remedy() -> None:
    with pytest.raises(UserError, match="cannot be reached") as caught:
        EndpointClient(f"http://127.0.0.1:{free_port()}")
    assert "start the server" in caught.value.remedy
    with pytest.raises(UserError, match="is not a URL"):
        EndpointClient("ftp://somewhere")


def test_keys_pages_and_refusals() -> None:
    with _server(lambda _path, _body: (401, {})) as url, pytest.raises(UserError, match="wants an API key"):
        EndpointClient(url)
    with (
        _server(lambda _path, _body: (200, "<html>")) as url,
        pytest.raises(UserError, match="not in the OpenAI format"),
    ):
        EndpointClient(url)
    with _server(lambda _path, _body: (200, {"data": []})) as url, pytest.raises(UserError, match="lists no models"):
        EndpointClient(url)
    with _server(lambda path, _body: (200, _MODELS) if path == "/v1/models" else (400, {"error": "no echo"})) as url:
        client = EndpointClient(url + "/v1/")
        with pytest.raises(RefusedError, match="no echo"):
            client.complete("text")


def _prober(url: str, file: Path) -> tuple[Prober, list[str]]:
    tokenizer, plan = load_tokenizer(file), ProbePlan(passages=2, length=24, samples=2)
    texts = cut_passages("One day a small dog went to the park and met a friend there. " * 20, tokenizer, plan)
    return Prober(EndpointClient(url), tokenizer, None, plan), texts


def test_another_tokenizer_is_recognised_by_its_token_strings(vocabulary: Callable[[str], Path]) -> None:
    def answer(path: str, body: dict[str, object]) -> tuple[int, object]:
        if path == "/v1/models":
            return 200, _MODELS
        tokens = list(str(body["prompt"]))  # one token per character
        scores = {"tokens": tokens, "token_logprobs": [None, *[-1.0] * (len(tokens) - 1)], "top_logprobs": None}
        return 200, {"choices": [{"text": "", "logprobs": scores}]}

    with _server(answer) as url:
        prober, texts = _prober(url, vocabulary("phi-3"))
        with pytest.raises(UserError, match="another tokenizer") as caught:
            prober.run(texts)
        assert "--reference" in caught.value.remedy


def test_another_tokenizer_is_recognised_by_its_token_counts(vocabulary: Callable[[str], Path]) -> None:
    entry = {"token": " dog", "logprob": -0.5, "top_logprobs": [{"token": " cat", "logprob": -1.0}]}

    def answer(path: str, _body: dict[str, object]) -> tuple[int, object]:
        if path == "/v1/models":
            return 200, _MODELS
        return 200, {"choices": [{"text": " dog", "logprobs": {"content": [entry]}}], "usage": {"prompt_tokens": 3}}

    with _server(answer) as url:
        prober, texts = _prober(url, vocabulary("phi-3"))
        with pytest.raises(UserError, match="a prompt has 3 tokens there"):
            prober.run(texts)


def test_without_log_probabilities_answers_are_sampled(vocabulary: Callable[[str], Path]) -> None:
    asked: list[dict[str, object]] = []

    def answer(path: str, body: dict[str, object]) -> tuple[int, object]:
        if path == "/v1/models":
            return 200, _MODELS
        if "logprobs" in body:
            return 400, {"error": "logprobs are not offered"}
        asked.append(body)
        return 200, {"choices": [{"text": " and then they played all day"}]}

    with _server(answer) as url:
        prober, texts = _prober(url, vocabulary("phi-3"))
        probe = prober.run(texts)
    assert probe.method == "answers"
    assert len(probe.passages) == len(texts) * 2
    assert probe.targets == [probe.passages[passage][index] for passage, index in probe.rows]
    sampled = [body for body in asked if body["temperature"]]
    assert len({body["seed"] for body in sampled}) == len(sampled) == 4
    with _server(answer) as url:
        prober, texts = _prober(url, vocabulary("phi-3"))
        with pytest.raises(UserError, match="does not offer the method 'prompt'"):
            prober.run(texts, "prompt")


def test_a_text_of_byte_tokens_is_no_other_tokenizer(vocabulary: Callable[[str], Path]) -> None:
    """Characters that the vocabulary lacks come back as broken strings: their number is all that can be compared."""
    tokenizer = load_tokenizer(vocabulary("phi-3"))

    def answer(path: str, body: dict[str, object]) -> tuple[int, object]:
        if path == "/v1/models":
            return 200, _MODELS
        tokens = [
            tokenizer.token_bytes(each).decode("utf-8", "replace") for each in tokenizer.encode(str(body["prompt"]))
        ]
        top = [None, *[{" the": -1.0, " a": -2.0}] * (len(tokens) - 1)]
        scores = {"tokens": tokens, "token_logprobs": [None, *[-3.0] * (len(tokens) - 1)], "top_logprobs": top}
        return 200, {"choices": [{"text": "", "logprobs": scores}]}

    with _server(answer) as url:
        prober, _ = _prober(url, vocabulary("phi-3"))
        probe = prober.run(["\ua66e\u2c00" * 8] * 2)
    assert probe.method == "prompt"
    assert len(probe.rows) > 20
    assert all(target in ids for target, ids in zip(probe.targets, probe.ids, strict=True))
