"""Puts an engine together: model source, checkpoint, tokenizer, runtime, scheduler.

The tokenizer is built while the weights are loaded. Called by LLM, AsyncEngine and the engine process; imports the
runtime, which the scheduler and the KV manager never do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.open import open_source
from tokenmill.checkpoint.sources import resolve
from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.checkpoint.tokenizer_files import tokenizer_of
from tokenmill.config import EngineConfig, ResolvedConfig
from tokenmill.engine.adapters.build import AdapterFiles, make_slots, settle_rank
from tokenmill.engine.adapters.registry import AdapterRegistry
from tokenmill.engine.core import EngineCore
from tokenmill.engine.intake import Intake
from tokenmill.engine.kv.budget.enforcer import BudgetEnforcer
from tokenmill.engine.kv.manager import KVManager
from tokenmill.engine.kv.policy import POLICIES
from tokenmill.engine.lanes import LaneCore
from tokenmill.engine.order import DISCIPLINES
from tokenmill.engine.pace import StepPace
from tokenmill.engine.scheduler import Scheduler
from tokenmill.engine.stats import EngineStats
from tokenmill.engine.tiers import PageSharing, build_tiers, shown_address
from tokenmill.errors import UserError
from tokenmill.grammar.compiler import GrammarCompiler
from tokenmill.log import get_logger
from tokenmill.resolution import resolve as resolve_config
from tokenmill.resolution import settle
from tokenmill.runtime.build import Runtime, build_runtime, find_facts
from tokenmill.runtime.observation.page_scores import StoredPageScores
from tokenmill.runtime.ranks.build import facts_of_rank, start_ranks
from tokenmill.runtime.runner import ModelRunner
from tokenmill.types import CacheControl, SamplingParams

if TYPE_CHECKING:
    from tokenmill.checkpoint.chat_template import ChatTemplate

_log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class EngineParts:
    core: EngineCore
    kv: KVManager
    budgets: BudgetEnforcer  # says which KV budgets this engine can keep
    idle_work: tuple[Callable[[], bool], ...]  # as EngineLoop takes it
    intake: Intake
    adapters: AdapterRegistry
    grammars: GrammarCompiler
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    description: ModelDescription
    config: ResolvedConfig
    runtime: Runtime
    path: Path
    load_seconds: float
    sharing: PageSharing

    def use_only_adapter(self) -> None:
        """Where one model is run or measured: every request uses the adapter that the options name, if they do."""
        names = [version.name for version in self.adapters.versions()]
        if len(names) > 1:
            raise UserError(f"{len(names)} adapters are given: {', '.join(names[:5])}", "give one --lora")
        self.intake.adapter = self.adapters.find(names[0]) if names else None

    def close(self, timeout: float = 60.0) -> None:
        """Release what lives outside this process: cached pages are written to the tiers, if there are any."""
        self.sharing.close()
        self.kv.close(timeout)
        self.adapters.close()
        self.runtime.close()


def make_core(scheduler: Scheduler, runner: ModelRunner) -> EngineCore:
    return LaneCore(scheduler, runner, runner.lanes) if runner.lanes > 1 else EngineCore(scheduler, runner)


def one_engine(options: EngineConfig) -> EngineConfig:
    """For faces of the engine that have no others beside it."""
    if options.data_parallel_size > 1:
        raise UserError("--data-parallel-size is for serve and LLM", "leave it out")
    return options


def build_engine(model: str | Path, options: EngineConfig, tensors: bool = False) -> EngineParts:
    """`tensors`: weights, pages and states are torch's, for callers that compute with them, even where numpy does."""
    started, path = time.perf_counter(), resolve(str(model)).path
    make_discipline = DISCIPLINES.get(options.scheduling)
    policy = POLICIES.get(options.kv_policy)()
    budget = CacheControl(policy=name, budget=options.kv_budget) if (name := options.kv_budget_policy) else None
    with ThreadPoolExecutor(1) as background:
        checkpoint = open_source(path, options.load_format)
        description = checkpoint.description
        building = background.submit(tokenizer_of, path, options.load_format)
        facts, device = find_facts(options, description.context_length, tensors, checkpoint)
        config = resolve_config(options, facts_of_rank(facts, options))
        files = AdapterFiles(path, description, config)
        config = settle_rank(files, config)
        runtime = build_runtime(checkpoint, config, device, start_ranks(path, description, config))
        tokenizer, template = building.result()
    if not tokenizer.reads_text:
        _log.warning("%s has no tokenizer: prompts are token ids, and so is what is shown as text", path.name)
    config = _settled(config, runtime)
    budgets = BudgetEnforcer(runtime.layout, StoredPageScores(runtime, config))
    budgets.check(SamplingParams(cache=budget))
    sharing = build_tiers(config, path, runtime)
    config = replace(config, kv_redis=shown_address(config.kv_redis), kv_listen=sharing.listens_at)
    pages, slots, caching = runtime.budget.num_pages, runtime.budget.num_state_slots, config.prefix_caching
    kv = KVManager(runtime.layout, pages, caching, policy, sharing.tiers, budgets, slots, sharing.publisher)
    ahead = runtime.executor.lookahead
    drafts, grammar_drafts = _draft_slots(runtime, config, kv.stats)
    adapters, adapter_slots = make_slots(config, files, runtime, kv.stats)
    pace = StepPace(config.itl / 1000.0, kv.stats) if config.itl else None
    scheduler = Scheduler(
        kv,
        make_discipline(config.max_tenant_slowdown),
        config.batch_tokens,
        config.concurrency,
        config.context,
        ahead,
        drafts,
        adapter_slots,
        grammar_drafts,
        pace,
    )
    adapters.attach(adapter_slots, lambda digest: len(scheduler.using(digest)))
    eos_ids = tuple(dict.fromkeys((*description.eos_ids, *tokenizer.eos_ids)))
    return EngineParts(
        core=make_core(scheduler, runtime.runner),
        kv=kv,
        budgets=budgets,
        idle_work=(*([kv.save] if sharing.tiers is not None else []), runtime.runner.prepare),
        intake=Intake(tokenizer, description.vocab_size, eos_ids, config.context, config.seed, budget, budgets.check),
        adapters=adapters,
        grammars=GrammarCompiler(tokenizer, eos_ids),
        tokenizer=tokenizer,
        chat_template=template,
        description=description,
        config=config,
        runtime=runtime,
        path=path,
        sharing=sharing,
        load_seconds=time.perf_counter() - started,
    )


def _settled(config: ResolvedConfig, runtime: Runtime) -> ResolvedConfig:
    """With what was decided as the runtime was built."""
    config = settle(
        config,
        memory=(runtime.budget.nbytes, runtime.budget.reason),
        kv_native_layers=(runtime.native_layers, f"recommended for {runtime.store.name}"),
        executor=(runtime.executor.name, "the fastest that supports the model"),
    )
    if runtime.executor.adapters is not None:
        config = settle(config, max_loras=(runtime.executor.adapters.num_slots, "--lora-memory, or the default"))
    return config


def _draft_slots(runtime: Runtime, config: ResolvedConfig, stats: EngineStats) -> tuple[int, int]:
    """Tokens that the runner may guess for any sequence, and for one that a grammar guides."""
    speculator = runtime.runner.speculator
    if speculator is None:
        return 0, 0
    speculator.report_to(stats.take_decisions)
    most = config.draft_tokens
    return most if speculator.drafts_all else 0, most if speculator.grammars is not None else 0
