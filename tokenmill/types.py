"""The types that cross layers, with shape and owner of each field.

SamplingParams and Request come from the caller; StepPlan is what the scheduler passes to the runtime; Batch is its
tensor form for the model; StepResult is what the runtime returns; TokenEvent is what leaves the engine. Imports no
torch: the scheduler, the simulator and the HTTP server use this file too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tokenmill.errors import UserError, unknown_name
from tokenmill.leases import KvLease as KvLease
from tokenmill.ranges import check_float, check_int
from tokenmill.timeline import Timeline

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOGPROBS = 64
MAX_SEED = 2**64 - 1
MAX_STRUCTURED_CHARS = 1 << 18
MAX_CHOICES = 4096
MAX_TTL_SECONDS = 86_400.0
MAX_KV_BUDGET = 2**31 - 1
BUDGET_POLICIES = ("streaming_llm", "h2o", "paged_eviction")  # the files of engine/kv/budget/
STRUCTURED_KINDS = ("json_object", "json_schema", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True, slots=True)
class StructuredSpec:
    """What the output must look like: a JSON object, JSON of a schema, a regex, one of some texts, a grammar, or text
    with structural tags."""

    kind: str  # of STRUCTURED_KINDS
    text: str = ""  # the schema or the tags as JSON, the regex, or the grammar (Lark, or GBNF with ::=)
    choices: tuple[str, ...] = ()  # of "choice"

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", tuple(self.choices))
        if self.kind not in STRUCTURED_KINDS:
            raise unknown_name("kind of structured output", self.kind, STRUCTURED_KINDS)
        if self.kind == "choice" and not (0 < len(self.choices) <= MAX_CHOICES and all(self.choices)):
            raise UserError(f"there are {len(self.choices)} choices, or one is empty", f"give 1 to {MAX_CHOICES} texts")
        if self.kind in ("json_schema", "regex", "grammar", "structural_tag") and not self.text.strip():
            raise UserError(f"the {self.kind} is empty", "give it, or leave structured output out")
        size = len(self.text) + sum(map(len, self.choices))
        if size > MAX_STRUCTURED_CHARS:
            raise UserError(f"the {self.kind} has {size} characters", f"give at most {MAX_STRUCTURED_CHARS}")


@dataclass(frozen=True, slots=True)
class CacheControl:
    """KV cache settings of a request: how long its prompt stays cached, and how many tokens it may hold itself."""

    ttl: float = 0.0  # seconds that the pages of the prompt are kept after their last use; 0: no guarantee
    pin: bool = False  # evict them only when no other page is left to evict
    policy: str = ""  # of BUDGET_POLICIES: which tokens to drop beyond `budget` (lossy); "full": none; "": the default
    budget: int = 0  # tokens that the request holds once its prompt is computed, rounded up to pages

    def __post_init__(self) -> None:
        if self.ttl:
            check_float("cache_control ttl", self.ttl, 1.0, MAX_TTL_SECONDS)
        if self.policy not in ("", "full", *BUDGET_POLICIES):
            raise unknown_name("kv_policy", self.policy, ("full", *BUDGET_POLICIES))
        check_int("kv_budget", self.budget, 0, MAX_KV_BUDGET)
        if (self.policy in BUDGET_POLICIES) != (self.budget > 0):
            raise UserError("kv_policy and kv_budget belong together", "give both, or neither")

    @property
    def needs_attention(self) -> bool:
        """Whether the policy uses attention weights, which only some executors compute."""
        return self.policy == "h2o"


@dataclass(slots=True)
class CacheReport:
    """How the KV cache served a request. `reason` is one of CACHE_REASONS."""

    reason: str = ""
    tier: str = ""  # that pages were loaded from, the slowest if several
    num_loaded_tokens: int = 0  # of the cached ones, those that came from a tier
    num_dropped_tokens: int = 0  # by the request's budget policy, so far
    retention: str = ""  # what became of its cache_control: "", "granted", or "over_quota"
    source: str = ""  # of a request whose pages a peer had: "used", or a word for why not all came from there


CACHE_REASONS = (
    "hit",  # all full pages before the last token
    "partial",  # the prompt goes on differently from what is cached
    "cold",  # no cached prefix matches
    "short",  # not one full page before the last token
    "must_compute",  # attention or log-probabilities of every token are needed
    "slower",  # a tier has more, but recomputing is faster by measured costs
    "no_room",  # a tier has more, but running requests need the pages
    "tier_failed",  # a tier had more, but did not load it in time, or not completely
    "tier_busy",  # too many loads from tiers were under way
    "off",  # prefix caching is off
)


@dataclass(frozen=True, slots=True)
class ReasoningBudget:
    """Bounds the reasoning at the start of an output: after `max_tokens` tokens the one that ends it is forced."""

    max_tokens: int
    end_id: int
    start_id: int | None = None  # an output that does not begin with it has no reasoning; None: every output has

    def __post_init__(self) -> None:
        check_int("thinking_token_budget", self.max_tokens, 0, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop. Immutable; ranges are checked on construction."""

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0  # over prompt and output
    frequency_penalty: float = 0.0  # over output
    presence_penalty: float = 0.0  # over output
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None  # no others are sampled; None: all
    bad_words: tuple[str, ...] = ()  # never completed by the output
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # the same as tokens; the intake adds those of `bad_words`
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # top-k to report for each sampled token
    prompt_logprobs: int | None = None  # top-k to report for each prompt token
    structured: StructuredSpec | None = None
    cache: CacheControl | None = None
    reasoning: ReasoningBudget | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        words = (self.bad_words,) if isinstance(self.bad_words, str) else tuple(self.bad_words or ())
        object.__setattr__(self, "bad_words", words)
        check_int("n", self.n, 1, 128)
        check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        check_float("temperature", self.temperature, 0.0, 100.0)
        check_int("top_k", self.top_k, -1, 2**31 - 1)
        check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_float("min_p", self.min_p, 0.0, 1.0)
        check_float("typical_p", self.typical_p, 0.0, 1.0, open_low=True)
        check_float("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        if self.seed is not None:
            check_int("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if any(not text for text in self.stop):
            raise UserError("a stop string is empty", "remove it or give at least one character")
        if any(not text.strip() for text in self.bad_words):
            raise UserError("bad_words has an empty text", "remove it or give at least one character")
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise UserError("allowed_token_ids is empty", "give at least one token id, or leave it out")
        for token_id, bias in (self.logit_bias or {}).items():
            check_int("logit_bias token id", token_id, 0, 2**31 - 1)
            check_float(f"logit_bias[{token_id}]", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def edits_logits(self) -> bool:
        """Whether a feature of runtime/sampling/features/ changes logits before temperature and filters apply."""
        return self.penalizes or self.edits_otherwise

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def edits_otherwise(self) -> bool:
        """Whether a feature besides penalties changes logits."""
        watched = self.reasoning is not None or self.min_tokens > 0
        return watched or self.typical_p < 1.0 or bool(self.logit_bias) or self.bans_tokens

    @property
    def bans_tokens(self) -> bool:
        """Whether a feature may leave no token possible, which ends the request."""
        return self.structured is not None or self.allowed_token_ids is not None or bool(self.bad_word_ids)


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One version of an adapter: another content under the same name is another version."""

    name: str
    digest: bytes  # sha256 of its content


class CompiledGrammar(Protocol):
    """A grammar compiled for one model's tokens (tokenmill.grammar). The engine passes it on to the sampler."""

    vocab_size: int
    key: int  # the same for grammars of the same text: what was learned of one outlives it
    punctuation: Any  # bits of tokens, or None: what a drafter learns from all grammars alike
    mask_seconds: float  # of processor time, that a mask takes: a moving average
    masks: Any  # those kept by state, or None

    @property
    def num_lanes(self) -> int: ...  # matchers of two share nothing, so that threads do not wait for each other
    def matcher(self, lane: int = 0) -> Any: ...  # follows one output, token by token
    def want_lane(self) -> None: ...  # asks for one more; it comes when the compiler has time, or never
    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """One sequence in the engine. The caller fills the first block; the scheduler owns the second and alone writes it.

    With `params.n > 1` the request is computed up to its last prompt token, then forked: each sibling is a Request
    of its own with the same id and another `index`.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()  # end-of-text ids and params.stop_token_ids
    seed: int = 0  # params.seed, or drawn at random by the facade
    priority: int = 0  # lower runs first (only under the priority discipline)
    arrival: int = 0  # a counter, not a clock: order of arrival
    index: int = 0  # which of the n siblings
    tenant: str = ""  # whose share of the engine it uses (only under the fair discipline)
    weight: float = 1.0  # of the tenant
    deadline: float | None = None  # monotonic clock: dropped if its first token has not come by then
    max_pinned_share: float = 1.0  # of all KV pages, that the tenant may have kept by cache_control
    cache_salt: bytes = b""  # only requests of the same salt share cached pages, in memory and in tiers
    adapter: AdapterRef | None = None  # None: the base alone
    embeds: bool = False  # also wants the hidden state of its last prompt token, with its first token
    score_ids: tuple[int, ...] = ()  # with `embeds`: wants the logits of these tokens instead
    second: int = 0  # of an encoder's pair of texts: where the second begins; 0: there is one text
    publishes: KvLease | None = None  # another engine fetches the pages of its prompt
    source: KvLease | None = None  # another engine has, or computes, the pages of its prompt
    grammar: CompiledGrammar | None = None  # params.structured compiled for the sampler; opaque to the engine
    # Logits of the tokens from this position on are read: these must not come from the prefix cache
    logits_from: int | None = None

    token_ids: list[int] = field(default_factory=list)  # prompt + output so far
    num_computed: int = 0  # tokens whose KV is stored
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache when first admitted
    cache: CacheReport = field(default_factory=CacheReport)  # of the first admission, and what was dropped since
    num_preemptions: int = 0
    forked: bool = False  # siblings exist already
    device_seconds: float = 0.0  # its part of the steps that no event has reported yet, where it is metered
    timeline: Timeline | None = None  # where the engine keeps one

    def __post_init__(self) -> None:
        assert len(self.cache_salt) < 32, "a cache salt has fewer than 32 bytes"
        if not self.token_ids:
            self.token_ids = list(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def cache_name(self) -> bytes:
        """Whose cached pages it may use: those of its salt that its adapter computed. A salt is shorter than a digest,
        so that none can be taken for an adapter's."""
        return self.cache_salt if self.adapter is None else self.adapter.digest + self.cache_salt

    @property
    def budget(self) -> CacheControl | None:
        """Its cache control, if that bounds the pages it may hold."""
        cache = self.params.cache
        return cache if cache is not None and cache.budget else None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_ids) :]


@dataclass(slots=True)
class ScheduledTokens:
    """A row of a StepPlan: compute tokens [start, start + count) of `request`. Read-only for the runtime."""

    request: Request
    start: int
    count: int
    block_tables: tuple[list[int], ...]  # per KV group: page id by page index, -1 where the page left the window
    samples: bool  # the last of these tokens is the last known one: its logits choose the next
    num_dropped: int = 0  # tokens whose pages a budget took out of the tables: attention counts positions without them
    num_draft_slots: int = 0  # slots reserved after them: the runtime may compute that many more tokens
    state_slot: int = 0  # of recurrent layers: where the states of this sequence are; new ones if it starts at 0
    adapter_slot: int = 0  # on the device, of the adapter that its request asked for; 0: the base alone


@dataclass(slots=True)
class StepPlan:
    """What one step computes. Discarded after the step."""

    scheduled: list[ScheduledTokens] = field(default_factory=list)
    page_copies: list[tuple[int, int]] = field(default_factory=list)  # (source, destination), before the forward pass
    run: int = 1  # tokens of a sequence that may be delivered at once
    state_copies: list[tuple[int, int]] = field(default_factory=list)  # the same of state slots, one after the other

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.scheduled)


