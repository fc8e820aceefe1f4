"""What each attack of the suite costs a well-behaved tenant: TTFT and time between tokens, alone and under attack.

    python benchmarks/under_attack.py [smollm2] [--seconds 10] [--rounds 3] [--attack NAME ...] [--json]

One server with keys for both. For each attack, phases alternate: the tenant streams alone, then while the attack runs
in a process of its own, and again. The table gives the 50th and 99th percentile of both and their ratio; the exit code
is 1 if a 99th percentile more than doubles, an answer is wrong, or any request of the tenant fails.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.attack_client import Target
from benchmarks.attack_shapes import ATTACKS, Attack, repeat
from benchmarks.server_process import started_server
from benchmarks.tenant_keys import key_of, write_keys
from tests.attacks.tenant import Times, WellBehavedTenant, streaming

_LIMIT = 2.0  # p99 under attack over p99 alone
_FLAGS = ("--concurrency", "16", "--max-queued-requests", "128", "--memory", "1GiB", "--quiet")
_COLUMNS = (
    "attack",
    "finding",
    "TTFT p50",
    "TTFT p99",
    "under",
    "ratio",
    "ITL p50",
    "ITL p99",
    "under",
    "ratio",
    "errors",
    "attacks",
)


def measure(attack: Attack, url: str, seconds: float, rounds: int) -> dict[str, Any]:
    alone, under = Times(), Times()
    num_attacks = 0
    tenant = WellBehavedTenant(url, key_of("good"))
    tenant.start()
    try:
        for _ in range(rounds):
            _phase(tenant, alone, seconds)
            context = multiprocessing.get_context("spawn")
            ready, stopping, rounds_done = context.Event(), context.Event(), context.Value("i", 0)
            target = Target(url, key_of("evil"))
            attacker = context.Process(
                target=repeat, args=(attack.name, target, ready, stopping, rounds_done), daemon=True
            )
            attacker.start()
            ready.wait(60)
            try:
                _phase(tenant, under, seconds)
            finally:
                stopping.set()
                attacker.join(30)
                if attacker.is_alive():
                    attacker.kill()
                num_attacks += rounds_done.value
    finally:
        tenant.stop()
    row: dict[str, Any] = {"attack": attack.name, "finding": attack.finding, "errors": len(tenant.errors)}
    row["attacks"] = num_attacks
    for name in ("first_tokens", "between_tokens"):
        before, after = getattr(alone, name), getattr(under, name)
        row[name] = {
            "alone_p50_ms": _percentile(before, 50),
            "alone_p99_ms": _percentile(before, 99),
            "under_p50_ms": _percentile(after, 50),
            "under_p99_ms": _percentile(after, 99),
            "ratio_p99": round(_percentile(after, 99) / max(_percentile(before, 99), 1e-6), 2),
            "samples": [len(before), len(after)],
        }
    row["problems"] = tenant.errors[:3]
    row["ok"] = not tenant.errors and all(
        row[name]["ratio_p99"] <= _LIMIT for name in ("first_tokens", "between_tokens")
    )
    return row


def _settle(url: str, seconds: float = 10.0) -> None:
    """A server that has just started makes its spare engine process ready: that is over first."""
    with streaming(url, key_of("good"), patience=None) as tenant:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            tenant.wait_for_answers(1, 120)


def _phase(tenant: WellBehavedTenant, into: Times, seconds: float) -> None:
    """Whole answers only: those that began before the phase are left out."""
    tenant.wait_for_answers(1, 120)
    tenant.times.clear()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        tenant.wait_for_answers(1, 120)
    into.first_tokens += tenant.times.first_tokens
    into.between_tokens += tenant.times.between_tokens


def _percentile(samples: list[float], percent: int) -> float:
    """In milliseconds."""
    if len(samples) < 2:
        return round(1000 * (samples[0] if samples else 0.0), 2)
    return round(1000 * statistics.quantiles(samples, n=100, method="inclusive")[percent - 1], 2)


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [_COLUMNS]
    for row in rows:
        first, between = row["first_tokens"], row["between_tokens"]
        cells = [row["attack"], row["finding"]]
        for part in (first, between):
            cells += [part["alone_p50_ms"], part["alone_p99_ms"], part["under_p99_ms"], part["ratio_p99"]]
        lines.append((*map(str, cells), str(row["errors"]), str(row["attacks"])))
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of phases for each attack")
    parser.add_argument("--attack", action="append", choices=[each.name for each in ATTACKS], help="only these")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chosen = [each for each in ATTACKS if not options.attack or each.name in options.attack]
    rows = []
    with tempfile.TemporaryDirectory(prefix="tokenmill-attack-") as folder:
        limits = {"evil": {"max_sequences": 64, "max_queue_share": 0.5, "max_pinned_share": 0.2}}
        keys = write_keys(Path(folder) / "keys.json", ("good", "evil"), limits)
        with started_server(options.model, *_FLAGS, "--api-keys-file", str(keys)) as server:
            _settle(server.url)
            for attack in chosen:
                rows.append(measure(attack, server.url, options.seconds, options.rounds))
                print(f"{attack.name}: {'ok' if rows[-1]['ok'] else 'FAILED'}", file=sys.stderr, flush=True)
    ok = all(row["ok"] for row in rows)
    print(json.dumps({"ok": ok, "limit": _LIMIT, "attacks": rows}) if options.json else _table(rows))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
