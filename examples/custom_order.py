"""An extension in one file: a queue discipline that serves short prompts first, registered under a name.

    python examples/custom_order.py [MODEL]

Contract: engine/order/base.py. The scheduler asks for a key once per request; lower runs first.
"""

import sys

from tokenmill import LLM, SamplingParams
from tokenmill.engine.order import DISCIPLINES
from tokenmill.engine.order.base import Discipline

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"


class ShortestPromptFirst(Discipline):
    def key(self, request):
        return (len(request.prompt_ids), request.arrival)


DISCIPLINES.register("shortest", ShortestPromptFirst)
prompts = ["a " * 60, "a " * 30, "a " * 5]
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
with LLM(MODEL, context=256, concurrency=1, scheduling="shortest") as llm:
    outputs = llm.generate(prompts, params)
by_time = sorted(outputs, key=lambda output: output.metrics.first_token)
print("served in this order, prompt tokens:", [len(output.prompt_token_ids) for output in by_time])
