"""`serve --speculate auto` against `off` over HTTP: tokens per second on natural and on repetitive text, interleaved.

    python benchmarks/served_drafts.py smollm2 --prompts spec_bench.jsonl [--concurrency 1,4] [--rounds 6]
                                       [--max-tokens 96] [--text natural,repetitive] [--against off]

Both servers run all the time; one is idle while the other is asked. In a round each gets the same prompts, which
neither had before, from as many clients as `--concurrency` says; which one is first alternates. Natural: questions and
open-ended rows of Spec-Bench ({"category", "turns"}) as chats. Repetitive: a passage of the same file three times and
its beginning once more, as a completion. Greedy; the answers are compared. Prints the ratio of the medians of tokens
per second, and the median, lowest and highest of the ratios by round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.server_process import started_server

_OPEN = ("writing", "roleplay", "humanities", "stem", "reasoning", "qa")
_PASSAGE = 400  # characters
_BEGINNING = 60


def main() -> None:
    options = _arguments()
    names = ("auto", options.against)
    flags = ("--context", "2048", "--concurrency", str(max(options.concurrency)))
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(started_server(options.model, "--speculate", name, *flags)).url for name in names]
        for url in urls:
            asyncio.run(_ask(url, [_natural("Hello")] * 2, 1, 32))
        for kind, bodies in _bodies(options.prompts).items():
            if kind not in options.text:
                continue
            left = iter(bodies)
            for concurrency in options.concurrency:
                count = max(options.requests, concurrency)
                rounds = [[next(left) for _ in range(count)] for _ in range(options.rounds)]
                row = _measure(urls, rounds, concurrency, options.max_tokens)
                print(json.dumps({"model": options.model, "text": kind, "concurrency": concurrency, **row}), flush=True)


def _measure(urls: list[str], rounds: list[list[dict[str, Any]]], concurrency: int, max_tokens: int) -> dict[str, Any]:
    rates: list[list[float]] = [[], []]
    same = total = 0
    for number, bodies in enumerate(rounds):
        answers: list[list[str]] = [[], []]
        for side in (0, 1) if number % 2 else (1, 0):
            began = time.perf_counter()
            num_tokens, answers[side] = asyncio.run(_ask(urls[side], bodies, concurrency, max_tokens))
            rates[side].append(num_tokens / (time.perf_counter() - began))
        same += sum(a == b for a, b in zip(*answers, strict=True))
        total += len(bodies)
    ratios = sorted(auto / plain for auto, plain in zip(*rates, strict=True))
    found = {
        "tok_s_auto": median(rates[0]),
        "tok_s_plain": median(rates[1]),
        "ratio": median(rates[0]) / median(rates[1]),
        "by_round": median(ratios),
        "lowest": ratios[0],
        "highest": ratios[-1],
    }
    return {name: round(value, 3) for name, value in found.items()} | {"same": f"{same}/{total}"}


async def _ask(url: str, bodies: list[dict[str, Any]], concurrency: int, max_tokens: int) -> tuple[int, list[str]]:
    """(tokens generated, texts in the order of the prompts)."""
    texts, num_tokens, waiting = [""] * len(bodies), 0, iter(enumerate(bodies))
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def work() -> None:
            nonlocal num_tokens
            for number, body in waiting:
                path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
                settings = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
                answer = (await client.post(path, json={**body, **settings})).raise_for_status().json()
                num_tokens += answer["usage"]["completion_tokens"]
                choice = answer["choices"][0]
                texts[number] = choice["text"] if "text" in choice else choice["message"]["content"]

        await asyncio.gather(*(work() for _ in range(concurrency)))
    return num_tokens, texts


def _bodies(path: Path) -> dict[str, list[dict[str, Any]]]:
    rows = [json.loads(line) for line in path.read_text().splitlines() if line]
    natural = [_natural(row["turns"][0][:1000]) for row in rows if row["category"] in _OPEN]
    long = [row["turns"][0] for row in rows if row["category"] not in _OPEN and len(row["turns"][0]) > 2 * _PASSAGE]
    passages = [text[len(text) // 2 :][:_PASSAGE] for text in long]
    repeated = [{"prompt": 3 * f"{each}\n\n" + each[:_BEGINNING]} for each in passages]
    return {"natural": natural, "repetitive": repeated}


def _natural(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--concurrency", type=lambda text: [int(each) for each in text.split(",")], default=[1, 4])
    parser.add_argument("--text", type=lambda text: text.split(","), default=["natural", "repetitive"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=2, help="of a round, at least as many as clients")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--against", default="off")
    return parser.parse_args()


if __name__ == "__main__":
    main()
