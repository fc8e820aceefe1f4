"""Log-probabilities of a batch: which of several endings does the model find most likely?

python examples/logprobs.py [MODEL]
"""

import sys

from tokenmill import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
BEGINNING = "The children were hungry, so their mother gave them"
ENDINGS = [" some bread.", " a mountain.", " the moon."]

with LLM(MODEL, context=256) as llm:
    encode = llm.parts.tokenizer.encode
    num_common = len(encode(BEGINNING))
    # prompt_logprobs asks for the log-probability of every prompt token; one token has to be generated.
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, logprobs=3)
    outputs = llm.generate([BEGINNING + ending for ending in ENDINGS], params)
    for ending, output in zip(ENDINGS, outputs, strict=True):
        pairs = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[num_common:]
        score = sum(position[token_id].logprob for token_id, position in pairs)
        print(f"{ending!r}: log-probability {score:.2f}")
    print("most likely next tokens after the last prompt:")
    for token_id, entry in outputs[-1].outputs[0].logprobs[0].items():
        print(f"  {token_id:6} {entry.decoded_token!r} {entry.logprob:.2f}")
