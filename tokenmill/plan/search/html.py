"""The HTML report of a plan: headline, memory, Pareto front, latency against load, cost against utilisation, reasons.

Reads the question and its answer, repeats the search and the estimate for what a plot needs, and draws. Called by
`tokenmill plan --html`. The report of a simulation is simulation_report.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenmill.plan.cost.performance import Estimate
from tokenmill.plan.cost.step_cost import StepCost
from tokenmill.plan.question.question import Question
from tokenmill.plan.search.answer import search_question
from tokenmill.plan.search.guide import explain_plan
from tokenmill.plan.search.judging import Plan, Terms
from tokenmill.plan.search.reasons import plan_name
from tokenmill.plan.search.search import SearchResult
from tokenmill.report import charts
from tokenmill.report.page import Tile, bullets, folded, grid, render_page, section, table, tiles, write_page

FOOTER = (
    "Intervals are P10 to P90 of measured over predicted. Prices and quality ranges are dated estimates: measure "
    "before you decide."
)
_MAX_POINTS = 400
_RISK_COLORS = ((1.0, "var(--risk-low)"), (4.0, "var(--risk-mid)"), (float("inf"), "var(--risk-high)"))


def write_plan_report(
    path: Path | str, question: Question, result: Mapping[str, Any], found: SearchResult | None = None
) -> None:
    """`found`: the question's search, where the caller has it already."""
    found = found or search_question(question)
    chosen = found.winner or found.plans[0]
    plan = result["plan"]
    title = f"{result['model']} on {plan['devices']} × {plan['device']}"
    subtitle = (
        f"{plan['weights']} weights ({plan['bits_per_weight']:g} bits), {plan['kv_bits']:g}-bit KV, {plan['engine']}, "
        f"{_parallelism(plan)}, {plan['replicas']} replica{'s' * (plan['replicas'] > 1)}; "
        f"{question.workload.input_tokens:,} tokens in, {question.workload.output_tokens:,} out"
    )
    verdict = ("keeps every promise", True) if result["feasible"] else ("no plan keeps every promise", False)
    sections = [
        section("Why this plan", bullets(result["reasons"]), wide=True),
        _memory(plan),
        _step(question, chosen),
        _pareto(found, chosen),
        _cost(result, chosen),
        *_latency(question, chosen),
        _break_even(result),
        _rejected(result),
        _basis(plan, result),
        _guide(question, result),
    ]
    body = [tiles(_headline(plan, result)), grid(sections)]
    write_page(path, render_page(title, subtitle, body, badge=verdict, footer=FOOTER))


def _parallelism(plan: Mapping[str, Any]) -> str:
    sizes = (("tp", plan["tp"]), ("pp", plan["pp"]), ("dp", plan["data_parallel"]), ("ep", plan["ep"]))
    return ", ".join(f"{name} {size}" for name, size in sizes if size > 1 or name == "tp")


def _headline(plan: Mapping[str, Any], result: Mapping[str, Any]) -> list[Tile]:
    costs, quality = result["costs"], plan["quality_loss_percent"]
    money: list[Tile] = []
    if "per_million_output" in costs:
        money = [
            Tile(
                f"${costs['per_million_output']:,.2f}", f"per million output tokens at {costs['utilization']:.0%} load"
            ),
            Tile(f"${costs['dollars_per_month']:,.0f}", f"a month, ${costs['dollars_per_hour']:,.2f} an hour"),
        ]
    return [
        *money,
        Tile(f"{plan['ttft_ms']['value']:,.0f} ms", f"to first token ({_interval(plan['ttft_ms'], 0)})"),
        Tile(f"{plan['itl_ms']['value']:.1f} ms", f"between tokens ({_interval(plan['itl_ms'], 1)})"),
        Tile(f"{plan['output_tok_s']['value']:,.0f}/s", f"output tokens ({_interval(plan['output_tok_s'], 0)})"),
        Tile(f"{plan['kv_tokens']:,}", f"KV tokens per replica, {plan['requests_that_fit']} requests"),
        Tile(f"≤ {quality['high']:g} %", f"quality loss to expect, from {quality['low']:g}: measure it"),
    ]


def _interval(figure: Mapping[str, Any], digits: int) -> str:
    return f"{figure['low']:,.{digits}f} to {figure['high']:,.{digits}f}"


