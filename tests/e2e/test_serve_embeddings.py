"""Embedding, reranking and classifying models behind the server: every route, in the shapes of the peers, with the same
numbers as the offline face; and one clear error for each kind of bad input."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.e2e.serving import RunningServer, serving
from tests.embedding_models import PAIRS, TEXTS, save_classifier, save_embedder, save_reranker
from tokenmill import LLM, Embedder


@pytest.fixture(scope="module")
def embedder_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = {"matryoshka_dimensions": [8, 16]}
    return save_embedder(folder, "bert", prompts={"query": "who wrote: "}, config=config, normalize=False)


@pytest.fixture(scope="module")
def server(embedder_path: Path) -> Iterator[RunningServer]:
    with serving(embedder_path, "--served-model-name", "tiny", "--api-key", "secret") as running:
        running.http.headers["authorization"] = "Bearer secret"
        yield running


@pytest.fixture(scope="module")
def vectors(embedder_path: Path) -> np.ndarray:
    with Embedder(embedder_path) as embedder:
        found: np.ndarray = embedder.embed(TEXTS, normalize=True)
        return found


def _post(server: RunningServer, path: str, **body: Any) -> Any:
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _refused(server: RunningServer, path: str, status: int = 400, **body: Any) -> str:
    answer = server.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    return str(error["message"] if isinstance(error, dict) else error)


def test_openai_client_gets_the_vectors(server: RunningServer, vectors: np.ndarray) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)
    answer = client.embeddings.create(model="tiny", input=TEXTS)  # this client asks for base64
    np.testing.assert_allclose([each.embedding for each in answer.data], vectors, atol=1e-5)
    assert [each.index for each in answer.data] == list(range(len(TEXTS)))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)


def test_floats_base64_token_ids_dimensions_and_prompts(
    server: RunningServer, vectors: np.ndarray, embedder_path: Path
) -> None:
    plain = _post(server, "/v1/embeddings", input=TEXTS[0])["data"][0]["embedding"]
    np.testing.assert_allclose(plain, vectors[0], atol=1e-5)
    coded = _post(server, "/v1/embeddings", input=[TEXTS[0]], encoding_format="base64")["data"][0]["embedding"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(coded), "<f4"), vectors[0], atol=1e-5)
    short = np.array(_post(server, "/v1/embeddings", input=TEXTS[0], dimensions=8)["data"][0]["embedding"])
    np.testing.assert_allclose(short, vectors[0, :8] / np.linalg.norm(vectors[0, :8]), atol=1e-5)
    with Embedder(embedder_path) as embedder:
        ids = embedder.parts.tokenizer.encode(TEXTS[0])
        raw, asked = embedder.embed(TEXTS[0])[0], embedder.embed(TEXTS[0], prompt_name="query", normalize=True)[0]
    from_ids = _post(server, "/v1/embeddings", input=[ids, ids])["data"]
    np.testing.assert_allclose([each["embedding"] for each in from_ids], vectors[[0, 0]], atol=1e-5)
    as_made = _post(server, "/v1/embeddings", input=TEXTS[0], normalize=False)["data"][0]["embedding"]
    np.testing.assert_allclose(as_made, raw, atol=1e-5)
    prompted = _post(server, "/v1/embeddings", input=TEXTS[0], prompt_name="query")["data"][0]["embedding"]
    np.testing.assert_allclose(prompted, asked, atol=1e-5)


def test_ollama(server: RunningServer, vectors: np.ndarray) -> None:
    answer = _post(server, "/api/embed", model="tiny", input=TEXTS)
    np.testing.assert_allclose(answer["embeddings"], vectors, atol=1e-5)
    assert answer["prompt_eval_count"] > len(TEXTS)
    single = _post(server, "/api/embeddings", model="tiny", prompt=TEXTS[2])
    np.testing.assert_allclose(single["embedding"], vectors[2], atol=1e-5)
    long = " ".join(TEXTS * 2)
    assert len(_post(server, "/api/embed", input=[long])["embeddings"][0]) == 48  # Ollama cuts what is too long
    assert "64" in _refused(server, "/api/embed", input=[long], truncate=False)


def test_bad_input_is_one_clear_error(server: RunningServer) -> None:
    long = " ".join(TEXTS * 2)
    assert "empty" in _refused(server, "/v1/embeddings", input="")
    assert "empty" in _refused(server, "/v1/embeddings", input=["a", []])
    assert "0 texts" in _refused(server, "/v1/embeddings", input=[])
    assert "2049 texts" in _refused(server, "/v1/embeddings", input=["a"] * 2049)
    assert "holds 64" in _refused(server, "/v1/embeddings", input=long)
    assert "vocabulary" in _refused(server, "/v1/embeddings", input=[10**6])
    assert "8, 16" in _refused(server, "/v1/embeddings", input="a", dimensions=12)
    assert "1 to 48" in _refused(server, "/v1/embeddings", input="a", dimensions=49)
    assert "query" in _refused(server, "/v1/embeddings", input="a", prompt_name="quey")
    assert "truncate_prompt_tokens" in _refused(server, "/v1/embeddings", input="a", truncate_prompt_tokens=100)
    cut = _post(server, "/v1/embeddings", input=long, truncate_prompt_tokens=-1)
    assert cut["usage"]["prompt_tokens"] == 64
    assert cut["usage"]["prompt_tokens_details"]["truncated_tokens"] > 0
    assert (
        server.http.post("/v1/embeddings", json={"input": "a"}, headers={"authorization": "Bearer x"}).status_code
        == 401
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/classify", {"input": "a"}),
        ("/api/generate", {"prompt": "a"}),
    ],
)
def test_a_route_for_another_kind_of_model_says_which_to_use(
    server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    assert "/v1/embeddings" in _refused(server, path, **body)


def test_models_metrics_and_many_texts_in_one_request(server: RunningServer, vectors: np.ndarray) -> None:
    found = server.http.get("/v1/models").json()["data"][0]
    assert found["max_model_len"] == 64
    assert found["tokenmill"]["task"] == "embed"
    data = _post(server, "/v1/embeddings", input=TEXTS * 40)["data"]
    np.testing.assert_allclose([each["embedding"] for each in data[-len(TEXTS) :]], vectors, atol=1e-5)
    assert server.http.get("/readyz").status_code == 200
    metrics = server.http.get("/metrics").text
    assert "tokenmill_engine_steps_total" in metrics
    server.wait_idle()


def test_a_cross_encoder(tmp_path: Path) -> None:
    path = save_classifier(tmp_path / "cross", "bert")
    query, documents = PAIRS[0][0], [pair[1] for pair in PAIRS[:5]]
    with Embedder(path) as embedder:
        wanted = embedder.score(query, documents)
    order = sorted(range(5), key=lambda number: -wanted[number])
    with serving(path) as running:
        for route in ("/v1/rerank", "/rerank", "/v2/rerank"):
            results = _post(running, route, query=query, documents=documents)["results"]
            assert [each["index"] for each in results] == order
            assert results[0]["document"] == {"text": documents[order[0]]}
            np.testing.assert_allclose([each["relevance_score"] for each in results], sorted(wanted)[::-1], atol=1e-5)
        objects = [{"text": text} for text in documents]
        best = _post(running, "/v1/rerank", query=query, documents=objects, top_n=2, return_documents=False)
        assert [set(each) for each in best["results"]] == [{"index", "relevance_score"}] * 2
        scores = _post(running, "/v1/score", text_1=query, text_2=documents)["data"]
        np.testing.assert_allclose([each["score"] for each in scores], wanted, atol=1e-5)
        each_with_its_own = _post(running, "/v1/score", text_1=[query] * 5, text_2=documents)["data"]
        # Up to the order of sums: texts that arrive while a step runs are computed with the next.
        np.testing.assert_allclose(
            [each["score"] for each in each_with_its_own], [each["score"] for each in scores], atol=1e-6
        )
        labels = _post(running, "/v1/classify", input=documents)["data"]
        assert {each["label"] for each in labels} == {"LABEL_0"}
        assert "text_1 has 2" in _refused(running, "/v1/score", text_1=["a", "b"], text_2=["c", "d", "e"])
        assert "document" in _refused(running, "/v1/rerank", query="a", documents=[1])
        assert "documents" in _refused(running, "/v1/rerank", query="a", documents=[])
        assert "/v1/rerank" in _refused(running, "/v1/embeddings", input="a")
        assert "/v1/rerank" in _refused(running, "/v1/completions", prompt="a")
        long = " ".join(TEXTS * 3)
        assert "holds 64" in _refused(running, "/v1/rerank", query="a", documents=[long])
        cut = _post(running, "/v1/rerank", query="a", documents=[long], max_tokens_per_doc=4096)
        assert cut["usage"]["prompt_tokens"] == 64


def test_a_causal_reranker(tmp_path: Path) -> None:
    path = save_reranker(tmp_path / "causal")
    with LLM(path) as llm:
        wanted = llm.score(TEXTS[0], TEXTS[:3])
        instructed = llm.score(TEXTS[0], TEXTS[:1], instruction="Find rain")
    with serving(path) as running:
        scores = _post(running, "/v1/score", text_1=TEXTS[0], text_2=TEXTS[:3])["data"]
        np.testing.assert_allclose([each["score"] for each in scores], wanted, atol=1e-4)
        answer = _post(running, "/v1/rerank", query=TEXTS[0], documents=TEXTS[:1], instruction="Find rain")
        np.testing.assert_allclose(answer["results"][0]["relevance_score"], instructed[0], atol=1e-4)
        assert "together" in _refused(running, "/v1/rerank", 413, query="a" * 100_000, documents=["b"] * 200)
        assert "/v1/rerank" in _refused(running, "/v1/completions", prompt="a")
