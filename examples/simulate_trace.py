"""Simulate a trace: the engine's own scheduler on a cost model, at twice and at eight times the recorded speed.

    python examples/simulate_trace.py [MODEL]

A trace is JSON lines with the time of arrival and two lengths; Azure, Mooncake and ServeGen files work too.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = sys.argv[1] if len(sys.argv) > 1 else "llama-3.1-8b"
draw = random.Random(0)

with tempfile.TemporaryDirectory() as folder:
    trace, clock = Path(folder) / "trace.jsonl", 0.0
    with trace.open("w") as file:
        for _ in range(200):
            clock += draw.expovariate(2.0)
            row = {"arrival_s": clock, "input_length": draw.randint(100, 2000), "output_length": draw.randint(20, 300)}
            file.write(json.dumps(row) + "\n")
    for speedup in ("2", "8"):
        command = [sys.executable, "-m", "tokenmill", "simulate", MODEL, "--gpu", "h100", "--trace", str(trace)]
        done = subprocess.run([*command, "--speedup", speedup, "--json"], check=True, capture_output=True, text=True)
        result = json.loads(done.stdout)
        print(
            f"speed-up {speedup}: TTFT p50 {result['ttft_ms']['p50']:.0f} ms, p99 {result['ttft_ms']['p99']:.0f} ms, "
            f"ITL p50 {result['itl_ms']['p50']:.1f} ms, {result['throughput_tok_s']:.0f} tokens/s, "
            f"{result['preemptions']} preemptions"
        )
