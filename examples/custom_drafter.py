"""An extension in one file: a drafter that guesses from a list of phrases it expects, registered under a name.

    python examples/custom_drafter.py [MODEL]

Drafts may be wrong: verification keeps the output what it is without them. Contract: runtime/speculation/base.py.
"""

import sys

from tokenmill import LLM, SamplingParams
from tokenmill.runtime.speculation import DRAFTERS
from tokenmill.runtime.speculation.base import Draft, Drafter

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
PHRASE = [11, 22, 33, 44]  # replaced below by tokens of the text that is expected


class PhraseDrafter(Drafter):
    name = "phrase"

    @classmethod
    def build(cls, _argument, _target):
        return cls()

    def draft(self, rows, limits):
        return [self._continue(row.request.token_ids[-1], limit) for row, limit in zip(rows, limits, strict=True)]

    def _continue(self, last, limit):
        guess = PHRASE[PHRASE.index(last) + 1 :][:limit] if last in PHRASE else []
        return Draft(guess, [0.9] * len(guess))


DRAFTERS.register("phrase", PhraseDrafter)
prompt, params = "Once upon a time", SamplingParams(temperature=0, max_tokens=32)
with LLM(MODEL, context=256) as llm:
    plain = llm.generate(prompt, params)[0].outputs[0]
PHRASE[:] = plain.token_ids  # a drafter that knows the answer
with LLM(MODEL, context=256, speculate="phrase") as llm:
    drafted = llm.generate(prompt, params)[0].outputs[0]
    print(f"{llm.stats.num_accepted} of {llm.stats.num_drafted} drafted tokens held")
print("the same tokens" if drafted.token_ids == plain.token_ids else "different tokens: please report this")
