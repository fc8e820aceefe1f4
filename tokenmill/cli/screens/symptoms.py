"""The screen of `tokenmill doctor --url`: what is wrong with a server, by which numbers, and what to do."""

from __future__ import annotations

from tokenmill.cli.render.screen import Cell, Facts, Result, Screen, Section, Tone, Value
from tokenmill.cli.render.units import percent

_TONES: dict[str, Tone] = {"critical": "bad", "warning": "warning", "hint": "plain"}
_VERDICTS: dict[str, Tone] = {"healthy": "good", "needs attention": "warning", "in trouble": "bad"}


def symptoms_screen(result: Result) -> Screen:
    headline = f"{result['server']} at {result['url']}: {result['verdict']}"
    sections: list[Section] = [
        Facts(
            found["symptom"][:1].upper() + found["symptom"][1:],
            [("seen", Cell(found["evidence"], _TONES[found["severity"]])), ("try", found["fix"])],
        )
        for found in result["findings"]
    ]
    sections.append(_numbers(result["reading"]))
    if result["reading"]["drafting"]:
        sections.append(_drafting(result["reading"]["drafting"]))
    return Screen(headline, _VERDICTS[result["verdict"]], sections)


def _drafting(decisions: list[Result]) -> Facts:
    several = len({each["model"] for each in decisions}) > 1
    rows: list[tuple[str, Value]] = []
    for each in decisions:
        name = f"{each['model']}, {each['drafter']}" if several else each["drafter"]
        effect = f"{'wins' if each['gain'] >= 0 else 'loses'} {percent(abs(each['gain']))} of the time"
        rows.append((f"{name} at {each['sequences']}", f"{'on' if each['on'] else 'off'}: {effect} ({each['reason']})"))
    return Facts("Drafts, by sequences in a step", rows)


def _numbers(reading: Result) -> Facts:
    span = f"the last {reading['seconds']:.0f} s" if reading["seconds"] else "all since the start"
    rows: list[tuple[str, Value]] = [
        ("requests", f"{reading['running']:.0f} running, {reading['waiting']:.0f} waiting"),
        *_shares(reading),
    ]
    if reading["output_tokens"] is not None:
        counted = f"{reading['prompt_tokens'] or 0:.0f} of prompts, {reading['output_tokens']:.0f} generated"
        rows.append(("tokens", counted))
    for label, name in (("first token", "ttft"), ("between tokens", "itl")):
        half, tail = reading[f"{name}_p50"], reading[f"{name}_p99"]
        if half is not None and tail is not None:
            rows.append((label, f"half within {half * 1000:g} ms, 99 % within {tail * 1000:g} ms"))
    return Facts(f"Numbers ({span})", rows)


def _shares(reading: Result) -> list[tuple[str, Value]]:
    labels = {
        "kv_usage": "KV cache held",
        "hit_rate": "prompt tokens cached",
        "gpu_utilization": "GPU busy",
        "gpu_memory_share": "GPU memory in use",
        "host_memory_share": "memory left",
    }
    return [(label, percent(reading[name])) for name, label in labels.items() if reading[name] is not None]