def _memory(plan: Mapping[str, Any]) -> str:
    parts = plan["memory_gib_per_device"]
    names = (("weights", 0), ("KV cache", 2), ("activations", 1), ("runtime", 3))
    keys = {"KV cache": "kv"}
    bars = [charts.Bar(name, parts[keys.get(name, name)], color) for name, color in names]
    budget = f"{parts['usable']:.1f} GiB may be used"
    drawn = charts.stacked_bar("memory", "Memory of one device", bars, parts["usable"], "GiB", budget)
    return section("Memory of one device", drawn, f"{plan['device']}: what the engine may use, by purpose", wide=True)


def _step(question: Question, chosen: Plan) -> str:
    """Where the time of a decode step goes at the planned batch, without speculation."""
    workload, cost = question.workload, StepCost(chosen.deployment)
    batch = max(1, min(chosen.users, chosen.deployment.max_sequences) // chosen.deployment.pp)
    parts = cost.parts((), (batch, batch * (workload.input_tokens + workload.output_tokens / 2)))
    names = (("linear", "linear layers", 0), ("experts", "experts", 4), ("attention", "attention", 2),
             ("communication", "communication", 3), ("small", "small kernels", 1), ("host", "host", 5))  # fmt: skip
    bars = [charts.Bar(label, getattr(parts, name), color) for name, label, color in names if getattr(parts, name)]
    drawn = charts.stacked_bar("step", "Time of a decode step", bars, parts.total, "ms", f"{parts.total:.2f} ms")
    return section("Time of a decode step", drawn, f"{batch} sequences, no prompt in the step", wide=True)


def _risk_color(percent: float) -> str:
    return next(color for limit, color in _RISK_COLORS if percent <= limit)


def _pareto(found: SearchResult, chosen: Plan) -> str:
    """Money against latency; colour is the high end of the quality range."""
    numbers = {id(plan): str(number) for number, plan in enumerate(found.front, 1)}
    priced = [plan for plan in found.plans if plan.costs] or list(found.plans)
    rest = [plan for plan in priced if id(plan) not in numbers][: _MAX_POINTS - len(numbers)]
    points = []
    for plan in [*rest, *(each for each in found.front if each in priced)]:
        number = numbers.get(id(plan), "")
        figures = f"{_money(plan):.3g}, {plan.estimate.tpot.value:.1f} ms, up to {plan.risk.high:.1f} % loss"
        title = f"{plan_name(plan.deployment)}: {figures}"
        color = _risk_color(plan.risk.high)
        points.append(charts.Point(_money(plan), plan.estimate.tpot.value, color, title, number, not number,
                                   plan is chosen))  # fmt: skip
    x_label = "$ per million output tokens" if chosen.costs else "devices per output token/s"
    front = [(_money(plan), plan.estimate.tpot.value) for plan in found.front if plan in priced]
    drawn = charts.scatter(
        "pareto", "Pareto front", points, x_label, "ms between tokens", logarithmic=True, front=front
    )
    colors = [color for _, color in _RISK_COLORS]
    drawn += charts.legend(list(zip(colors, ("up to 1 % quality loss", "up to 4 %", "more"), strict=True)))
    rows = [
        [int(numbers[id(plan)]), plan_name(plan.deployment), plan.replicas, _money(plan), plan.estimate.ttft.value,
         plan.estimate.tpot.value, plan.risk.high, "yes" if plan.good else "; ".join(plan.failures)]
        for plan in found.front
    ]  # fmt: skip
    columns = ["#", "plan", "replicas", x_label, "TTFT ms", "ITL ms", "loss up to %", "keeps promises"]
    content = drawn + folded("the front as a table", table(columns, rows))
    return section(
        "Pareto front", content, "numbered: no other plan is cheaper, faster and safer at once; ringed: chosen"
    )


def _money(plan: Plan) -> float:
    return max(1e-6, plan.rank[0])


def _latency(question: Question, chosen: Plan) -> list[str]:
    """TTFT and ITL of one replica over its number of users, with intervals and the promises."""
    workload, cost = question.workload, StepCost(chosen.deployment)
    most = max(chosen.users, min(256, max(1, chosen.estimate.sequences_that_fit)))
    users = [1]
    while users[-1] < most:
        users.append(min(most, 2 * users[-1]))
    terms = Terms(workload, question.pricing, question.limits)
    found = [terms.estimate(chosen.deployment, count, cost, chosen.speculation) for count in users]
    note = f"band: P10 to P90; planned: {chosen.users} users per replica"
    drawn = []
    for name, title, key, limit, color in (
        ("ttft", "Time to first token", "ttft", workload.ttft_ms, 0),
        ("itl", "Time between tokens", "tpot", workload.itl_ms, 1),
    ):
        curve = charts.Curve(title, users, [getattr(e, key).value for e in found], color, *_ends(found, key))
        limits = [(limit, f"promise {limit:g} ms")] if limit else []
        svg = charts.curves(name, title, [curve], "users per replica", "ms", logarithmic=(len(users) > 1, True),
                            limits=limits)  # fmt: skip
        drawn.append(section(title, svg, note))
    return drawn


def _ends(found: Sequence[Estimate], name: str) -> tuple[list[float], list[float]]:
    return [getattr(e, name).low for e in found], [getattr(e, name).high for e in found]


def _cost(result: Mapping[str, Any], chosen: Plan) -> str:
    """$ per million tokens (all kinds, in the workload's mix) against load, with the APIs' prices."""
    costs = result["costs"]
    if chosen.costs is None:
        return section("Cost", bullets([costs["note"]]))
    full = chosen.costs.blended * costs["utilization"]
    loads = [n / 100 for n in range(5, 101, 5)]
    curve = charts.Curve("this plan", [100 * u for u in loads], [full / u for u in loads], 2)
    rivals = {round(each["api_blended"], 4): each["against"] for each in costs["break_even"]}
    limits = [(price, f"{name} ${price:g}") for price, name in rivals.items()]
    svg = charts.curves("cost", "Cost against utilisation", [curve], "utilisation, %", "$ per million tokens",
                        logarithmic=(False, True), limits=limits)  # fmt: skip
    return section("Cost against utilisation", svg, f"all tokens of the mix; price: {costs['price_basis']}")


def _break_even(result: Mapping[str, Any]) -> str:
    costs = result["costs"]
    if "break_even" not in costs:
        return ""
    rows = [
        [each["against"], each["api_blended"], f"{each['utilization']:.0%}" if each["possible"] else "never"]
        for each in costs["break_even"]
    ]
    split = [
        ["prompt tokens computed", costs["per_million_uncached_input"]],
        ["prompt tokens from the cache", costs["per_million_cached_input"]],
        ["output tokens", costs["per_million_output"]],
        ["all, in this mix", costs["per_million_blended"]],
    ]
    own = table(["$ per million", "this plan"], split)
    others = table(["API (recalled list prices)", "$ per million, this mix", "cheaper above a load of"], rows)
    return section("What a token costs", f'<div class="pair">{own}{others}</div>', wide=True)


def _rejected(result: Mapping[str, Any]) -> str:
    if not result["rejected"]:
        return ""
    rows = [[each["plan"], each["reason"]] for each in result["rejected"]]
    return section("Rejected plans", table(["plan", "reason"], rows), wide=True)


def _basis(plan: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    names = (("TTFT, ms", "ttft_ms"), ("ITL, ms", "itl_ms"), ("output tokens/s", "output_tok_s"))
    rows: list[list[Any]] = [
        [label, plan[key]["value"], plan[key]["low"], plan[key]["high"], plan[key]["basis"]] for label, key in names
    ]
    quality = plan["quality_loss_percent"]
    rows.append(["quality loss, %", None, quality["low"], quality["high"], quality["basis"]])
    kv_basis = "formula: pages by layer group, shared with the engine (F1 to F3, F11, F12)"
    rows.append(["KV tokens", plan["kv_tokens"], None, None, kv_basis])
    if "per_million_output" in result["costs"]:
        costs = result["costs"]
        rows.append(["$ per million output", costs["per_million_output"], None, None, f"F15; {costs['price_basis']}"])
    return section("Where the figures come from", table(["figure", "value", "low", "high", "basis"], rows), wide=True)


def _guide(question: Question, result: Mapping[str, Any]) -> str:
    rows = [[row["rule"], row["topic"], row["text"], row.get("corrects", "")] for row in explain_plan(question, result)]
    columns = ["rule", "topic", "what it says here", "often claimed instead, and the right figure"]
    return section("Decision guide", table(columns, rows), wide=True)
