"""Tiny random embedding and reranking models in the files that sentence-transformers reads: weights by transformers,
tokenizers trained on a few lines, modules.json written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    MistralConfig,
    MistralModel,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertModel,
    NomicBertConfig,
    NomicBertModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "rain",
    "A train from Basel to Berlin takes about seven hours, and it is seldom on time.",
    "Who wrote the book that everybody talks about?",
    "It is raining in Bergen",
    "The cat sat on the mat and looked at the dog, who looked back; nothing else happened that day, or the next.",
    "Ünïcödé, emoji 🙂 and 漢字 too",
    "Stocks fell on Monday after the bank raised its rates.",
]
PAIRS = [(TEXTS[3], text) for text in TEXTS] + [(TEXTS[5], TEXTS[5])]
_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "max_position_embeddings": 70,
}
_DECODER_SIZES = _SIZES | {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert")
DECODERS = ("qwen3", "mistral")
CLASSIFIERS = ("bert", "roberta", "xlm-roberta", "modernbert")


def save_embedder(
    folder: Path,
    kind: str,
    pooling: Mapping[str, Any] | None = None,
    normalize: bool = True,
    dense: int = 0,
    prompts: Mapping[str, str] | None = None,
    max_tokens: int | None = 64,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A model of `kind` with random weights; `dense`: width of a projection behind the pooling."""
    torch.manual_seed(len(kind))
    is_decoder = kind in DECODERS
    tokenizer = save_tokenizer(folder, kind, max_tokens)
    vocabulary = len(tokenizer)
    model = {
        "bert": lambda: BertModel(BertConfig(vocab_size=vocabulary, **_SIZES), add_pooling_layer=False),
        "roberta": lambda: RobertaModel(RobertaConfig(vocab_size=vocabulary, **_SIZES), add_pooling_layer=False),
        "xlm-roberta": lambda: XLMRobertaModel(XLMRobertaConfig(vocab_size=vocabulary, **_SIZES)),
        "modernbert": lambda: ModernBertModel(_modern_config(vocabulary)),
        "nomic_bert": lambda: NomicBertModel(NomicBertConfig(vocab_size=vocabulary, **_SIZES)),
        "qwen3": lambda: Qwen3Model(Qwen3Config(vocab_size=vocabulary, **_DECODER_SIZES)),
        "mistral": lambda: MistralModel(MistralConfig(vocab_size=vocabulary, sliding_window=None, **_DECODER_SIZES)),
    }[kind]()
    _save(model, folder)
    if config:
        _change_json(folder / "config.json", config)
    modules = [("", "sentence_transformers.models.Transformer"), ("1_Pooling", "sentence_transformers.models.Pooling")]
    usual = {"pooling_mode_lasttoken": True} if is_decoder else {"pooling_mode_mean_tokens": True}
    _write(folder / "1_Pooling/config.json", {"word_embedding_dimension": 48, **(pooling or usual)})
    if dense:
        from safetensors.torch import save_file

        activation = "torch.nn.modules.activation.Tanh"
        own = {"in_features": 48, "out_features": dense, "bias": True, "activation_function": activation}
        _write(folder / "2_Dense/config.json", own)
        weights = {"linear.weight": torch.randn(dense, 48) / 5, "linear.bias": torch.randn(dense)}
        save_file(weights, folder / "2_Dense/model.safetensors")
        modules.append(("2_Dense", "sentence_transformers.models.Dense"))
    if normalize:
        modules.append(("9_Normalize", "sentence_transformers.models.Normalize"))
    listed = [{"idx": n, "name": str(n), "path": path, "type": type_} for n, (path, type_) in enumerate(modules)]
    _write(folder / "modules.json", listed)
    _write(folder / "sentence_bert_config.json", {"max_seq_length": max_tokens, "do_lower_case": False})
    _write(folder / "config_sentence_transformers.json", {"prompts": dict(prompts or {})})
    return folder