@dataclass(slots=True)
class Batch:
    """The tensor form of a StepPlan. T tokens, S sequences, G KV groups; everything on the model's device."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    query_starts: Tensor  # [S + 1] int32, cumulative token counts
    seq_lens: Tensor  # [S] int32, stored tokens after this step
    slots: tuple[Tensor, ...]  # G x [T] int64: page * page_size + offset to write each token's KV to
    block_tables: tuple[Tensor, ...]  # G x [S, max_pages] int32, -1 padded
    logit_rows: Tensor  # [R] int64: rows of [T] whose logits are wanted
    max_query: int  # longest token count of a sequence
    max_seq: int  # longest seq_len
    # [T] int64, trees of drafts only: bit j where a token sees the j-th of its sequence's tokens in this step
    ancestors: Tensor | None = None
    # Recurrent layers only: where the state of each sequence is, [S] int64; the slots of those that begin; and the
    # numbers of those with drafts, whose states stay as they are until it is known which drafts hold
    state_slots: Tensor | None = None
    state_targets: Tensor | None = None  # [S] int64: the slots that states are written to; None: the same
    begins: tuple[int, ...] = ()
    drafted: tuple[int, ...] = ()
    all_hidden: bool = True  # False: only logits are needed, so a forward pass may skip other rows where it can
    adapter_slots: Tensor | None = None  # [T] int32, 0: none; None where no row has an adapter


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the raw logits: the token's own, its rank (1: most likely), the top-k."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class StepResult:
    """What the runtime returns, row by row as in StepPlan.scheduled."""

    token_ids: list[int | None]  # None where the row did not sample, or where no token is possible
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: list[list[TokenLogprobs] | None]  # for prompt tokens start+1 .. start+count of the row
    embeddings: dict[int, list[float]] = field(default_factory=dict)  # by row, for those that sample and want one
    accepted: dict[int, list[int]] = field(default_factory=dict)  # by row: drafts that held; they precede its token
    accepted_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    num_drafted: dict[int, int] = field(default_factory=dict)  # by row: tokens that were drafted and checked
    saved_seconds: float = 0.0  # time saved by drafting in this step, as measured by the runtime; may be negative


@dataclass(slots=True)
class TokenEvent:
    """What is new about one sequence, in order. Text is added by the detokenizing side."""

    request_id: str
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int = 0
    finish_reason: str | None = None  # "stop", "length", "abort", "error" (no token was possible)
    stop_reason: int | str | None = None  # the stop id or string that ended it
    embedding: list[float] = field(default_factory=list)  # final hidden state, vector or scores, if it wants them
    cache: CacheReport | None = None  # with the first token and at the end
    device_seconds: float = 0.0  # its part of the steps since its last event, where it is metered
    timeline: Timeline | None = None  # with the first token and at the end

    def report(self, request: Request) -> None:
        """Add what a first and a last event tell about the request itself."""
        self.cache, self.timeline = request.cache, request.timeline
        if self.timeline is not None:
            self.timeline.num_preemptions = request.num_preemptions
