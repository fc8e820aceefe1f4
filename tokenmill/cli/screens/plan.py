"""The screen of `tokenmill plan`: the deployment, its price and its latency first, then memory, rivals and reasons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.cli.render.screen import (
    Cell,
    Facts,
    Lines,
    Result,
    Screen,
    Section,
    Table,
    Tone,
    Value,
    left,
    right,
    shares,
)
from tokenmill.cli.render.units import change, count, dollars, gibibytes, milliseconds, percent, plain_number

_RIVALS = 4
_ASSUMED = ("assumed", "quality loss", "no plan keeps")


def plan_screen(result: Result) -> Screen:
    plan = result["plan"]
    sections: list[Section] = [_figures(result), _memory(plan), _plans(result), _settings(plan)]
    if "explain" in result:
        sections.append(_rules(result["explain"]))
    return Screen(_headline(result), "good" if result["feasible"] else "bad", sections, _notes(result))


def _headline(result: Result) -> str:
    plan, price = result["plan"], result["costs"].get("per_million_output")
    shape = (
        f"{plan['devices']} x {plan['device']}, {plan['weights']} weights, {plan['kv_bits']:g}-bit KV, {plan['engine']}"
    )
    money = f"{dollars(price)}/M output tokens, " if price is not None else ""
    latency = f"TTFT {milliseconds(plan['ttft_ms']['value'])}, ITL {milliseconds(plan['itl_ms']['value'])}"
    broken = "" if result["feasible"] else "No plan keeps every promise. Nearest: "
    return f"{broken}{shape}: {money}{latency}"


def _figures(result: Result) -> Table:
    """Predictions with their intervals, and the money."""
    plan, costs = result["plan"], result["costs"]
    rows: list[tuple[Value, ...]] = [
        _interval("time to first token", plan["ttft_ms"], " ms"),
        _interval("time between tokens", plan["itl_ms"], " ms"),
        _interval("output of the fleet", plan["output_tok_s"], " tok/s"),
    ]
    loss = plan["quality_loss_percent"]
    tone: Tone = "good" if loss["high"] <= 1 else "warning"
    rows.append(
        (
            "quality loss",
            Cell(f"up to {loss['high']:g}%", tone),
            f"{loss['low']:g} to {loss['high']:g}%",
            _dim(loss["basis"]),
        )
    )
    if costs.get("dollars_per_month") is not None:
        rows += _money(costs)
    columns = (left(""), right("expected"), left("range"), left("basis"))
    return Table(f"{result['model']}: what to expect", columns, rows)


def _interval(name: str, figure: Mapping[str, Any], unit: str) -> tuple[Value, ...]:
    span = f"{plain_number(figure['low'])} to {plain_number(figure['high'])}{unit}"
    return name, Cell(plain_number(figure["value"]) + unit, "strong"), span, _dim(figure["basis"].partition(":")[0])


def _money(costs: Mapping[str, Any]) -> list[tuple[Value, ...]]:
    source = _dim(costs["price_basis"].partition(" (")[0])
    hour = f"{dollars(costs['dollars_per_hour'])} an hour, {percent(costs['utilization'])} load"
    tokens = f"input {dollars(costs['per_million_uncached_input'])}, output {dollars(costs['per_million_output'])}"
    rows: list[tuple[Value, ...]] = [
        ("cost of a month", dollars(costs["dollars_per_month"]), hour, source),
        ("cost of 1M tokens", Cell(dollars(costs["per_million_blended"]), "strong"), tokens, source),
    ]
    return rows


def _dim(text: str) -> Cell:
    return Cell(text, "dim")


def _memory(plan: Mapping[str, Any]) -> Table:
    memory = plan["memory_gib_per_device"]
    parts = {"weights": "weights", "KV cache": "kv", "activations": "activations", "runtime": "runtime"}
    rows: list[tuple[str, float, str, Tone]] = [
        (label, memory[key], gibibytes(memory[key]), "plain") for label, key in parts.items()
    ]
    spare = max(0.0, memory["usable"] - sum(memory[key] for key in parts.values()))
    if spare >= 0.05:
        rows.append(("free", spare, gibibytes(spare), "dim"))
    return shares(f"Memory of each device ({gibibytes(memory['usable'])} usable)", rows)


def _plans(result: Result) -> Table:
    """The chosen plan, the bolder one where there is one, then others that no plan beats in every respect."""
    plans = [("chosen", _row_of(result["plan"], result["costs"]))]
    if result.get("bolder"):
        plans.append(("bolder", _row_of(result["bolder"]["plan"], result["bolder"]["costs"])))
    known = {row["plan"] for _, row in plans}
    plans += [("", row) for row in result["pareto"] if row["plan"] not in known][:_RIVALS]
    device, engine = f"{result['plan']['device']} ", f" {result['plan']['engine']}"
    if not all(row["plan"].startswith(device) for _, row in plans):
        device = ""
    if not all(row["plan"].endswith(engine) for _, row in plans):
        engine = ""  # what all plans share is in the headline
    columns = (
        left(""),
        right("replicas"),
        left("of"),
        right("$/M out"),
        right("TTFT"),
        right("ITL"),
        right("tok/s"),
        right("max loss"),
        left("promises"),
    )
    rows = [_plan_row(mark, row, row["plan"].removeprefix(device).removesuffix(engine)) for mark, row in plans]
    return Table("Plans", columns, rows)


def _row_of(plan: Mapping[str, Any], costs: Mapping[str, Any]) -> dict[str, Any]:
    """A whole plan in the shape of a row of `pareto`."""
    cut = [("pp", plan["pp"]), ("dp", plan["data_parallel"]), ("ep", plan["ep"])]
    more = "".join(f" {name}{size}" for name, size in cut if size > 1)
    devices = plan["devices"] // max(1, plan["replicas"])
    kind = f"{plan['weights']} kv{plan['kv_bits']:g} {plan['engine']}"
    return {
        "plan": f"{plan['device']} x{devices} tp{plan['tp']}{more} {kind}",
        "replicas": plan["replicas"],
        "per_million_output": costs.get("per_million_output"),
        "ttft_ms": plan["ttft_ms"]["value"],
        "itl_ms": plan["itl_ms"]["value"],
        "output_tok_s": plan["output_tok_s"]["value"],
        "quality_loss_high": plan["quality_loss_percent"]["high"],
        "keeps_promises": not plan["broken_promises"],
    }


def _plan_row(mark: str, row: Mapping[str, Any], name: str) -> tuple[Value, ...]:
    return (
        Cell(mark, "strong" if mark == "chosen" else "warning"),
        count(row["replicas"]),
        name,
        dollars(row["per_million_output"]),
        milliseconds(row["ttft_ms"]),
        milliseconds(row["itl_ms"]),
        plain_number(row["output_tok_s"]),
        f"{row['quality_loss_high']:g}%",
        Cell("kept", "good") if row["keeps_promises"] else Cell("broken", "bad"),
    )


def _settings(plan: Mapping[str, Any]) -> Lines:
    cut = {"tensor_parallel_size": plan["tp"], "pipeline_parallel_size": plan["pp"]}
    flags = {name: value for name, value in cut.items() if value > 1} | plan["settings"]
    drafts = flags.pop("draft_tokens", 0)
    text = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in flags.items())
    return Lines("Settings of each replica", [text, *([f"speculation with {drafts} draft tokens"] if drafts else [])])


def _rules(rules: list[Mapping[str, Any]]) -> Facts:
    return Facts("Rules behind it", [(f"{each['rule']} {each['topic']}", each["text"]) for each in rules])


def _notes(result: Result) -> list[Cell]:
    notes = [Cell(text, "warning" if any(word in text for word in _ASSUMED) else "plain") for text in result["reasons"]]
    basis = result["plan"]["ttft_ms"]["basis"]
    notes.append(Cell(f"latency: {basis}", "plain" if basis.startswith("measured") else "warning"))
    notes += [Cell(f"broken: {text}", "bad") for text in result["plan"]["broken_promises"]]
    notes += [Cell(result["costs"]["note"], "warning")] if "note" in result["costs"] else []
    notes += [_api(each) for each in result["costs"].get("break_even", ())[:1]]
    notes += [_bill(result["costs"]["against_bill"])] if result["costs"].get("against_bill") else []
    notes += [_target(result["target"])] if "target" in result else []
    notes += [Cell(f"report: {result['report']}", "good")] if "report" in result else []
    return notes


def _api(api: Mapping[str, Any]) -> Cell:
    rival = f"{api['against']} ({dollars(api['api_blended'])} per million tokens)"
    if api["possible"]:
        return Cell(f"cheaper than {rival} from {percent(api['utilization'])} load", "good")
    return Cell(f"dearer than {rival} at any load", "bad")


def _bill(bill: Mapping[str, Any]) -> Cell:
    text = (
        f"against today's bill of {dollars(bill['bill'])} a month: {dollars(bill['plan_per_month'])}, "
        f"{change(bill['change'], 0)}"
    )
    return Cell(text, "good" if bill["change"] < 0 else "bad")


def _target(target: Mapping[str, Any]) -> Cell:
    if "note" in target:
        return Cell(target["note"], "warning")
    verdict = "met" if target["met"] else "missed"
    text = (
        f"target of {change(target['wanted'], 0)} {verdict}: {change(target['predicted'], 0)} against unquantized "
        f"{target['baseline']} ({dollars(target['baseline_per_million_blended'])} per million tokens)"
    )
    return Cell(text, "good" if target["met"] else "bad")
