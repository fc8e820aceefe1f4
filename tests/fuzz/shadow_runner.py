"""A runner that computes nothing but remembers everything: what every slot of every page holds.

The content of a slot is a hash of the adapter that computed it and of all tokens up to it, so a row can prove that each
position it may attend to is in its page tables, with the KV of exactly its own prefix. The content of a state slot is
the hash of all tokens that went into it: a row must find the state of exactly the tokens before it, and leaves that of
its last one. The next token is a hash of the whole prefix and the seed: outputs depend on nothing but the request, and
`expected_output` says what they must be.
"""

from __future__ import annotations

from tokenmill.engine.kv.manager import KVManager
from tokenmill.types import Request, ScheduledTokens, StepPlan, StepResult

VOCABULARY = 7  # small: random prompts share prefixes by chance too


def chain_hashes(token_ids: list[int], chain: list[int], adapter: bytes = b"") -> list[int]:
    """Extend `chain` in place so that entry i is the hash of tokens 0..i, as that adapter computes them."""
    while len(chain) < len(token_ids):
        chain.append(hash((chain[-1] if chain else adapter, token_ids[len(chain)])))
    return chain


def adapter_of(request: Request) -> bytes:
    return request.adapter.digest if request.adapter is not None else b""


def next_token(prefix_hash: int, seed: int) -> int:
    return hash((prefix_hash, seed, 1)) % VOCABULARY


def expected_output(request: Request, seed: int, context_length: int) -> list[int]:
    tokens = list(request.prompt_ids)
    chain: list[int] = []
    while True:
        tokens.append(next_token(chain_hashes(tokens, chain, adapter_of(request))[-1], seed))
        finished = tokens[-1] in request.stop_ids or len(tokens) == context_length
        if finished or len(tokens) - len(request.prompt_ids) == request.params.max_tokens:
            return tokens[len(request.prompt_ids) :]


class ShadowRunner:
    def __init__(self, kv: KVManager) -> None:
        self.kv = kv
        self.size = kv.layout.page_size
        self.memory: list[list[int | None]] = [[None] * self.size for _ in range(kv.num_pages)]
        self.chains: dict[Request, list[int]] = {}
        self.num_copies = 0
        self.states: dict[int, int | None] = {}  # by slot: hash of the tokens so far
        self.num_state_copies = 0
        self.adapters: dict[int, bytes] = {}  # by slot: what lies there

    def execute(self, plan: StepPlan) -> StepResult:
        self._copy(plan)
        self._continue_states(plan)
        written: set[tuple[int, int]] = set()
        for row in plan.scheduled:
            chain = self._chain(row)
            for group, table in enumerate(row.block_tables):
                for position in range(row.start, row.start + row.count):
                    page, slot = table[position // self.size], position % self.size
                    assert self.kv._pool.refs[page] == 1, "wrote to a shared page"
                    assert page not in self.kv._tree.owner, "wrote to a cached page"
                    assert (page, slot) not in written, "two rows wrote to one slot"
                    written.add((page, slot))
                    self.memory[page][slot] = hash((group, chain[position]))
        tokens: list[int | None] = []
        for row in plan.scheduled:
            chain = self.chains[row.request]
            self._verify(row.start, row.start + row.count, row.block_tables, chain)
            assert row.samples == (row.start + row.count == row.request.num_tokens)
            tokens.append(next_token(chain[-1], row.request.seed) if row.samples else None)
        return StepResult(tokens, [None] * len(tokens), [None] * len(tokens))

    def _chain(self, row: ScheduledTokens) -> list[int]:
        """Computed with whatever lies in the slot that the row names."""
        adapter = self.adapters[row.adapter_slot] if row.adapter_slot else b""
        assert adapter == adapter_of(row.request), "another adapter than the request's"
        return chain_hashes(row.request.token_ids, self.chains.setdefault(row.request, []), adapter)

    def _copy(self, plan: StepPlan) -> None:
        destinations = [copy for _, copy in plan.page_copies]
        assert len(set(destinations)) == len(destinations)
        contents = [list(self.memory[source]) for source, _ in plan.page_copies]  # all read before any is written
        for copy, content in zip(destinations, contents, strict=True):
            self.memory[copy] = content
        self.num_copies += len(destinations)

    def _continue_states(self, plan: StepPlan) -> None:
        if not self.kv.layout.states:
            assert not plan.state_copies
            return
        for source, destination in plan.state_copies:  # in order
            self.states[destination] = self.states.get(source)
        self.num_state_copies += len(plan.state_copies)
        slots = [row.state_slot for row in plan.scheduled]
        assert len(set(slots)) == len(slots), "two rows have one state slot"
        for row in plan.scheduled:
            chain = self._chain(row)
            if row.start:
                assert self.states[row.state_slot] == chain[row.start - 1], "the state of another prefix"
            self.states[row.state_slot] = chain[row.start + row.count - 1]

    def _verify(self, start: int, end: int, tables: tuple[list[int], ...], chain: list[int]) -> None:
        """Every position that the tokens start..end-1 see holds this prefix, in every group."""
        for number, (group, table) in enumerate(zip(self.kv.layout.groups, tables, strict=True)):
            first = max(0, start - group.window + 1) if group.kind == "sliding" else 0
            for position in range(first, end):
                page = table[position // self.size]
                assert page >= 0, f"position {position} left group {number} while visible"
                content = self.memory[page][position % self.size]
                assert content == hash((number, chain[position])), f"position {position} of group {number} is not ours"
