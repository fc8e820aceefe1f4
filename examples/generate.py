"""Offline generation: a batch of prompts in, a batch of outputs out, in one process.

python examples/generate.py [MODEL]
"""

import sys

from tokenmill import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
PROMPTS = ["Once upon a time", "The little dog", "One day, Lily went to the park and"]

# One record for all prompts, or a list with one for each.
params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=24, seed=7)

with LLM(MODEL, context=256) as llm:
    for output in llm.generate(PROMPTS, params):
        answer = output.outputs[0]
        print(f"{output.prompt!r} -> {answer.text!r} ({len(answer.token_ids)} tokens, {answer.finish_reason})")
