"""What a model's files say about its use for embeddings and reranking: sentence-transformers' modules.json and what it
names, config_sentence_transformers.json, sentence_bert_config.json.

Gives one record, `EmbeddingSettings`; which weights a dense layer has is left to the loader. Imports no torch: the HTTP
process reads the same record as the engine process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenmill.checkpoint.configs.encoders import EncoderDescription, describe_encoder, is_encoder
from tokenmill.checkpoint.fields import Fields
from tokenmill.errors import CheckpointError, UserError, unknown_name

POOLINGS = ("cls", "mean", "max", "lasttoken", "mean_sqrt_len_tokens", "weightedmean")
_REMEDY = "download the model again, or correct the file"
_LEGACY_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_NO_LIMIT = 10**9  # tokenizer_config.json writes 1e30 where there is none
_MAX_CONFIG_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A projection behind the pooling: its folder, and what follows it ("identity", "tanh", ...)."""

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class EmbeddingSettings:
    """How the vectors (or scores) of a model are made from its token states."""

    kind: str  # "embed" | "classify" (one text or a pair -> labels) | "rerank" (a causal model: yes and no)
    pooling: tuple[str, ...] = ("mean",)
    normalize: bool = False
    dense: tuple[DenseLayer, ...] = ()
    dimension: int = 0  # of a vector
    matryoshka: tuple[int, ...] | None = None  # shorter lengths that were trained; (): any; None: none
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    max_tokens: int = 0  # of a text; 0: what the model was trained for
    lower_case: bool = False
    labels: tuple[str, ...] = ()
    multi_label: bool = False
    score_activation: str = "sigmoid"  # of "classify" with one label, and of "rerank"
    score_tokens: tuple[str | int, ...] = ()  # of "rerank": what stands for yes, then for no

    @property
    def routes(self) -> str:
        """The HTTP routes for this kind of model."""
        return {"embed": "/v1/embeddings", "classify": "/v1/rerank or /v1/classify", "rerank": "/v1/rerank"}[self.kind]

    def prompt(self, name: str | None, text: str | None) -> str:
        """What goes before each text: a text of the caller, a named prompt of the model, or its default."""
        if text is not None and name is not None:
            raise UserError("both a prompt and the name of one are given", "give one of them")
        if text is not None:
            return text
        if name is None:
            return self.prompts.get(self.default_prompt, "")
        if name not in self.prompts:
            raise unknown_name("prompt", name, self.prompts)
        return self.prompts[name]

    def check_dimensions(self, wanted: int | None) -> int:
        """The length of a vector; a UserError where the model was not trained for the one that is wanted."""
        if wanted is None or wanted == self.dimension:
            return self.dimension
        if not 0 < wanted < self.dimension:
            raise UserError(f"dimensions is {wanted}, the model has {self.dimension}", f"give 1 to {self.dimension}")
        if self.matryoshka is None:
            problem = f"dimensions is {wanted}, but the model was not trained for shorter vectors than {self.dimension}"
            raise UserError(problem, 'leave it out; if it was, put "is_matryoshka": true into its config.json')
        if self.matryoshka and wanted not in self.matryoshka:
            sizes = ", ".join(map(str, self.matryoshka))
            raise UserError(f"dimensions is {wanted}, but the model was trained for {sizes}", "give one of them")
        return wanted


def read_encoder(path: Path) -> EncoderDescription | None:
    """The description, if the directory holds an encoder."""
    config = _read(Path(path) / "config.json") if Path(path).is_dir() else {}
    return describe_encoder(config) if is_encoder(config) else None


def read_settings(path: Path) -> EmbeddingSettings | None:
    """How the model at `path` is used for embeddings or scores; None for one that only generates."""
    path = Path(path)
    if not path.is_dir() or not (path / "config.json").is_file():
        return None
    config = _read(path / "config.json")
    encoder = describe_encoder(config) if is_encoder(config) else None
    modules = _modules(path)
    if encoder is not None and encoder.labels:
        return _classifier(path, encoder)
    if any(kind == "LogitScore" for kind, _ in modules):
        return _reranker(path, modules)
    if encoder is None and not any(kind == "Pooling" for kind, _ in modules):
        tokens = config.get("classifier_from_token")  # as vLLM marks such models: no, then yes
        if isinstance(tokens, list) and len(tokens) == 2:
            return _common(path, "rerank", score_tokens=(str(tokens[1]), str(tokens[0])))
        # Published causal rerankers are plain language models to their files: only their name tells.
        called_so = any("reranker" in part.lower() for part in path.resolve().parts[-3:])
        return _common(path, "rerank", score_tokens=("yes", "no")) if called_so else None
    return _embedder(path, config, encoder, modules)


