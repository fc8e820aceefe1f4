"""The judge of quality: what a whole configuration (weights, KV dtype and KV budget together) loses against the
unquantized baseline with plain KV.

One error budget: there is one limit of the rise of perplexity and one of the mean divergence, and a configuration
spends it on weight bits, KV bits and evictions together, because it is always measured as it would be served. Tasks,
generated text and long contexts are held against limits of their own. Each engine is loaded once per proof; what the
baseline says is kept on disk. Called by the laboratory; knows nothing of speed or cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.tokenizer_files import load_chat_template, load_tokenizer
from tokenmill.config import EngineConfig
from tokenmill.engine.llm import LLM
from tokenmill.errors import UserError
from tokenmill.evaluate.divergence import DivergenceReport, compare_tokens, summarize
from tokenmill.evaluate.gate import GateLimits, default_max_kld, judge
from tokenmill.evaluate.reference import (
    CachedReference,
    LiveReference,
    Reference,
    find_cache,
    has_room,
    make_cache,
    reference_key,
)
from tokenmill.evaluate.reference_cache import CacheKey
from tokenmill.evaluate.task_pairs import judge_loss, pair_task
from tokenmill.evaluate.task_run import TaskJob, open_task
from tokenmill.evaluate.windows import Window, added_bos, cut_chunks
from tokenmill.log import get_logger
from tokenmill.model.kvstore import KV_STORES
from tokenmill.model.kvstore.dense import DenseStore
from tokenmill.optimize.generation import cut_prompts, generation_checks
from tokenmill.optimize.long_context import divergence_check, long_window, passkeys, retrieval_check, usable_lengths
from tokenmill.optimize.probes import AnswerCache, Probe, generation_probe, passkey_probe, read_answers, task_probe
from tokenmill.optimize.results import Check, Proof, Quality, TaskScore

_log = get_logger(__name__)
_UNSCORED_SHARE = 8  # the first eighth of a window is context only
_TASK_CONTEXT = 2048
_MAX_CONCURRENCY = 16
_KV_TOKENS = 16384  # of all requests computed at the same time: long contexts run few at a time
_CHARACTERS_PER_TOKEN = 16  # more than any text has: bounds what is tokenized of a long one


@dataclass(frozen=True, slots=True)
class QualityPlan:
    """What quality is measured on, and how much of it may be lost."""

    text: str
    context: int  # tokens of a window
    short_windows: int  # of a first look
    windows: int  # of a proof; 0: the whole text
    limit: float  # of the rise of perplexity: 0.01 is one percent
    max_kld: float | None  # of the mean divergence in nats; None: what goes with the limit
    tasks: tuple[Path, ...] = ()
    max_task_loss: float = 0.02  # of accuracy: 0.02 is two items of a hundred
    long_contexts: tuple[int, ...] = ()  # for KV dtypes and budgets, such as 4096 and the longest request
    generation: bool = True
    num_prompts: int = 12
    answer_tokens: int = 96
    refuse_unproven_tasks: bool = False  # refuse also where a task has too few items to show anything

    def __post_init__(self) -> None:
        if not self.max_task_loss >= 0:
            raise UserError(f"the largest task loss is {self.max_task_loss:g}", "give 0 or more, such as 2%")
        if len({path.stem for path in self.tasks}) < len(self.tasks):
            raise UserError("two task files have the same name", "rename one: results are listed by it")

    @property
    def kld_limit(self) -> float:
        return default_max_kld(self.limit) if self.max_kld is None else self.max_kld

    @property
    def limit_words(self) -> str:
        """For the start of a run and the report."""
        source = "given" if self.max_kld is not None else "goes with that limit"
        words = f"perplexity at most {self.limit:+.2%}, mean divergence at most {self.kld_limit:.4g} nats ({source})"
        return f"{words}, a task at most -{self.max_task_loss:.1%}" if self.tasks else words


@dataclass(slots=True)
class _Findings:
    """What a candidate says: divergences from the reference on the text and at long contexts, answers by probe."""

    text: DivergenceReport
    long: dict[int, DivergenceReport] = field(default_factory=dict)
    answers: dict[str, Any] = field(default_factory=dict)


class QualityJudge:
    def __init__(self, plan: QualityPlan, reference_path: Path, reference_config: EngineConfig) -> None:
        """Reads the task files and the text: what is wrong with them is refused here, before an engine is loaded."""
        self.plan = plan
        self._path = reference_path
        self._config = reference_config
        self._model_context = open_checkpoint(reference_path).description.context_length
        self._tokenizer = tokenizer = load_tokenizer(reference_path)
        context = min(plan.context, self._model_context)
        longest = max((plan.windows or 1 << 20) * context, *plan.long_contexts, context)
        self._text = plan.text[: longest * _CHARACTERS_PER_TOKEN]
        chunks = cut_chunks(tokenizer.encode(self._text), context, added_bos(tokenizer), plan.windows)
        self._windows = [Window(chunk.token_ids, max(1, context // _UNSCORED_SHARE)) for chunk in chunks]
        self._lengths = usable_lengths(plan.long_contexts, context, self._model_context)
        self._long_windows = {length: long_window(self._text, tokenizer, length) for length in self._lengths}
        self._context = context
        tasks = [open_task(TaskJob(path)) for path in plan.tasks]
        if tasks:
            self._context = max(context, min(_TASK_CONTEXT, self._model_context))
        self._task_probes = [task_probe(file, self._context) for file in tasks]
        self._generation_probes: list[Probe] = []
        if plan.generation:
            template = load_chat_template(reference_path)
            prompts = cut_prompts(
                self._text, tokenizer, template, plan.num_prompts, plan.answer_tokens, self._model_context
            )
            self._context = max(self._context, min(prompts.context, self._model_context))
            self._generation_probes = [generation_probe(prompts)]

    def check(self, path: Path, config: EngineConfig) -> Quality:
        """On the first windows of the text: a first look that can only refuse."""
        windows = self._windows[: self.plan.short_windows]
        with self._references(()) as references:
            base = references[0]
            with LLM(str(path), self._engine(config, ())) as llm:
                return as_quality(summarize(compare_tokens(llm, base, windows), base, len(windows)))

    def prove(self, path: Path, config: EngineConfig) -> Proof:
        """On the whole text, the tasks, generated text and, where the KV cache is not the baseline's, long contexts."""
        lengths = self._lengths if self._has_lossy_kv(config) else ()
        varying = [*self._generation_probes, *(self._passkeys(length) for length in lengths)]
        probes = [*self._task_probes, *varying]
        with self._references(lengths, probes) as references:
            reference = self._reference_answers(self._config, probes, lengths)
            control = self._control(varying, lengths, reference)
            with LLM(str(path), self._engine(config, lengths)) as llm:
                found = self._examine(llm, references, probes, lengths)
        return self._verdict(found, reference, control)

    def _examine(
        self, llm: LLM, references: dict[int, Reference], probes: Sequence[Probe], lengths: Sequence[int]
    ) -> _Findings:
        def compare(base: Reference, windows: list[Window]) -> DivergenceReport:
            return summarize(compare_tokens(llm, base, windows), base, len(windows))

        found = _Findings(compare(references[0], self._windows))
        if found.text.nan_count == found.text.tokens:  # nothing else can be measured
            return found
        found.long = {length: compare(references[length], [self._long_windows[length]]) for length in lengths}
        found.answers = {probe.name: probe.ask(llm) for probe in probes}
        return found

    def _verdict(self, found: _Findings, reference: dict[str, Any], control: dict[str, Any]) -> Proof:
        plan = self.plan
        verdict = judge(found.text, GateLimits(plan.limit, max_kld_mean=plan.kld_limit))
        checks = [text_check(found.text, plan.kld_limit)] if found.text.nan_count < found.text.tokens else []
        tasks, refusals = self._score_tasks(found.answers, reference)
        if "answers" in found.answers:
            own, base, other = (read_answers(each["answers"]) for each in (found.answers, reference, control))
            checks += generation_checks(own, base, other)
        for length, report in found.long.items():
            name = self._passkeys(length).name
            checks.append(divergence_check(length, report.kld_mean, plan.kld_limit))
            checks.append(retrieval_check(length, found.answers[name], reference[name], control[name]))
        reasons = dict.fromkeys([*verdict.reasons, *refusals, *(check.refusal for check in checks if check.refusal)])
        return Proof(as_quality(found.text), tuple(tasks), tuple(checks), tuple(reasons))

    def _score_tasks(self, found: dict[str, Any], reference: dict[str, Any]) -> tuple[list[TaskScore], list[str]]:
        scores, refusals = [], []
        for probe in self._task_probes:
            if probe.name not in found:
                continue
            pair = pair_task(probe.name.removeprefix("task "), reference[probe.name], found[probe.name])
            verdict = judge_loss(pair, self.plan.max_task_loss, self.plan.refuse_unproven_tasks)
            scores.append(
                TaskScore(
                    pair.name,
                    pair.n,
                    pair.accuracy,
                    pair.reference_accuracy,
                    pair.low,
                    pair.high,
                    pair.p_value,
                    verdict.note,
                )
            )
            if verdict.refusal:
                refusals.append(verdict.refusal)
        return scores, refusals

    @contextmanager
    def _references(self, lengths: Sequence[int], probes: Sequence[Probe] = ()) -> Iterator[dict[int, Reference]]:
        """The baseline's log-probabilities by length, 0 for the text. What is missing, these and the answers to
        `probes`, is made with one load; where log-probabilities find no room, the engine stays beside the candidate."""
        sets = {0: self._windows, **{length: [self._long_windows[length]] for length in lengths}}
        engine = self._engine(self._config, lengths)
        keys = {length: reference_key(str(self._path), self._path, windows, engine) for length, windows in sets.items()}
        found: dict[int, Reference] = {}
        with ExitStack() as stack:
            missing = self._find(keys, sets, found)
            answers = AnswerCache(self._path, engine)
            unanswered = [probe for probe in probes if answers.find(probe) is None]
            if missing or unanswered:
                llm = LLM(str(self._path), engine)
                stack.callback(llm.close)
                for probe in unanswered:
                    answers.ask(probe, llm)
                live = False
                for length in missing:
                    if has_room(keys[length]):
                        found[length] = CachedReference(make_cache(keys[length], llm, sets[length]), sets[length])
                    else:
                        found[length], live = LiveReference(str(self._path), llm, sets[length]), True
                if not live:
                    llm.close()
            yield found

    @staticmethod
    def _find(keys: dict[int, CacheKey], sets: dict[int, list[Window]], found: dict[int, Reference]) -> list[int]:
        """Opens the caches that exist; the others' names."""
        for length, key in keys.items():
            cache = find_cache(key)
            if cache is not None:
                found[length] = CachedReference(cache, sets[length])
        return [length for length in keys if length not in found]

    def _reference_answers(
        self, config: EngineConfig, probes: Sequence[Probe], lengths: Sequence[int]
    ) -> dict[str, Any]:
        """By probe; an engine of the baseline's weights is loaded if any is missing."""
        engine = self._engine(config, lengths)
        cache = AnswerCache(self._path, engine)
        answers = {probe.name: cache.find(probe) for probe in probes}
        missing = [probe for probe in probes if answers[probe.name] is None]
        if missing:
            with LLM(str(self._path), engine) as llm:
                answers |= {probe.name: cache.ask(probe, llm) for probe in missing}
        return answers

    def _control(self, probes: Sequence[Probe], lengths: Sequence[int], reference: dict[str, Any]) -> dict[str, Any]:
        """The baseline with another plain KV dtype: how far answers move where nothing is lost."""
        dtype = "bfloat16" if self._config.kv_cache_dtype == "float16" else "float16"
        try:
            return self._reference_answers(replace(self._config, kv_cache_dtype=dtype), probes, lengths)
        except UserError as error:
            _log.warning("the baseline does not run with %s KV, so its own variation is not known: %s", dtype, error)
            return reference

    def _passkeys(self, length: int) -> Probe:
        return passkey_probe(length, passkeys(self._text, self._tokenizer, length))

    def _has_lossy_kv(self, config: EngineConfig) -> bool:
        """Whether long contexts may lose what short ones keep: other KV than plain floats, or a budget."""
        dtype = config.kv_cache_dtype
        dense = dtype is None or issubclass(KV_STORES.get(dtype), DenseStore)
        return bool(config.kv_budget_policy) or not (dense or dtype == self._config.kv_cache_dtype)

    def _engine(self, config: EngineConfig, lengths: Sequence[int]) -> EngineConfig:
        """As the candidate is served, with room for what is asked. Speculation changes no token; tiers must not keep
        pages of this."""
        context = max(self._context, *lengths) if lengths else self._context
        return replace(
            config,
            context=context,
            concurrency=max(2, min(_MAX_CONCURRENCY, _KV_TOKENS // context)),
            memory=None,
            prefix_caching=True,
            speculate="off",
            kv_host_memory=0,
            kv_disk="",
            kv_redis="",
        )


def text_check(report: DivergenceReport, limit: float) -> Check:
    words = f"mean divergence {report.kld_mean:.4g} is more than {limit:.4g} nats"  # as the gate says it
    return Check("divergence", report.kld_mean, 0.0, limit, "" if report.kld_mean <= limit else words)


def as_quality(report: DivergenceReport) -> Quality:
    verdict = judge(report, GateLimits(max_quality_loss=float("inf")))
    return Quality(
        loss=verdict.quality_loss,
        loss_low=verdict.perplexity_ratio_low - 1,
        loss_high=verdict.perplexity_ratio_high - 1,
        kld_mean=verdict.kld_mean,
        kld_p99=verdict.kld_p99,
        top1_agreement=verdict.top1_agreement,
        perplexity=verdict.perplexity,
        reference_perplexity=verdict.reference_perplexity,
        tokens=verdict.tokens,
        nan_count=verdict.nan_count,
        stderr=verdict.perplexity_ratio_stderr,
    )
