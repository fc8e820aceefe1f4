"""Vectors, scores and labels equal to sentence-transformers' and transformers', for a tiny model of each kind and for
the real all-MiniLM-L6-v2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.embedding_models import (
    CLASSIFIERS,
    DECODERS,
    ENCODERS,
    PAIRS,
    TEXTS,
    save_classifier,
    save_embedder,
    save_reranker,
)
from tokenmill import LLM, Embedder
from tokenmill.engine.embedding.inputs import DEFAULT_INSTRUCTION

sentence_transformers = pytest.importorskip("sentence_transformers")
_BOUND = 1e-4


def _difference(found: np.ndarray, wanted: Any) -> float:
    assert found.shape == np.asarray(wanted).shape
    assert found.dtype == np.float32
    return float(np.abs(found - np.asarray(wanted)).max())


def _oracle(path: Path) -> Any:
    return sentence_transformers.SentenceTransformer(str(path), device="cpu")


@pytest.mark.parametrize("kind", ENCODERS + DECODERS)
def test_vectors_of_each_kind(tmp_path: Path, kind: str) -> None:
    path = save_embedder(tmp_path / kind, kind, prompts={"query": "Who wrote: "})
    oracle = _oracle(path)
    with Embedder(path, batch_tokens=64) as embedder:
        assert embedder.dimension == 48
        assert _difference(embedder.embed(TEXTS), oracle.encode(TEXTS)) < _BOUND
        wanted = oracle.encode(TEXTS[:3], prompt_name="query")
        assert _difference(embedder.embed(TEXTS[:3], prompt_name="query"), wanted) < _BOUND
        assert embedder.embed([]).shape[0] == 0
    alone = oracle.encode(TEXTS[2])
    with Embedder(path) as embedder:
        assert _difference(embedder.embed(TEXTS[2])[0], alone) < _BOUND


@pytest.mark.parametrize(
    "pooling",
    [
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True},
        {"pooling_mode": ["mean_sqrt_len_tokens", "weightedmean", "lasttoken", "cls"]},
    ],
)
def test_every_pooling_with_and_without_normalisation(tmp_path: Path, pooling: dict[str, Any]) -> None:
    for normalize in (True, False):
        path = save_embedder(tmp_path / str(normalize), "bert", pooling, normalize)
        with Embedder(path) as embedder:
            assert _difference(embedder.embed(TEXTS), _oracle(path).encode(TEXTS)) < 10 * _BOUND


def test_a_dense_layer_and_shorter_vectors(tmp_path: Path) -> None:
    path = save_embedder(tmp_path, "bert", dense=32, config={"is_matryoshka": True})
    oracle = _oracle(path)
    with Embedder(path) as embedder:
        assert _difference(embedder.embed(TEXTS), oracle.encode(TEXTS)) < _BOUND
        wanted = oracle.encode(TEXTS, truncate_dim=8, normalize_embeddings=True)
        assert _difference(embedder.embed(TEXTS, dimensions=8), wanted) < _BOUND


@pytest.mark.parametrize("kind", ["modernbert", "qwen3"])
def test_texts_that_are_too_long_are_cut_alike(tmp_path: Path, kind: str) -> None:
    path = save_embedder(tmp_path, kind, max_tokens=24)
    texts = [" ".join(TEXTS), TEXTS[1], TEXTS[5]]
    with Embedder(path) as embedder:
        assert _difference(embedder.embed(texts), _oracle(path).encode(texts)) < _BOUND


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_scores_equal_those_of_a_cross_encoder(tmp_path: Path, kind: str) -> None:
    path = save_classifier(tmp_path, kind)
    oracle = sentence_transformers.CrossEncoder(str(path), device="cpu")
    with Embedder(path, batch_tokens=200) as embedder:
        found = np.array(embedder.score_pairs(PAIRS), dtype=np.float32)
        assert _difference(found, oracle.predict(PAIRS)) < _BOUND
        found = np.array(embedder.score(TEXTS[0], TEXTS), dtype=np.float32)
        assert _difference(found, oracle.predict([(TEXTS[0], text) for text in TEXTS])) < _BOUND
        long = (" ".join(TEXTS[:4]), " ".join(TEXTS))
        found = np.array(embedder.score_pairs([long]), dtype=np.float32)
        assert _difference(found, oracle.predict([long])) < _BOUND


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_labels_equal_those_of_transformers(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    labels = ("good", "bad", "neither")
    path = save_classifier(tmp_path, kind, labels)
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForSequenceClassification.from_pretrained(path)
    encoded = tokenizer(TEXTS, padding=True, return_tensors="pt", truncation=True)
    with torch.no_grad():
        wanted = model(**encoded).logits.softmax(-1)
    with Embedder(path) as embedder:
        found = embedder.classify(TEXTS)
    assert [tuple(each) for each in found] == [labels] * len(TEXTS)
    np.testing.assert_allclose([list(each.values()) for each in found], wanted, atol=_BOUND)


def test_a_causal_reranker_compares_yes_with_no(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = save_reranker(tmp_path)
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    behind = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    answers = [tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no")]
    wanted = []
    for text in TEXTS:
        asked = f"<Instruct>: {DEFAULT_INSTRUCTION}\n<Query>: {TEXTS[3]}\n<Document>: {text}"
        ids = [i for part in (before, asked, behind) for i in tokenizer.encode(part, add_special_tokens=False)]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        wanted.append(torch.sigmoid(logits[answers[0]] - logits[answers[1]]).item())
    with LLM(path) as llm:
        np.testing.assert_allclose(llm.score(TEXTS[3], TEXTS), wanted, atol=_BOUND)


def test_vectors_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    path = save_embedder(tmp_path, "modernbert")
    with Embedder(path, batch_tokens=48) as small, Embedder(path, batch_tokens=4096) as large:
        together, parts = large.embed(TEXTS * 3), small.embed(TEXTS * 3)
        alone = np.concatenate([large.embed(text) for text in TEXTS * 3])
    assert np.abs(together - parts).max() < 1e-6
    assert np.abs(together - alone).max() < 1e-6


def test_the_real_model(model_path: Callable[[str], Path]) -> None:
    path = model_path("all-minilm-l6-v2")
    texts = [*TEXTS, "", " ".join(TEXTS * 4)]
    with Embedder("minilm") as embedder:
        assert _difference(embedder.embed(texts), _oracle(path).encode(texts)) < _BOUND
