"""The offline face: a batch of prompts in, a batch of outputs out, in one process.

`LLM(model, **options).generate(prompts, params)` in the shape vLLM users know. Translates prompts into requests and
events into outputs; the engine loop computes, text and stop strings are the collectors' work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tokenmill.config import EngineConfig
from tokenmill.engine.beam_search import BeamSearchParams, BeamSequence, beam_search
from tokenmill.engine.build import EngineParts, build_engine
from tokenmill.engine.collector import RequestCollector
from tokenmill.engine.core import EngineCore
from tokenmill.engine.intake import Prompt
from tokenmill.engine.loop import EngineLoop
from tokenmill.engine.outputs import RequestOutput
from tokenmill.engine.progress import request_bar
from tokenmill.engine.replicas import Replica, Replicas, divided
from tokenmill.engine.stats import EngineStats
from tokenmill.errors import UserError
from tokenmill.types import Request, SamplingParams, TokenEvent

Message = Mapping[str, Any]
Lora = str | Sequence[str | None] | None  # names of adapters

_TOKENS_AT_ONCE = 8  # outputs are returned whole, so callers do not notice; Ctrl-C waits for at most these


class LLM:
    def __init__(
        self,
        model: str | Path = "smollm2",
        config: EngineConfig | None = None,
        *,
        tensors: bool = False,
        **options: Any,
    ) -> None:
        """`options` are the fields of EngineConfig (or their vLLM names), and `loras`: directories of adapters by name;
        `config` is the ready record instead. `tensors`: as in build_engine."""
        if config is not None and options:
            raise UserError("both config and options are given", "put the options into the config")
        config = config or EngineConfig.from_options(options)
        self._parts: EngineParts | None = build_engine(model, config, tensors)
        self._replicas = Replicas(self.parts.path, config, self.parts.config) if config.data_parallel_size > 1 else None
        # Tokens of a sequence per call of the runner. A measurement for a server, which streams, sets it to one.
        self.tokens_at_once = _TOKENS_AT_ONCE if self.parts.runtime.runner.runs_greedily else 1

    @property
    def parts(self) -> EngineParts:
        """What the engine is made of: for reports, benchmarks and tests."""
        if self._parts is None:
            raise UserError("this LLM is closed", "make a new one")
        return self._parts

    @property
    def stats(self) -> EngineStats:
        return self.parts.core.stats

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        lora: Lora = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """One output per prompt, in order. A prompt is text or a list of token ids; params are one, or one each, and so
        are the names of adapters (None: the base, or what `use_only_lora` chose)."""
        batch = _as_batch(prompts)
        params = _one_each(sampling_params, len(batch))
        requests = [
            self.parts.intake.request(prompt, each, priority=priority[number] if priority else 0)
            for number, (prompt, each) in enumerate(zip(batch, params, strict=True))
        ]
        self._adapt(requests, lora)
        texts = [prompt if isinstance(prompt, str) else None for prompt in batch]
        return self._run(requests, texts, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        lora: Lora = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, rendered by the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        texts = [self.render_chat(each, tools=tools) for each in conversations]  # type: ignore[arg-type]
        params = _one_each(sampling_params, len(texts))
        requests = [self.parts.intake.request(text, each, chat=True) for text, each in zip(texts, params, strict=True)]
        self._adapt(requests, lora)
        return self._run(requests, list(texts), progress)

    def embed(self, texts: Prompt | Sequence[Prompt], **options: Any) -> list[list[float]]:
        """A vector for each text; `options` as in Embedder.embed. Of a model that was not trained for it, the state
        behind the last token."""
        from tokenmill.engine.embedding.embedder import Embedder  # computes with torch

        vectors: list[list[float]] = Embedder.over(self.parts).embed(texts, **options).tolist()
        return vectors

    def score(self, query: str, texts: str | Sequence[str], **options: Any) -> list[float]:
        """How well each text answers the query, by a reranking model; `options` as in Embedder.score."""
        from tokenmill.engine.embedding.embedder import Embedder

        return Embedder.over(self.parts).score(query, texts, **options)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[list[BeamSequence]]:
        """For each prompt its most probable continuations, best first."""
        parts, tokenizer = self.parts, self.parts.tokenizer
        encoded = [tokenizer.encode(each) if isinstance(each, str) else list(each) for each in _as_batch(prompts)]
        longest, context = max(map(len, encoded), default=0), parts.config.context
        if longest + params.max_tokens > context:
            raise UserError(
                f"{longest} tokens and {params.max_tokens} more do not fit the context of {context}",
                "lower max_tokens, shorten the prompts or raise context",
            )
        eos_ids = {*parts.description.eos_ids, *tokenizer.eos_ids}
        found = beam_search(encoded, params, self.generate, eos_ids, parts.description.vocab_size)
        for beam in (beam for beams in found for beam in beams):
            beam.text = tokenizer.decode(beam.token_ids)
        return found

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        template = self.parts.chat_template
        if template is None:
            raise UserError(
                f"{self.parts.path.name} has no chat template: it is a base model", "use generate, or --raw with run"
            )
        text: str = template.render(list(messages), tools=list(tools) if tools else None)
        return text

    def load_lora(self, name: str, path: str | Path, replace: bool = False) -> None:
        """Serve one more adapter; `replace`: also if there is one of that name."""
        self.parts.adapters.load_now(name, str(path), replace)
        for other in self._others:
            other.load(name, str(path))

    def unload_lora(self, name: str) -> None:
        self.parts.adapters.unload(name)
        for other in self._others:
            other.unload(name)

    def use_only_lora(self) -> None:
        """Have every request use the one adapter that this LLM was made with."""
        self.parts.use_only_adapter()

    @property
    def loras(self) -> list[str]:
        """The names of the adapters."""
        return [version.name for version in self.parts.adapters.versions()]

    def warm_up(self) -> None:
        """Compile and capture every kind of step now, so that none of the requests to come waits for that. Without it
        each kind is slow once; a server does this in its idle moments."""
        while self.parts.runtime.runner.prepare():
            pass

    def close(self) -> None:
        """Release weights, KV memory and threads."""
        if self._parts is not None:
            self._parts.close()
        if self._replicas is not None:
            self._replicas.close()
        self._parts = self._replicas = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def _adapt(self, requests: list[Request], lora: Lora) -> None:
        names = [lora] * len(requests) if lora is None or isinstance(lora, str) else lora
        if len(names) != len(requests):
            raise UserError(f"{len(names)} adapters for {len(requests)} prompts", "give one, or one for each prompt")
        for request, name in zip(requests, names, strict=True):
            if name:
                request.adapter = self.parts.adapters.find(name)

    @property
    def _others(self) -> list[Replica]:
        """The other engines of --data-parallel-size."""
        return [] if self._replicas is None else self._replicas.others

    def _run(self, requests: list[Request], texts: list[str | None], progress: bool) -> list[RequestOutput]:
        if not self._others:
            return self.compute(requests, texts, progress)
        own, *parts = divided(requests, 1 + len(self._others))
        given = [(other, part) for other, part in zip(self._others, parts, strict=True) if part]
        for other, part in given:
            other.submit([(requests[number], texts[number]) for number in part])
        outputs: dict[int, RequestOutput] = {}

        def compute(part: list[int]) -> None:
            found = self.compute([requests[number] for number in part], [texts[number] for number in part], progress)
            outputs.update(zip(part, found, strict=True))

        try:
            compute(own)
        finally:  # whatever happens: the answers of a call must not be those of the next
            answers = [other.collect() for other, _ in given]
        for (_, part), answer in zip(given, answers, strict=True):
            if answer is None:
                compute(part)
            else:
                outputs.update(zip(part, answer, strict=True))
        return [outputs[number] for number in range(len(requests))]

    def compute(self, requests: list[Request], texts: list[str | None], progress: bool = False) -> list[RequestOutput]:
        """By the engine of this process."""
        core = self.parts.core
        collectors = {
            request.request_id: RequestCollector(request, text, self.parts.tokenizer)
            for request, text in zip(requests, texts, strict=True)
        }
        with request_bar(len(collectors), progress) as advance:
            loop = EngineLoop(
                core, _BatchListener(core, collectors, advance), self.parts.grammars, adapters=self.parts.adapters
            )
            try:
                for request in requests:
                    loop.submit(request)
                loop.drain(self.tokens_at_once)
            except BaseException:
                # Interrupted, failed or refused: the engine must be clean for the next call.
                for request_id in collectors:
                    loop.cancel(request_id)
                raise
        return [collector.output for collector in collectors.values()]


class _BatchListener:
    """Gives events to the collectors of their requests; one request that is refused ends the call."""

    def __init__(
        self, core: EngineCore, collectors: Mapping[str, RequestCollector], advance: Callable[[], None]
    ) -> None:
        self._core = core
        self._collectors = collectors
        self._advance = advance

    def on_events(self, events: list[TokenEvent]) -> None:
        for event in events:
            collector = self._collectors[event.request_id]
            _, stop = collector.take(event)
            if stop:
                self._core.cancel(event.request_id, event.index)
            if collector.output.outputs[event.index].finished and collector.output.finished:
                self._advance()

    def on_refused(self, request_id: str, error: UserError) -> None:  # noqa: ARG002
        raise error


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise UserError(f"{len(params)} sampling params for {count} prompts", "give one, or one for each prompt")
    return list(params)
