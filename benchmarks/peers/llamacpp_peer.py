"""llama.cpp through its C API (package llama-cpp-python), driven the way its own llama-bench and llama-server drive it.

One context per measurement, so that sizes fit; weights are loaded once. Every sequence has KV cells of its own
(`kv_unified = False`, as llama-server runs its slots): in a unified cache each sequence attends over the cells of all,
which costs llama.cpp a sixth at batch 16 and more than half with a shared prefix. One library call per step, no work
per token. Only the bindings are imported, not the package, which brings numpy: see peer_process.py, the user.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def _bindings() -> Any:
    """llama_cpp.llama_cpp, below a package whose own code was not run."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None:
        raise ModuleNotFoundError("No module named 'llama_cpp' (package llama-cpp-python)")
    sys.modules.setdefault("llama_cpp", importlib.util.module_from_spec(spec))
    return importlib.import_module("llama_cpp.llama_cpp")


lib = _bindings()


class Peer:
    def __init__(self, path: Path, threads: int) -> None:
        lib.llama_log_set(_SILENT, None)
        lib.llama_backend_init()
        self._threads = threads
        self._model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        assert self._model, f"llama.cpp cannot load {path}"
        self.vocab_size: int = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._held: Any = None  # context of `hold`
        self._held_length = self._held_count = 0

    def use_threads(self, threads: int) -> None:
        """For the contexts made from here on."""
        self._threads = threads

    def prefill(self, tokens: Sequence[int]) -> float:
        """Tokens per second of one prompt, logits of the last token."""
        context = self._context(len(tokens) + 8, 1)
        started = time.perf_counter()
        self._compute(context, tokens)
        elapsed = time.perf_counter() - started
        lib.llama_free(context)
        return len(tokens) / elapsed

    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> float:
        """Generated tokens per second with every prompt as a sequence of one batch."""
        count = len(prompts)
        context = self._context(max(map(len, prompts)) + steps + 8, count)
        batch = _Batch(max(512, count))
        for number, prompt in enumerate(prompts):
            batch.fill([(token, position, number, True) for position, token in enumerate(prompt)][:512])
            self._decode(context, batch)
        started = time.perf_counter()
        for step in range(steps):
            # Tokens differ between sequences, as they do in use: equal ones would go to the same experts.
            batch.fill(
                [(7 + step + 97 * number, len(prompt) + step, number, True) for number, prompt in enumerate(prompts)]
            )
            self._decode(context, batch)
        elapsed = time.perf_counter() - started
        lib.llama_free(context)
        return count * steps / elapsed

    def hold(self, prompt: Sequence[int], count: int, steps: int) -> None:
        """`count` sequences that all end with `prompt`, each with cells of its own: computed once and copied, so that a
        long context costs one prefill. For `decode_held` with up to `steps`."""
        self._release()
        self._held = context = self._context(len(prompt) + steps + 8, count)
        self._held_length, self._held_count = len(prompt), count
        self._compute(context, prompt)
        memory = lib.llama_get_memory(context)
        for number in range(1, count):
            lib.llama_memory_seq_cp(memory, 0, number, -1, -1)

    def decode_held(self, steps: int) -> float:
        """Generated tokens per second after the prompt of `hold`, all sequences in one batch; then back to its end."""
        batch = _Batch(max(512, self._held_count))
        numbers = range(self._held_count)
        started = 0.0
        for step in range(-1, steps):  # the first one, which makes the copies, is not timed
            if step == 0:
                started = time.perf_counter()
            position = self._held_length + step + 1
            batch.fill([(7 + position + 97 * number, position, number, True) for number in numbers])
            self._decode(self._held, batch)
        elapsed = time.perf_counter() - started
        for number in numbers:
            lib.llama_memory_seq_rm(lib.llama_get_memory(self._held), number, self._held_length, -1)
        return self._held_count * steps / elapsed

    def serve(self, prefix: Sequence[int], tails: Sequence[Sequence[int]], output: int, slots: int) -> float:
        """Output tokens per second over all requests: `slots` sequences, each keeping the common prefix once it has
        computed it, prompts batched beside decodes as llama-server does."""
        longest = len(prefix) + max(map(len, tails)) + output + 8
        context = self._context(longest, slots)
        memory = lib.llama_get_memory(context)
        waiting = deque(tails)
        pending: list[deque[tuple[int, int]]] = [deque() for _ in range(slots)]  # (token, position) to compute
        left = [0] * slots
        known = [0] * slots
        batch = _Batch(512)
        done = 0
        started = time.perf_counter()
        while done < len(tails):
            for slot in range(slots):
                if not left[slot] and waiting:
                    tail = waiting.popleft()
                    first = len(prefix) if known[slot] else 0
                    lib.llama_memory_seq_rm(memory, slot, first, -1)
                    prompt = [*prefix, *tail]
                    pending[slot].extend((prompt[position], position) for position in range(first, len(prompt)))
                    known[slot], left[slot] = len(prompt), output
            rows: list[tuple[int, int, int, bool]] = []
            sampling = []
            for slot in sorted(range(slots), key=lambda slot: len(pending[slot])):
                while pending[slot] and len(rows) < 512:
                    token, position = pending[slot].popleft()
                    rows.append((token, position, slot, not pending[slot]))
                    if not pending[slot]:
                        sampling.append(slot)
            batch.fill(rows)
            self._decode(context, batch)
            for slot in sampling:
                left[slot] -= 1
                if left[slot]:
                    pending[slot].append((11, known[slot]))
                    known[slot] += 1
                else:
                    done += 1
        elapsed = time.perf_counter() - started
        lib.llama_free(context)
        return len(tails) * output / elapsed

    def _compute(self, context: Any, prompt: Sequence[int]) -> None:
        """A prompt of sequence 0, 512 tokens at a time, logits of the last one only."""
        batch = _Batch(512)
        for begin in range(0, len(prompt), 512):
            part = prompt[begin : begin + 512]
            rows = [(token, begin + offset, 0, False) for offset, token in enumerate(part)]
            if begin + 512 >= len(prompt):
                rows[-1] = (*rows[-1][:3], True)
            batch.fill(rows)
            self._decode(context, batch)

    def close(self) -> None:
        self._release()
        lib.llama_model_free(self._model)

    def _release(self) -> None:
        if self._held is not None:
            lib.llama_free(self._held)
            self._held = None

    def _context(self, tokens_each: int, sequences: int) -> Any:
        params = lib.llama_context_default_params()
        # Without a unified cache a sequence gets n_ctx / n_seq_max cells, in multiples of 256.
        params.n_ctx = sequences * -(-tokens_each // 256) * 256
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self._threads
        if hasattr(params, "kv_unified"):
            params.kv_unified = False
        context = lib.llama_init_from_model(self._model, params)
        assert context, "llama.cpp cannot make a context"
        return context

    @staticmethod
    def _decode(context: Any, batch: _Batch) -> None:
        assert lib.llama_decode(context, batch.raw) == 0, "llama_decode failed"
        lib.llama_synchronize(context)


class _Batch:
    def __init__(self, capacity: int) -> None:
        self.raw = lib.llama_batch_init(capacity, 0, 1)

    def fill(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """Rows of (token, position, sequence, wants logits)."""
        raw = self.raw
        raw.n_tokens = len(rows)
        for number, (token, position, sequence, wants) in enumerate(rows):
            raw.token[number] = token
            raw.pos[number] = position
            raw.n_seq_id[number] = 1
            raw.seq_id[number][0] = sequence
            raw.logits[number] = wants


@lib.llama_log_callback
def _SILENT(_level: int, _text: bytes, _data: object) -> None:
    """Keeps llama.cpp's log out of the table."""
