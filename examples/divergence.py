"""What a 4-bit KV cache costs: divergence from the same model with float32 pages, on the same text.

python examples/divergence.py [MODEL] [TEXT_FILE]
"""

import sys
from pathlib import Path

from tokenmill.config import EngineConfig
from tokenmill.evaluate.divergence import measure_divergence
from tokenmill.evaluate.gate import GateLimits, judge
from tokenmill.evaluate.windows import added_bos, cut_chunks

MODEL = sys.argv[1] if len(sys.argv) > 1 else "stories15m"
STORY = "Once upon a time there was a little girl named Lily. She loved to play outside in the park with her dog. "
TEXT = Path(sys.argv[2]).read_text() if len(sys.argv) > 2 else STORY * 30
CONTEXT = 128


def windows(tokenizer):
    return cut_chunks(tokenizer.encode(TEXT), CONTEXT, added_bos(tokenizer))


# The reference runs once with the default pages; its log-probabilities are cached on disk for the next candidate.
reference = measure_divergence(MODEL, MODEL, windows, EngineConfig(), context=CONTEXT)
candidate = measure_divergence(
    MODEL, reference.reference_cache, windows, EngineConfig(kv_cache_dtype="int4"), context=CONTEXT
)
print(f"against itself: mean divergence {reference.kld_mean:.2e}, same top token {reference.top1_agreement:.1%}")
print(f"int4 KV pages:  mean divergence {candidate.kld_mean:.2e}, same top token {candidate.top1_agreement:.1%}")
print(f"perplexity times {candidate.perplexity_ratio:.4f} +- {candidate.perplexity_ratio_stderr:.4f}")
verdict = judge(candidate, GateLimits(max_quality_loss=0.01))
print("within 1 %" if verdict.passed else f"not shown to be within 1 %: {'; '.join(verdict.reasons)}")
