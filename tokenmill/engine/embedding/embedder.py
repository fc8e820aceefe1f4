"""The offline face of embedding and reranking models: texts in, vectors, scores or labels out, in one process.

`Embedder(model).embed(texts)` gives what sentence-transformers' `encode` gives, `.score(query, texts)` what a
CrossEncoder gives. An encoder computes packed batches; a causal model runs in the usual engine, where prompts with a
common beginning are computed once. Called from Python, by the CLI and by benchmarks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenmill.checkpoint.embedding_files import EmbeddingSettings, read_settings
from tokenmill.checkpoint.sources import resolve
from tokenmill.config import EngineConfig
from tokenmill.engine.build import EngineParts, build_engine, one_engine
from tokenmill.engine.embedding.build import EncoderParts, build_encoder, is_encoder
from tokenmill.engine.embedding.inputs import Input, InputMaker, probabilities, score_of
from tokenmill.engine.loop import EngineLoop
from tokenmill.errors import UserError
from tokenmill.log import get_logger
from tokenmill.model.encoders.packed import Text
from tokenmill.types import SamplingParams, TokenEvent

_log = get_logger(__name__)
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
TextOrIds = str | Sequence[int]


class Embedder:
    def __init__(self, model: str | Path = "minilm", config: EngineConfig | None = None, **options: Any) -> None:
        """`options` are the fields of EngineConfig; `config` is the ready record instead."""
        if config is not None and options:
            raise UserError("both config and options are given", "put the options into the config")
        path, config = resolve(str(model)).path, one_engine(config or EngineConfig.from_options(options))
        self._use(build_encoder(path, config) if is_encoder(path) else build_engine(path, config))

    @classmethod
    def over(cls, parts: EngineParts) -> Embedder:
        """An embedder that borrows an engine, which must be idle."""
        embedder = cls.__new__(cls)
        embedder._use(parts)
        return embedder

    def _use(self, parts: EngineParts | EncoderParts) -> None:
        self._parts: EngineParts | EncoderParts | None = parts
        self.settings: EmbeddingSettings | None = read_settings(parts.path)
        self._inputs = InputMaker(parts.tokenizer, self.settings, parts.config.context)

    @property
    def parts(self) -> EngineParts | EncoderParts:
        if self._parts is None:
            raise UserError("this Embedder is closed", "make a new one")
        return self._parts

    @property
    def dimension(self) -> int:
        """Of a vector."""
        description = self.parts.description
        return self.settings.dimension if self.settings is not None else description.hidden_size

    def embed(
        self,
        texts: TextOrIds | Sequence[TextOrIds],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalize: bool = False,
        truncate: bool = True,
    ) -> np.ndarray:
        """[texts, dimension] float32. A text may be given as token ids, with the special ones. `prompt` goes before
        each text, or the model's own of that name; `normalize`: to length one, also where the model does not do so;
        `truncate`: texts that are too long are cut, else an error."""
        self._require("embed")
        settings = self.settings or EmbeddingSettings("embed", ("lasttoken",), True, dimension=self.dimension)
        dimension = settings.check_dimensions(dimensions)
        vectors = self._compute(self._texts(texts, settings.prompt(prompt_name, prompt), truncate), settings)
        if vectors.shape[0] and (dimension < vectors.shape[1] or normalize):
            vectors = vectors[:, :dimension]
            if normalize or settings.normalize:
                vectors = torch.nn.functional.normalize(vectors, dim=-1)
        found: np.ndarray = vectors.contiguous().numpy()
        return found

    def score(
        self, query: str, texts: str | Sequence[str], *, instruction: str | None = None, truncate: bool = True
    ) -> list[float]:
        """How well each text answers the query, as a cross-encoder or a causal reranker says."""
        batch = [texts] if isinstance(texts, str) else list(texts)
        return self.score_pairs([(query, text) for text in batch], instruction=instruction, truncate=truncate)

    def score_pairs(
        self, pairs: Sequence[tuple[str, str]], *, instruction: str | None = None, truncate: bool = True
    ) -> list[float]:
        self._require("classify", "rerank")
        assert self.settings is not None
        inputs, limit, tokenizer = self._inputs, self._limit(truncate), self.parts.tokenizer
        if inputs.has_template:
            texts = [inputs.framed(query, text, instruction) for query, text in pairs]
            found = [inputs.question(ids, limit) for ids in tokenizer.encode_batch(texts, add_special_tokens=False)]
            logits = self._generate(found, inputs.score_ids())
        else:
            if instruction is not None:
                raise UserError("a cross-encoder takes no instruction", "leave it out")
            ids = tokenizer.encode_batch([text for pair in pairs for text in pair], add_special_tokens=False)
            found = [inputs.pair(ids[2 * n], ids[2 * n + 1], limit) for n in range(len(pairs))]
            logits = self._compute(found, self.settings).tolist()
        return [score_of(self.settings, each) for each in logits]

    def classify(self, texts: TextOrIds | Sequence[TextOrIds], *, truncate: bool = True) -> list[dict[str, float]]:
        """Of each text the probability of every label."""
        self._require("classify")
        assert self.settings is not None
        logits = self._compute(self._texts(texts, "", truncate), self.settings).tolist()
        return [dict(zip(self.settings.labels, probabilities(self.settings, each), strict=True)) for each in logits]

    def close(self) -> None:
        if self._parts is not None:
            self._parts.close()
        self._parts = None

    def __enter__(self) -> Embedder:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    # --- how ---

    def _require(self, *kinds: str) -> None:
        kind = self.settings.kind if self.settings is not None else "embed"
        if kind not in kinds:
            uses = {"embed": "embed", "classify": "score or classify", "rerank": "score"}
            raise UserError(f"{self.parts.path.name} is not a model for this", f"use {uses[kind]}")

    def _limit(self, truncate: bool) -> int | None:
        return self._inputs.max_tokens if truncate else None

    def _texts(self, texts: TextOrIds | Sequence[TextOrIds], prompt: str, truncate: bool) -> list[Input]:
        batch = _as_batch(texts)
        written = [self._inputs.prepared(each, prompt) for each in batch if isinstance(each, str)]
        encoded = iter(self.parts.tokenizer.encode_batch(written))
        limit = self._limit(truncate)
        ids = [next(encoded) if isinstance(each, str) else self._checked(each) for each in batch]
        return [self._inputs.text(each, limit) for each in ids]

    def _checked(self, ids: Sequence[int]) -> list[int]:
        size = self.parts.description.vocab_size
        if not all(isinstance(each, int) and 0 <= each < size for each in ids):
            raise UserError("a text has token ids outside the vocabulary", f"give 0 to {size - 1}")
        return list(ids)

    def _compute(self, inputs: list[Input], settings: EmbeddingSettings) -> Tensor:
        """[inputs, dimension] float32: vectors as the model makes them, or logits."""
        cut = sum(each.cut > 0 for each in inputs)
        if cut:
            _log.warning("%d of %d texts were cut to %d tokens", cut, len(inputs), self._inputs.max_tokens)
        if not inputs:
            return torch.empty(0, settings.dimension)
        if isinstance(self.parts, EncoderParts):
            return self.parts.runner.run_all([Text(each.token_ids, each.second) for each in inputs])
        vectors = torch.tensor(self._generate(inputs), dtype=torch.float32).view(len(inputs), -1)
        return torch.nn.functional.normalize(vectors, dim=-1) if settings.normalize else vectors

    def _generate(self, inputs: list[Input], score_ids: tuple[int, ...] = ()) -> list[list[float]]:
        """The states (or logits) of the last tokens, by the engine of causal models."""
        parts = self.parts
        assert isinstance(parts, EngineParts)
        collected = _Collected()
        loop = EngineLoop(parts.core, collected, adapters=parts.adapters)
        ids = []
        try:
            for each in inputs:
                request = parts.intake.request(each.token_ids, _PARAMS, embeds=True)
                request.score_ids = score_ids
                ids.append(request.request_id)
                loop.submit(request)
            loop.drain()
        except BaseException:
            for request_id in ids:  # the engine must be clean for the next call
                loop.cancel(request_id)
            raise
        return [collected.found[request_id] for request_id in ids]


class _Collected:
    """Takes the vector of each request."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}

    def on_events(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.embedding:
                self.found[event.request_id] = event.embedding

    def on_refused(self, request_id: str, error: UserError) -> None:  # noqa: ARG002
        raise error


def _as_batch(texts: TextOrIds | Sequence[TextOrIds]) -> list[TextOrIds]:
    if isinstance(texts, str) or (len(texts) and isinstance(texts[0], int)):
        return [texts]  # type: ignore[list-item]
    return list(texts)  # type: ignore[arg-type]
