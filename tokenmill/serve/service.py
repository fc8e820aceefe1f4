"""What every route uses: tokenizer and chat template, admission, metrics and the engine client.

`open` takes prompts through admission and tokenizer to the engine and returns a Generation; closing that charges its
tokens to the key's quota. Knows nothing of HTTP shapes; routes and adapters call it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from tokenmill.checkpoint.chat_template import ChatTemplate
from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.engine.collector import RequestCollector
from tokenmill.engine.intake import Intake, cut_prompt
from tokenmill.engine.messages import Ready
from tokenmill.engine.stats import EngineStats
from tokenmill.errors import UserError
from tokenmill.serve.batches.runner import BatchRunner
from tokenmill.serve.callers import Caller
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.errors import ApiError, context_exceeded, deadline_passed
from tokenmill.serve.files.store import FileStore
from tokenmill.serve.generation import Generation, Member, VectorWish
from tokenmill.serve.loras import Loras
from tokenmill.serve.metrics import Metrics
from tokenmill.serve.overrides import SamplingDefaults
from tokenmill.serve.recent import RecentRequests
from tokenmill.serve.roles import Roles
from tokenmill.serve.styles import choose_styles
from tokenmill.serve.supervision.engine import Engine
from tokenmill.serve.tenants.accounts import Accounts
from tokenmill.serve.tenants.cache_salt import CacheSalts
from tokenmill.serve.tenants.keys import LANES, MIN_PRIORITY, Client
from tokenmill.serve.tenants.limits import Admission, Pace, Ticket, check_grammar_quota, key_withdrawn
from tokenmill.serve.tenants.prices import Prices
from tokenmill.serve.tenants.turns import Turns
from tokenmill.serve.traffic_log import TrafficLog
from tokenmill.serve.workers.jobs import Encode, Render
from tokenmill.serve.workers.pool import WorkerPool
from tokenmill.serve.workers.text import TextWork
from tokenmill.types import CacheControl, SamplingParams

_LONG_TEXT = 4096  # characters: longer texts are tokenized by a text worker
_MAX_MESSAGES = 1 << 14
_LATEST = ":latest"  # what Ollama's clients add to a name
# Variables of a template that chat_template_kwargs cannot set.
_OWN_VARIABLES = ("self", "messages", "tools", "add_generation_prompt")


class Service:
    def __init__(
        self,
        config: ServeConfig,
        names: Sequence[str],
        engine: Engine,
        identity: Ready,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        workers: WorkerPool,
        cache_secret: bytes = b"",
        prices: Prices | None = None,
        sampling_defaults: SamplingDefaults | None = None,
        metrics: Metrics | None = None,
        beside: Service | None = None,
    ) -> None:
        """`beside`: the service of the first model of this server, if there are several."""
        self.context = int(identity.options["context"])
        self.config = config.for_context(self.context)
        self.names = tuple(names)
        self.engine = engine
        self.identity = identity
        self.tokenizer = tokenizer
        self.template = template
        self.sampling_defaults = sampling_defaults or SamplingDefaults()
        self.text = TextWork(workers)
        self.created = int(time.time())
        self.metrics = metrics or Metrics(self.names[0])
        self.metrics.max_loras = identity.options.get("max_loras") or 0
        self.loras = Loras(self.names, engine, self.metrics, config)
        self.roles = Roles(config, identity.options, engine)
        shared: Accounts | None = None if beside is None else beside.accounts
        labels, now = config.max_metric_keys, time.monotonic()
        self.accounts: Accounts = Accounts(self.names[0], prices, self.metrics.add, labels, now, shared)
        self.response_store: Any = None if beside is None else beside.response_store  # api/responses.py makes it
        self.admission = Admission(
            int(identity.options["concurrency"]), config.max_queued_requests, config.max_queued_tokens, Pace()
        )
        self.recent = RecentRequests(config.max_recent_requests)
        policy, budget = identity.options["kv_budget_policy"], identity.options["kv_budget"]
        self._intake = Intake(
            tokenizer,
            identity.vocab_size,
            identity.eos_ids,
            self.context,
            int(identity.options["seed"]),
            budget=CacheControl(policy=policy, budget=budget) if policy else None,
        )
        self.tool_style, self.reasoning_style = choose_styles(config, template, tokenizer)
        self.turns = Turns()
        self.salt_of = CacheSalts(cache_secret or secrets.token_bytes(32)).salt
        self._tickets: dict[Generation, Ticket] = {}
        self._timers: dict[Generation, asyncio.TimerHandle] = {}  # to the deadlines of those without a token
        self.traffic_log: TrafficLog | None = None
        self.files: FileStore | None = None
        self.batches: BatchRunner | None = None
        self._num_steps = 0  # of the engine, when its statistics last came
        engine.observe(self)
        engine.on_stopped = self.metrics.on_stopped
        engine.on_device_time = lambda seconds: self.accounts.add_time(seconds, time.time())

    def record_traffic(self, log: TrafficLog) -> None:
        self.traffic_log = log
        self.engine.observe(log)

    # --- for routes ---

    def check_model(self, name: str | None) -> str:
        """The model name of the response: `caller_of` has seen whether the key may use it."""
        return self.loras.check_model(name)

    def require_text(self) -> None:
        """Refuse what only a model that generates can do, where the served one is for vectors or scores."""
        settings = self.identity.embedding
        if settings is not None:
            raise ApiError(400, f"{self.names[0]} generates no text: use {settings.routes}", code="model_kind")

    def check_client(self, client: Client, queue: bool = True) -> None:
        """Raise ApiError if the key may send nothing now; called before a body is read. `queue`: nor this model take
        anything."""
        try:
            self._check_client(client, queue)
        except ApiError as error:
            if error.status == 429:
                self.metrics.add("admission_rejections", 1.0, error.code or "other")
            raise

    def has_room(self, client: Client, _model: str | None = None) -> bool:
        """Whether a row of a batch may start."""
        return self.may_add_row(client) and self.takes_row

    def may_add_row(self, client: Client) -> bool:
        """Whether the key has money left, and keeps a place for live requests where its limits leave more than one."""
        limits = ((client.num_active, client.max_parallel), (client.num_sequences, client.max_sequences))
        own = all(number < max(1, limit - 1) for number, limit in limits if limit)
        return own and self.accounts.within_budget(client, time.time())

    @property
    def takes_row(self) -> bool:
        """Whether a row would start at once, or the model be loaded for it."""
        return self.engine.state in ("ready", "asleep", "stopped") and self.admission.has_idle_slot

    def charge(self, client: Client, num_tokens: int = 0, num_requests: int = 1) -> None:
        """On the quota of a key: what never enters the engine, be it answered or refused."""
        now = time.monotonic()
        if client.requests is not None:
            client.requests.take(float(num_requests), now)
        if client.tokens is not None:
            client.tokens.take(float(num_tokens), now)

    @contextlib.contextmanager
    def metered(self, client: Client) -> Iterator[list[int]]:
        """A request that never enters the engine is in flight within the block. What the block appends to the list are
        its tokens."""
        counts: list[int] = []
        self.check_client(client)
        client.num_active += 1
        try:
            yield counts
        finally:
            client.num_active -= 1
        self.charge(client, sum(counts))

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        *,
        client: Client,
    ) -> str:
        """The prompt of a conversation. Always made by a text worker: templates come with the weights, from anywhere,
        and no bound on their steps bounds the cost of each."""
        self.require_text()
        if self.template is None:
            raise ApiError(400, f"{self.names[0]} has no chat template: use /v1/completions", param="messages")
        if len(messages) > _MAX_MESSAGES:
            problem = f"{len(messages)} messages in one request: give at most {_MAX_MESSAGES}"
            raise ApiError(413, problem, param="messages")
        self.check_size(sum(len(str(message.get("content"))) for message in messages), "messages")
        variables = {key: value for key, value in (extra or {}).items() if key not in _OWN_VARIABLES}
        listed = None if tools is None else [dict(tool) for tool in tools]
        job = Render([dict(message) for message in messages], listed, add_generation_prompt, variables)
        return await self.text.render(job, client)

    def check_size(self, num_chars: int, param: str) -> None:
        if num_chars > self.config.max_prompt_chars:
            limit = self.config.max_prompt_chars
            raise ApiError(
                413, f"the prompt has {num_chars} characters, the limit of this server is {limit}", param=param
            )

    async def encode(
        self, prompts: Sequence[str | Sequence[int]], *, client: Client, chat: bool = False, special: bool = True
    ) -> list[list[int]]:
        """Token ids of each prompt. `chat`: texts are rendered templates; `special`: with the tokens that start a
        sequence. Only short texts are tokenized here, by an instance that no thread shares."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            self.check_size(len(text), "messages" if chat else "prompt")
        if sum(map(len, texts)) > _LONG_TEXT:
            encoded = await self.text.encode(Encode(texts, chat, special), client)
        else:
            encoded = [self.tokenizer.encode(text, special and not chat, parse_special=chat) for text in texts]
        ids = iter(encoded)
        return [next(ids) if isinstance(prompt, str) else list(prompt) for prompt in prompts]

    async def open(
        self,
        prompts: Sequence[str | Sequence[int]],
        make_params: Callable[[int], SamplingParams],
        caller: Caller,
        *,
        streaming: bool,
        chat: bool = False,
        special: bool = True,
        vectors: VectorWish | None = None,
        num_answers: int = 1,
        max_prompt_tokens: int | None = None,
    ) -> Generation:
        """Start generating; `make_params` gets the length of each prompt, `num_answers` of them are wanted. Of a prompt
        only the last `max_prompt_tokens` are used, and the token that starts a sequence. `vectors`: these are wanted,
        and no text. The caller must close the result."""
        if vectors is None:
            self.require_text()
        encoded, read = list[list[int]](), time.monotonic()
        generation: Generation | None = None
        try:
            self._check_client(caller.client)
            self.admission.check_sequences(caller.client, len(prompts) * num_answers)  # before they are tokenized
            if max_prompt_tokens is None:
                await self._check_fit(prompts, "messages" if chat else "prompt")
            encoded = await self.encode(prompts, client=caller.client, chat=chat, special=special)
            kept = [cut_prompt(ids, max_prompt_tokens, self.tokenizer.bos_id) for ids in encoded]
            shown = [  # a text that was cut is no longer the prompt; of a chat only its end is looked at
                prompt if chat or len(ids) == len(whole) else ids
                for prompt, whole, ids in zip(prompts, encoded, kept, strict=True)
            ]
            generation = self._prepare(shown, kept, make_params, caller, streaming, vectors)
            generation.stages.read = read
            generation.num_truncated_tokens = sum(map(len, encoded)) - sum(map(len, kept))
            structured = generation.members[0].request.params.structured  # the same for all
            if structured is not None:
                check_grammar_quota(caller.client, time.monotonic())
                await self.text.check_grammar(structured, caller.client)
            ticket = self._admit(generation, caller)
        except UserError as error:
            self.charge(caller.client, sum(map(len, encoded)), num_requests=0)
            raise self._unusable(error, "messages" if chat else "prompt") from None
        except ApiError as error:
            if error.status == 429:
                self.metrics.add("admission_rejections", 1.0, error.code or "other")
                if self.traffic_log is not None and generation is not None:
                    self.traffic_log.on_refused(generation, error.code or "other")
            raise
        self._tickets[generation] = ticket
        self.accounts.open(caller.client)
        try:
            self.engine.submit(generation)
        except ApiError:
            generation.close()
            raise
        if caller.deadline is not None:  # the engine drops it too, but a hung engine answers nobody
            timer = asyncio.get_running_loop().call_later(caller.deadline, generation.fail, deadline_passed())
            self._timers[generation] = timer
        return generation

    def end_clients(self, clients: Collection[Client]) -> None:
        """End all that runs for these clients: their keys are no longer valid."""
        for generation, ticket in list(self._tickets.items()):
            if ticket.client in clients:
                generation.fail(key_withdrawn())

    # --- from the engine ---

    def on_step(self, stats: EngineStats) -> None:
        self.metrics.on_step(stats)
        if stats.num_steps != self._num_steps:  # else only gauges have changed since the last step
            self._num_steps = stats.num_steps
            self.admission.pace.record_step(stats)

    def on_tokens(self, member: Member, num_tokens: int) -> None:
        starts = member.first_token is None
        self.metrics.on_tokens(member, num_tokens)
        if starts and (num_tokens or member.embedding):
            self._stop_timer(member.generation)
            self.admission.started(self._tickets[member.generation], len(member.request.prompt_ids))

    def on_end(self, member: Member) -> None:
        self.metrics.on_end(member)
        self.loras.on_end(member)
        ticket = self._tickets.get(member.generation)
        if member.first_token is not None and ticket is not None:
            output = member.output
            num_output = sum(len(each.token_ids) for each in output.outputs) - member.num_resumed
            num_prompt, num_cached = len(output.prompt_token_ids), output.num_cached_tokens
            model = member.request.adapter.name if member.request.adapter is not None else self.names[0]
            self.accounts.add_request(ticket.client, num_prompt, num_cached, num_output, time.time(), model)
        if member.first_token is not None and member.finished:
            self.admission.pace.record_service(member.last_token - member.first_token)

    def on_restart(self, reason: str) -> None:
        self.metrics.on_restart(reason)

    # --- internals ---

    def _check_client(self, client: Client, queue: bool = True) -> None:
        self.admission.check_client(client, time.monotonic(), queue)
        self.accounts.check_budget(client, time.time())

    def _unusable(self, error: UserError, param: str) -> ApiError:
        if "context" in error.problem:
            return context_exceeded(str(error), self.context, param)
        return ApiError(400, str(error), param=param)

    async def _check_fit(self, prompts: Sequence[str | Sequence[int]], param: str) -> None:
        """Refuse text that cannot fit the context before it is tokenized."""
        for prompt in prompts:
            if not isinstance(prompt, str) or len(prompt) <= self.context:
                continue
            num_tokens = await asyncio.to_thread(self.tokenizer.min_tokens, prompt)
            if num_tokens > self.context:
                problem = f"the prompt has at least {num_tokens} tokens, the context holds {self.context}: shorten "
                raise context_exceeded(f"{problem}it or serve with a larger --context.", self.context, param)

    def _prepare(
        self,
        prompts: Sequence[str | Sequence[int]],
        encoded: list[list[int]],
        make_params: Callable[[int], SamplingParams],
        caller: Caller,
        streaming: bool,
        vectors: VectorWish | None = None,
    ) -> Generation:
        generation = Generation(streaming, self._close, self.accounts.prices)
        client, embeds = caller.client, vectors is not None
        generation.stages.received = caller.received or generation.stages.received
        for number, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
            request = self._intake.request(ids, make_params(len(ids)), uuid.uuid4().hex, caller.rank, embeds=embeds)
            if vectors is not None:
                vectors.put_into(request, number)
            request.tenant, request.weight = client.name, client.weight
            request.max_pinned_share = client.pinned_share
            request.cache_salt = self.salt_of(client, caller.cache_salt)
            request.adapter = caller.adapter
            self.roles.put_into(request, caller.moves, len(prompts))
            if caller.deadline is not None and len(prompts) == 1:  # of several, the first token of any is in time
                request.deadline = time.monotonic() + caller.deadline
            text = prompt if isinstance(prompt, str) else None
            generation.add(request, RequestCollector(request, text, self.tokenizer))
        if caller.resumes:
            generation.resume(self._intake, caller.resumes)
        return generation

    def _admit(self, generation: Generation, caller: Caller) -> Ticket:
        now = generation.stages.submitted = time.monotonic()
        requests = [member.request for member in generation.members]
        params = requests[0].params
        lengths = [len(request.prompt_ids) for request in requests]
        max_output = params.n * sum(min(params.max_tokens, self.context - length) for length in lengths)
        yields = caller.rank >= LANES["batch"] + MIN_PRIORITY
        ticket = self.admission.admit(caller.client, lengths, params.n, caller.deadline, now, max_output, yields)
        self.recent.open(caller.client.name, caller.request_id, generation)
        return ticket

    def _stop_timer(self, generation: Generation) -> None:
        timer = self._timers.pop(generation, None)
        if timer is not None:
            timer.cancel()

    def _close(self, generation: Generation) -> None:
        """Nothing of a closed generation stays reachable from here: neither through the engine nor through timers."""
        self._stop_timer(generation)
        self.roles.forget(generation)
        self.engine.withdraw(generation)
        if generation.code == "deadline":
            self.metrics.add("admission_rejections", 1.0, "deadline")
        ticket = self._tickets.pop(generation, None)
        if ticket is not None:
            produced = sum(len(each.token_ids) for output in generation.outputs for each in output.outputs)
            self.admission.release(ticket, produced, time.monotonic())
            self.recent.close(ticket.client.name, generation)
