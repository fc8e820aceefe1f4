"""The offline GPU workloads, independent of the engine: which prompts, how long the outputs, which figure is reported.

Both engines of gpu_vs_vllm.py and gpu_architectures.py run this file, so they draw the same prompts in the same order.
It needs only the standard library: the process that runs vLLM imports nothing of ours but this.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, Protocol

NAMES = (
    "single", "decode8", "decode16", "decode64", "decode256", "long", "prefill", "mixed", "lognormal", "shared",
    "prefixes", "features",
)  # fmt: skip

# Of every second row; both engines have parameters of these names, but for `structured`.
FEATURES: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "logprobs": {"logprobs": 5},
    "seeds": {"seed": 7, "top_k": 50, "top_p": 0.9},
    # Kind and text; each engine makes a parameter of its own of them. With random weights neither ends by itself.
    "regex": {"structured": ("regex", "([a-z ]{1,8},)*")},
    "schema": {
        "structured": (
            "json_schema",
            '{"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}, "size": '
            '{"type": "integer"}}, "required": ["name", "size"], "additionalProperties": false}, "minItems": 1}',
        )
    },
}


class Generate(Protocol):
    def __call__(
        self, prompts: list[list[int]], lengths: list[int], features: Sequence[dict[str, Any]] | None = None
    ) -> float:
        """Seconds for these prompts, so many tokens out, with these sampling parameters besides (by row)."""


def report(workload: str, **values: float) -> None:
    """One line of JSON for one workload, on stdout."""
    print(json.dumps({"workload": workload} | {name: round(value, 3) for name, value in values.items()}), flush=True)


class Workloads:
    """Random token ids, temperature 0.6, no end of text. `generate` computes a batch and answers its seconds."""

    def __init__(
        self,
        generate: Generate,
        suffix: str = "",
        steps: int = 256,
        longest: int = 1024,
        prompt: int = 8192,
        continues: bool = False,
        vocabulary: int = 100000,
        grammars: bool = False,
    ) -> None:
        """`steps`: decode steps that are timed; `longest`: tokens in and out of `mixed`; `prompt`: of `prefill`;
        `vocabulary`: token ids are below it; `continues`: a workload that fails is reported as an error, and the others
        still run; `grammars`: the model has a tokenizer, so that `features` include them."""
        self._generate = generate
        self._random = random.Random(0)
        self._steps, self._longest, self._prompt, self._continues = steps, longest, prompt, continues
        self._vocabulary, self._grammars = vocabulary, grammars
        self.suffix = suffix  # appended to the name of each workload

    def run(self, names: Sequence[str]) -> None:
        self._generate([self._tokens(64) for _ in range(4)], [16] * 4)
        for name in names:
            try:
                self._run_one(name)
            except Exception as problem:
                if not self._continues:
                    raise
                error = f"{type(problem).__name__}: {str(problem)[:300]}"
                print(json.dumps({"workload": name + self.suffix, "error": error}), flush=True)

    def _run_one(self, name: str) -> None:
        if name.startswith("decode"):
            self.decode(int(name.removeprefix("decode")))
        elif name in NAMES:
            getattr(self, name)()
        else:
            raise SystemExit(f"unknown workload {name!r}: give some of {', '.join(NAMES)}")

    def single(self) -> None:
        """One request, 512 tokens in: time to first token, then milliseconds per output token."""
        self._generate([self._tokens(512)], [8])
        first = self._generate([self._tokens(512)], [1])
        total = self._generate([self._tokens(512)], [self._steps + 1])
        self._report("single", ttft_ms=first * 1e3, tpot_ms=(total - first) / self._steps * 1e3)

    def decode(self, batch: int) -> None:
        """Decode steps of `batch` sequences. The prompts are in the prefix cache, so only decoding differs. The better
        of two runs: an engine may still compile kernels in the first."""
        prompts = [self._tokens(512) for _ in range(batch)]
        self._generate(prompts, [9] * batch)
        runs = []
        for _ in range(2):
            total = self._generate(prompts, [self._steps + 1] * batch)
            runs.append((total - self._generate(prompts, [1] * batch)) / self._steps)
        seconds = min(runs)
        self._report(f"decode{batch}", tpot_ms=seconds * 1e3, tok_s=batch / seconds)

    def long(self) -> None:
        """Decode steps of eight sequences of 16,000 tokens."""
        prompts = [self._tokens(16000) for _ in range(8)]
        self._generate(prompts, [9] * 8)
        total = self._generate(prompts, [self._steps + 1] * 8)
        seconds = (total - self._generate(prompts, [1] * 8)) / self._steps
        self._report("decode8x16000", tpot_ms=seconds * 1e3, tok_s=8 / seconds)

    def prefill(self) -> None:
        """Eight prompts; the second of two runs counts."""
        for _ in range(2):
            seconds = self._generate([self._tokens(self._prompt) for _ in range(8)], [1] * 8)
        self._report(f"prefill8x{self._prompt}", tok_s=8 * self._prompt / seconds)

    def mixed(self) -> None:
        """256 requests of 100 to `longest` tokens in and as many out, all waiting at the start."""
        prompts = [self._tokens(self._random.randint(100, self._longest)) for _ in range(256)]
        lengths = [self._random.randint(100, self._longest) for _ in range(256)]
        self._generate([self._tokens(len(prompt)) for prompt in prompts], [4] * 256)
        self._report("mixed256", out_tok_s=sum(lengths) / self._generate(prompts, lengths))

    def lognormal(self) -> None:
        """256 requests as users send them: many short ones and some long, in and out (median 200, a tenth over 720)."""
        prompts = [self._tokens(self._length()) for _ in range(256)]
        lengths = [self._length() for _ in range(256)]
        self._generate([self._tokens(len(prompt)) for prompt in prompts], [4] * 256)
        self._report("lognormal256", out_tok_s=sum(lengths) / self._generate(prompts, lengths))

    def _length(self) -> int:
        return min(max(round(self._random.lognormvariate(5.3, 1.0)), 8), 2 * self._longest)

    def shared(self) -> None:
        """256 requests with 4,096 tokens in common, 128 of their own, 64 out."""
        prefix = self._tokens(4096)
        prompts = [prefix + self._tokens(128) for _ in range(256)]
        self._report("shared4096x256", req_s=256 / self._generate(prompts, [64] * 256))

    def prefixes(self) -> None:
        """32 prefixes of 2,048 tokens, twelve requests each with 64 tokens of their own, 64 out, in random order."""
        heads = [self._tokens(2048) for _ in range(32)]
        prompts = [head + self._tokens(64) for head in heads for _ in range(12)]
        self._random.shuffle(prompts)
        self._report("prefixes32x12", req_s=len(prompts) / self._generate(prompts, [64] * len(prompts)))

    def features(self) -> None:
        """Decode steps of 64 sequences, every second one with features of sampling; beside them, without. The better of
        two runs, as of `decode`."""
        batch = 64
        for name, feature in [("none", {}), *FEATURES.items()]:
            if "structured" in feature and not self._grammars:
                continue
            prompts = [self._tokens(512) for _ in range(batch)]
            rows = [feature if row % 2 else {} for row in range(batch)]
            self._generate(prompts, [9] * batch, rows)
            runs = []
            for _ in range(2):
                total = self._generate(prompts, [self._steps + 1] * batch, rows)
                runs.append((total - self._generate(prompts, [1] * batch, rows)) / self._steps)
            self._report(f"features64 {name}", tpot_ms=min(runs) * 1e3, tok_s=batch / min(runs))

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(10, self._vocabulary) for _ in range(count)]

    def _report(self, workload: str, **values: float) -> None:
        report(workload + self.suffix, **values)
