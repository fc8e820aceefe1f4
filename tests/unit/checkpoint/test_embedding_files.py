"""What the files of embedding models say, and one clear error for what is not supported or damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokenmill.checkpoint.configs.encoders import canonical_name, describe_encoder
from tokenmill.checkpoint.embedding_files import EmbeddingSettings, read_encoder, read_settings
from tokenmill.errors import CheckpointError, UserError

_BERT = {"model_type": "bert", "hidden_size": 384, "num_attention_heads": 12, "num_hidden_layers": 6}
_POOLING = {"word_embedding_dimension": 384, "pooling_mode_cls_token": True}


def _write(folder: Path, files: dict[str, Any]) -> Path:
    for name, value in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def _modules(*kinds: str) -> list[dict[str, Any]]:
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    return [{"idx": n, "path": paths.get(kind, kind), "type": f"any.where.{kind}"} for n, kind in enumerate(kinds)]


def test_an_embedding_model(tmp_path: Path) -> None:
    files = {
        "config.json": {**_BERT, "matryoshka_dimensions": [64, 128]},
        "modules.json": _modules("Transformer", "Pooling", "Normalize"),
        "1_Pooling/config.json": _POOLING,
        "sentence_bert_config.json": {"max_seq_length": 256},
        "config_sentence_transformers.json": {"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": None},
    }
    settings = read_settings(_write(tmp_path, files))
    assert settings is not None
    assert (settings.kind, settings.pooling, settings.normalize) == ("embed", ("cls",), True)
    assert (settings.dimension, settings.matryoshka, settings.max_tokens) == (384, (64, 128), 256)
    assert settings.prompt("query", None) == "q: "
    assert settings.prompt(None, None) == ""
    assert settings.check_dimensions(None) == 384
    assert settings.check_dimensions(64) == 64


def test_an_encoder_without_modules_is_pooled_by_the_mean(tmp_path: Path) -> None:
    settings = read_settings(_write(tmp_path, {"config.json": _BERT}))
    assert settings is not None
    assert (settings.pooling, settings.normalize) == (("mean",), False)


def test_a_generating_model_has_no_settings_unless_its_name_says_reranker(tmp_path: Path) -> None:
    config = {"config.json": {"model_type": "qwen3", "hidden_size": 64}}
    assert read_settings(_write(tmp_path / "plain", config)) is None
    named = read_settings(_write(tmp_path / "Qwen3-Reranker-0.6B", config))
    assert named is not None
    assert (named.kind, named.score_tokens) == ("rerank", ("yes", "no"))
    assert read_encoder(tmp_path / "plain") is None


@pytest.mark.parametrize(
    ("dimensions", "matryoshka", "problem"),
    [(64, None, "not trained for shorter"), (100, (64, 128), "64, 128"), (0, (), "1 to 384"), (400, (), "1 to 384")],
)
def test_dimensions_that_are_refused(dimensions: int, matryoshka: tuple[int, ...] | None, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        EmbeddingSettings("embed", dimension=384, matryoshka=matryoshka).check_dimensions(dimensions)


def test_an_unknown_prompt_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="query"):
        EmbeddingSettings("embed", prompts={"query": "q: "}).prompt("qery", None)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"modules.json": _modules("Transformer", "CNN")}, "CNN"),
        ({"modules.json": "{"}, "modules.json"),
        ({"modules.json": {"a": 1}}, "not a list"),
        ({"modules.json": [{"path": "../elsewhere", "type": "a.Pooling"}]}, "leaves the model"),
        ({"modules.json": _modules("Pooling"), "1_Pooling/config.json": {"pooling_mode": "sum"}}, "'sum'"),
        ({"modules.json": _modules("Pooling"), "1_Pooling/config.json": {"include_prompt": False}}, "prompt"),
        ({"config.json": {**_BERT, "hidden_act": "mish"}}, "mish"),
        ({"config.json": {**_BERT, "position_embedding_type": "relative_key"}}, "relative"),
        ({"config.json": {**_BERT, "num_attention_heads": 7}}, "7 heads"),
        ({"config.json": {**_BERT, "num_hidden_layers": "six"}}, "num_hidden_layers"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, files: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        read_settings(_write(tmp_path, {"config.json": _BERT, **files}))


def test_windows_and_thetas_of_old_and_new_configs() -> None:
    old = {"model_type": "modernbert", "num_hidden_layers": 4, "global_attn_every_n_layers": 3, "local_attention": 128}
    new = {
        "model_type": "modernbert",
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": {"rope_theta": 160000.0}, "sliding_attention": {"rope_theta": 10000.0}},
    }
    for config in (old, new):
        found = describe_encoder(config)
        assert found.windows == (0, 64, 64, 0)
        assert found.rope_thetas == (160000.0, 10000.0, 10000.0, 160000.0)


def test_stored_names_of_old_files_and_of_heads() -> None:
    assert canonical_name("bert", "bert.embeddings.LayerNorm.gamma") == "embeddings.norm.weight"
    assert canonical_name("bert", "encoder.layer.3.output.dense.bias") == "layers.3.down.bias"
    assert canonical_name("nomic_bert", "encoder.layers.2.mlp.fc12.weight") == "layers.2.gate.weight"
    assert canonical_name("roberta", "classifier.out_proj.weight") == "head.out.weight"
    assert canonical_name("bert", "cls.predictions.decoder.weight") is None