def save_classifier(folder: Path, kind: str, labels: Sequence[str] = ("LABEL_0",), **config: Any) -> Path:
    """A sequence classifier; with one label it is a cross-encoder."""
    torch.manual_seed(7 + len(kind))
    vocabulary = len(save_tokenizer(folder, kind, 64))
    named = {"id2label": dict(enumerate(labels)), "label2id": {label: n for n, label in enumerate(labels)}, **config}
    model = {
        "bert": lambda: BertForSequenceClassification(BertConfig(vocab_size=vocabulary, **_SIZES, **named)),
        "roberta": lambda: RobertaForSequenceClassification(RobertaConfig(vocab_size=vocabulary, **_SIZES, **named)),
        "xlm-roberta": lambda: XLMRobertaForSequenceClassification(
            XLMRobertaConfig(vocab_size=vocabulary, **_SIZES, **named)
        ),
        "modernbert": lambda: ModernBertForSequenceClassification(_modern_config(vocabulary, **named)),
    }[kind]()
    _save(model, folder)
    return folder


def save_reranker(folder: Path) -> Path:
    """A causal model that answers yes or no."""
    torch.manual_seed(3)
    tokenizer = save_tokenizer(folder, "qwen3", 512)
    _save(Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **_DECODER_SIZES)), folder)
    _change_json(folder / "config.json", {"classifier_from_token": ["no", "yes"]})
    return folder


def save_tokenizer(folder: Path, kind: str, max_tokens: int | None) -> PreTrainedTokenizerFast:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [*TEXTS, *(" ".join(pair) for pair in PAIRS), "yes no yes no <Instruct>: <Query>: <Document>:"]
    if kind in ("bert", "nomic_bert"):
        backend, names = _word_piece(lines), ("[CLS]", "[SEP]", "[PAD]", "[UNK]")
    elif kind == "xlm-roberta":
        backend, names = _unigram(lines), ("<s>", "</s>", "<pad>", "<unk>")
    elif kind in DECODERS:
        backend, names = _byte_level(lines, decoder=True), ("<|im_start|>", "<|im_end|>", "<|endoftext|>", None)
    else:
        backend, names = _byte_level(lines), ("<s>", "</s>", "<pad>", "<unk>")
    first, last, pad, unknown = names
    special: dict[str, Any] = {"pad_token": pad, "unk_token": unknown, "eos_token": pad if kind in DECODERS else last}
    if kind not in DECODERS:
        special |= {"cls_token": first, "sep_token": last, "bos_token": first}
    inputs = ["input_ids", "attention_mask"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"]
        if kind in ("bert", "nomic_bert")
        else inputs,
        model_max_length=max_tokens or 1024,
        padding_side="left" if kind in DECODERS else "right",
        **{name: token for name, token in special.items() if token is not None},
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def _word_piece(lines: Sequence[str]) -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend.train_from_iterator(lines, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special))
    _frame(backend, "[CLS]", "[SEP]", "[SEP]", types=True)
    return backend


def _unigram(lines: Sequence[str]) -> Tokenizer:
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>")
    backend.train_from_iterator(lines, trainer)
    _frame(backend, "<s>", "</s></s>", "</s>")
    return backend


def _byte_level(lines: Sequence[str], decoder: bool = False) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] if decoder else ["<s>", "<pad>", "</s>", "<unk>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator([*lines, *(["yes", "no"] * 50)], trainer)
    if decoder:
        end = ("<|endoftext|>", backend.token_to_id("<|endoftext|>"))
        backend.post_processor = processors.TemplateProcessing(single="$A <|endoftext|>", special_tokens=[end])
    else:
        _frame(backend, "<s>", "</s></s>", "</s>")
    return backend


def _frame(backend: Tokenizer, first: str, middle: str, last: str, types: bool = False) -> None:
    tokens = [(each, backend.token_to_id(each)) for each in dict.fromkeys((first, last))]
    between = " ".join([last] * (len(middle) // len(last)))
    second = ":1" if types else ""
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", pair=f"{first} $A {between} $B{second} {last}{second}", special_tokens=tokens
    )


def _modern_config(vocabulary: int, **more: Any) -> ModernBertConfig:
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}
    return ModernBertConfig(vocab_size=vocabulary, local_attention=8, **_SIZES, **ids, **more)


def _save(model: Any, folder: Path) -> None:
    with torch.no_grad():
        for parameter in model.parameters():  # the usual beginning is too small to tell mistakes from rounding
            parameter.add_(torch.randn_like(parameter) * 0.08)
    model.eval().save_pretrained(folder)


def _write(file: Path, value: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value))


def _change_json(file: Path, changes: Mapping[str, Any]) -> None:
    _write(file, json.loads(file.read_text()) | dict(changes))
