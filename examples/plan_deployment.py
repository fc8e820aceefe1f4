"""Plan a deployment from Python: the cheapest that keeps the promises of a chat, on three kinds of GPU.

    python examples/plan_deployment.py [MODEL]

Nothing is downloaded and no GPU is needed: the planner knows the model by name. `--json` of every verb is a contract.
"""

import json
import subprocess
import sys

MODEL = sys.argv[1] if len(sys.argv) > 1 else "llama-3.1-8b"


def tokenmill(*arguments: str) -> dict:
    command = [sys.executable, "-m", "tokenmill", *arguments, "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


for gpu in ("h100x1", "a100x1", "l40sx1"):
    answer = tokenmill("plan", MODEL, "--gpu", gpu, "--use", "chat", "--concurrency", "32", "--max-quality-loss", "1")
    plan, costs = answer["plan"], answer["costs"]
    itl = plan["itl_ms"]
    print(
        f"{gpu}: {plan['weights']} weights on {plan['engine']}, "
        f"{itl['value']:.1f} ms a token ({itl['low']:.1f} to {itl['high']:.1f}), "
        f"${costs['per_million_output']:.2f} per million output tokens"
    )
