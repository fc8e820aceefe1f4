"""A smaller KV cache and speculative decoding together: how many drafts held, and that the tokens stay the same.

python examples/kv_and_speculation.py [MODEL]
"""

import sys

from tokenmill import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
PROMPT = "Tim has a red ball. Sue has a red ball. Tom has a red ball. Ann has a red ball. Ben has"
PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


def decode(**options):
    with LLM(MODEL, context=256, **options) as llm:
        token_ids = llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids
        return token_ids, llm.stats


plain, _ = decode(kv_cache_dtype="int8")
drafted, stats = decode(kv_cache_dtype="int8", speculate="ngram")
print(f"drafted {stats.num_drafted} tokens, {stats.num_accepted} held")
print("the same tokens" if drafted == plain else "different tokens: please report this")
