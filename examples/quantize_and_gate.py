"""Quantize a model and let the gate decide, on held-out text, whether the result may be kept.

    python examples/quantize_and_gate.py [MODEL] [OUT]

Eight bits pass a limit of 2 %; three bits, rounded to nearest, do not.
"""

import sys
import tempfile
from pathlib import Path

from tokenmill import LLM, SamplingParams, UserError
from tokenmill.quantize.finish import GateRequest
from tokenmill.quantize.job import QuantizeJob, prepare, run_job
from tokenmill.quantize.recipe import RecipeRequest

MODEL = sys.argv[1] if len(sys.argv) > 1 else "stories15m"
OUT = Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp())


def quantize(bits: int) -> Path:
    job = QuantizeJob(
        model=MODEL,
        out=OUT / f"int{bits}",
        recipe=RecipeRequest("rtn", bits=bits, group_size=32),
        gate=GateRequest(max_quality_loss=0.02, max_chunks=3),
        restart=True,
    )
    report = run_job(prepare(job), lambda _done, _total, _seconds_left: None)
    loss = report.fidelity["quality_loss"]
    print(f"{bits} bits, kept: {report.bytes / 1e6:.1f} MB, perplexity {loss:+.2%}")
    return job.out


folder = quantize(8)
with LLM(folder, context=256) as llm:
    print(llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=24))[0].outputs[0].text)
try:
    quantize(3)
except UserError as error:
    print(f"3 bits, {error}")
