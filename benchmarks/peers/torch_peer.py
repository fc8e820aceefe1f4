"""transformers' model of the shape of random_gguf.py in plain torch: random weights in the dtype of the file, the same
measurements as llamacpp_peer.py. Used by cpu_shapes.py through peer_process.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from benchmarks.random_gguf import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, MLP, VOCABULARY


class Peer:
    def __init__(self, path: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        config = Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, tie_word_embeddings=True,
        )  # fmt: skip
        torch.set_default_dtype(torch.bfloat16 if "BF16" in path.name else torch.float32)
        with torch.device("meta"):  # its own initialization takes many seconds
            self._model = Qwen3ForCausalLM(config).eval()
        self._model.to_empty(device="cpu").tie_weights()
        self._model.model.rotary_emb = type(self._model.model.rotary_emb)(config)
        pool = torch.randn(HIDDEN * MLP) / 32
        for weight in self._model.parameters():
            repeated = pool.repeat(-(-weight.numel() // len(pool)))[: weight.numel()].view_as(weight)
            weight.copy_(torch.ones_like(weight) if weight.dim() == 1 else repeated)
        self.vocab_size = VOCABULARY
        self._prompt: list[int] = []

    def use_threads(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def prefill(self, tokens: Sequence[int]) -> float:
        started = time.perf_counter()
        self._model(torch.tensor([list(tokens)]), use_cache=True, logits_to_keep=1)
        return len(tokens) / (time.perf_counter() - started)

    def hold(self, prompt: Sequence[int], count: int, steps: int) -> None:  # noqa: ARG002
        self._prompt = list(prompt)
        assert count == 1

    def decode_held(self, steps: int) -> float:
        cache = DynamicCache()
        self._model(torch.tensor([self._prompt]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        started = time.perf_counter()
        for step in range(steps):
            self._model(torch.tensor([[7 + step]]), past_key_values=cache, use_cache=True)
        return steps / (time.perf_counter() - started)

    def close(self) -> None:
        del self._model