def _embedder(
    path: Path, config: Mapping[str, Any], encoder: EncoderDescription | None, modules: list[tuple[str, str]]
) -> EmbeddingSettings:
    own = Fields(config, "config.json", _REMEDY)
    hidden = encoder.hidden_size if encoder is not None else own.integer("hidden_size")
    pooling: tuple[str, ...] = ("mean",) if encoder is not None else ("lasttoken",)
    dense: list[DenseLayer] = []
    normalize = False
    for kind, folder in modules:
        if kind == "Pooling":
            pooling = _pooling(_read(path / folder / "config.json"), f"{folder}/config.json")
        elif kind == "Dense":
            dense.append(_dense(_read(path / folder / "config.json"), folder))
        elif kind == "Normalize":
            normalize = True
        elif kind not in ("Transformer", "Dropout"):
            raise CheckpointError(f"modules.json: a module '{kind}' is not supported", "use another embedding model")
    if encoder is None and dense:
        raise CheckpointError("dense layers behind a causal model are not supported", "use another embedding model")
    if encoder is None and pooling != ("lasttoken",):
        raise CheckpointError(
            f"pooling '{'+'.join(pooling)}' of a causal model is not supported", "use one that pools the last token"
        )
    stated = config.get("matryoshka_dimensions")
    matryoshka = tuple(sorted(int(each) for each in stated)) if isinstance(stated, list) else None
    if matryoshka is None and config.get("is_matryoshka"):
        matryoshka = ()
    dimension = dense[-1].out_features if dense else len(pooling) * hidden
    return _common(
        path, "embed", pooling=pooling, normalize=normalize, dense=tuple(dense), dimension=dimension,
        matryoshka=matryoshka,
    )  # fmt: skip


def _classifier(path: Path, encoder: EncoderDescription) -> EmbeddingSettings:
    activation = encoder.score_activation or ("sigmoid" if len(encoder.labels) == 1 else "identity")
    if activation not in ("sigmoid", "identity"):
        raise CheckpointError(f"config.json: the activation '{activation}' of scores is not supported", _REMEDY)
    return _common(
        path, "classify", labels=encoder.labels, multi_label=encoder.multi_label, score_activation=activation,
        dimension=len(encoder.labels),
    )  # fmt: skip


def _reranker(path: Path, modules: list[tuple[str, str]]) -> EmbeddingSettings:
    folder = next(folder for kind, folder in modules if kind == "LogitScore")
    score = Fields(_read(path / folder / "config.json"), f"{folder}/config.json", _REMEDY)
    tokens: tuple[int, ...] = (score.integer("true_token_id", low=0),)
    if score.raw("false_token_id") is not None:
        tokens = (*tokens, score.integer("false_token_id", low=0))
    stated = Fields(_read(path / "config_sentence_transformers.json"), "config_sentence_transformers.json", _REMEDY)
    activation = stated.text("activation_fn", "torch.nn.modules.activation.Sigmoid").rpartition(".")[2].lower()
    return _common(path, "rerank", score_tokens=tokens, score_activation=activation)


def _common(path: Path, kind: str, **values: Any) -> EmbeddingSettings:
    """With what all kinds have: prompts and the longest text."""
    label = "config_sentence_transformers.json"
    stated = Fields(_read(path / label), label, _REMEDY)
    prompts = {name: text for name, text in stated.mapping("prompts").items() if isinstance(text, str) and text}
    transformer = Fields(_read(path / "sentence_bert_config.json"), "sentence_bert_config.json", _REMEDY)
    tokenizer = _read(path / "tokenizer_config.json")
    longest = transformer.raw("max_seq_length") or tokenizer.get("model_max_length")
    limit = int(longest) if isinstance(longest, (int, float)) and 0 < longest < _NO_LIMIT else 0
    return EmbeddingSettings(
        kind=kind,
        prompts=prompts,
        default_prompt=stated.text("default_prompt_name", ""),
        max_tokens=limit,
        lower_case=transformer.flag("do_lower_case", False),
        **values,
    )


def _pooling(config: Mapping[str, Any], label: str) -> tuple[str, ...]:
    fields = Fields(config, label, _REMEDY)
    stated = fields.raw("pooling_mode")
    if stated is None:
        modes = tuple(mode for key, mode in _LEGACY_POOLING.items() if fields.flag(key, False)) or ("mean",)
    else:
        modes = (stated,) if isinstance(stated, str) else tuple(stated)
    for mode in modes:
        if mode not in POOLINGS:
            raise CheckpointError(f"{label}: pooling '{mode}' is not supported", f"supported: {', '.join(POOLINGS)}")
    if not fields.flag("include_prompt", True):
        raise CheckpointError(f"{label}: pooling without the prompt is not supported", "use another embedding model")
    return modes


def _dense(config: Mapping[str, Any], folder: str) -> DenseLayer:
    fields = Fields(config, f"{folder}/config.json", _REMEDY)
    if fields.flag("use_residual", False):
        raise fields.error("a residual connection is not supported")
    activation = fields.text("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2].lower()
    if activation not in ("tanh", "identity", "relu", "gelu", "sigmoid"):
        raise fields.error(f"the activation '{activation}' is not supported")
    sizes = fields.integer("in_features"), fields.integer("out_features")
    return DenseLayer(folder, *sizes, fields.flag("bias", True), activation)


def _modules(path: Path) -> list[tuple[str, str]]:
    """(class, folder) of each module, in order; the class without the place that it is imported from."""
    file = path / "modules.json"
    if not file.is_file():
        return []
    entries = _load(file)
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        raise CheckpointError(f"{file} is not a list of modules", _REMEDY)
    found = []
    for entry in entries:
        folder = str(entry.get("path", ""))
        if Path(folder).is_absolute() or ".." in Path(folder).parts:
            raise CheckpointError(f"{file}: the path '{folder[:80]}' leaves the model", _REMEDY)
        found.append((str(entry.get("type", "")).rpartition(".")[2], folder))
    return found


def _read(file: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    if not file.is_file():
        return {}
    value = _load(file)
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is not a JSON object", _REMEDY)
    return value


def _load(file: Path) -> Any:
    try:
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise CheckpointError(f"{file} is too large for settings", _REMEDY)
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise CheckpointError(f"cannot read {file} as JSON", _REMEDY) from None
