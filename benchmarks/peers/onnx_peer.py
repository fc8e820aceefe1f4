"""A model folder of onnxruntime-genai in this process: the same measurements as llamacpp_peer.py.

Used by cpu_vs_onnx.py through peer_process.py, in an interpreter that has the package.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime_genai as genai


class Peer:
    def __init__(self, path: Path, threads: int) -> None:
        described = json.loads((path / "genai_config.json").read_text())["model"]
        self.vocab_size: int = described["vocab_size"]
        config = genai.Config(str(path))
        options = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = genai.Model(config)

    def prefill(self, tokens: Sequence[int]) -> float:
        """Tokens per second up to the first token of the answer."""
        generator = self._begin(1, len(tokens) + 1)
        started = time.perf_counter()
        generator.append_tokens(np.array([tokens], dtype=np.int32))
        generator.generate_next_token()
        return len(tokens) / (time.perf_counter() - started)

    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> float:
        """Tokens per second of `steps` steps of all sequences, whose prompts are equally long."""
        generator = self._begin(len(prompts), len(prompts[0]) + steps + 1)
        generator.append_tokens(np.array(prompts, dtype=np.int32))
        generator.generate_next_token()
        started = time.perf_counter()
        for _ in range(steps):
            generator.generate_next_token()
        return len(prompts) * steps / (time.perf_counter() - started)

    def close(self) -> None:
        del self._model

    def _begin(self, batch: int, length: int) -> genai.Generator:
        """`length`: of prompt and answer, which no end of text cuts short."""
        parameters = genai.GeneratorParams(self._model)
        parameters.set_search_options(batch_size=batch, max_length=length, min_length=length, do_sample=False)
        return genai.Generator(self._model, parameters)
