"""`tokenmill plan`: model + hardware + workload + promises -> the cheapest deployment, with intervals and reasons."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmill.cli.options import AsJson, Verbose
from tokenmill.cli.output import emit
from tokenmill.cli.screens.calibration import calibrate_screen, poisson_screen, validate_screen
from tokenmill.cli.screens.plan import plan_screen
from tokenmill.config import parse_count

_LOAD, _FIX, _MONEY, _OTHER = "Load and promises", "Fixed choices", "Money", "Instead of planning"


def _option(panel: str, text: str, show_default: bool = False, **rest: Any) -> Any:
    """Defaults are shown where they are more than "not given"."""
    return typer.Option(rich_help_panel=panel, help=text, show_default=show_default, **rest)


def _percent(text: str | float) -> float:
    """-60% or -0.6."""
    from tokenmill.errors import UserError

    if isinstance(text, float):  # the default, already a number
        return text
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise UserError(f"'{text}' is not a share", "write -60% or -0.6") from None


_Tokens = Annotated[int, _option(_LOAD, "Tokens of a request, on average.", parser=parse_count, metavar="TOKENS")]
_Target = Annotated[float, _option(_LOAD, "Cost wanted, against unquantized weights.", parser=_percent, metavar="-60%")]
_Prices = Annotated[
    Path | None, _option(_MONEY, "TOML file with prices that replace those of the catalog.", metavar="FILE")
]
_Traits = Annotated[
    list[str] | None,
    typer.Option(help="Trait of the use, for --explain: structured, fine-tuned, critical, development."),
]
_DailyLoad = Annotated[
    str, _option(_MONEY, "Load of each hour, such as 1,1,3,8,...: sets the utilization.", metavar="LIST")
]


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A known name, config.json, directory or GGUF.")] = "",
    gpu: Annotated[
        list[str] | None, typer.Option(metavar="NAME[xN]", help="Devices, or this-machine (calibrated); repeatable.")
    ] = None,
    any_gpu: Annotated[bool, typer.Option(help="Consider every priced GPU of the catalog, 1 to 8 of each.")] = False,
    use: Annotated[
        str, _option(_LOAD, "Preset: chat, agent, rag, summarize, code, batch.", show_default=True)
    ] = "chat",
    input_len: _Tokens = 0,
    output_len: _Tokens = 0,
    concurrency: Annotated[int, _option(_LOAD, "Concurrent users.")] = 0,
    rate: Annotated[float, _option(_LOAD, "Requests per second, instead of --concurrency.")] = 0.0,
    arrivals: Annotated[
        str, _option(_LOAD, "lockstep, poisson, or a trace file (its lengths and rate).", show_default=True)
    ] = "poisson",
    prefix_share: Annotated[float, _option(_LOAD, "Share of each prompt that the prefix cache holds.")] = -1.0,
    ttft: Annotated[float, _option(_LOAD, "Promise: time to first token, ms; 0: none.")] = -1.0,
    itl: Annotated[float, _option(_LOAD, "Promise: time between tokens, ms; 0: none.")] = -1.0,
    budget: Annotated[float, _option(_LOAD, "Maximum cost, dollars per month.")] = 0.0,
    max_quality_loss: Annotated[
        float, _option(_LOAD, "Maximum quality loss in percent, at the high end of the range.")
    ] = 0.0,
    target_cost: _Target = 0.0,
    weights: Annotated[str, _option(_FIX, "Weight format (bf16, fp8, int8, awq, q4_k_m, ...).")] = "",
    kv_cache_dtype: Annotated[str, _option(_FIX, "KV dtype (bf16, fp8, int8, int4).")] = "",
    engine: Annotated[str, _option(_FIX, "Engine (vllm, sglang, trtllm, llama.cpp, tokenmill).")] = "",
    tp: Annotated[int, _option(_FIX, "Tensor-parallel size of attention.")] = 0,
    ep: Annotated[int, _option(_FIX, "Expert-parallel size; 1: every expert is sharded.")] = 0,
    dp: Annotated[int, _option(_FIX, "Data-parallel size of attention within a replica.")] = 0,
    max_num_seqs: Annotated[int, _option(_FIX, "Maximum sequences per step; default: by the ITL limit.")] = 0,
    max_num_batched_tokens: Annotated[int, _option(_FIX, "Maximum tokens per step.")] = 0,
    gpu_memory_utilization: Annotated[float, _option(_FIX, "Share of device memory that the engine may use.")] = 0.0,
    speculation: Annotated[
        str, _option(_FIX, "on, off, or auto: a bolder plan uses it where it pays.", show_default=True)
    ] = "auto",
    draft_tokens: Annotated[int, _option(_FIX, "Draft tokens per step.", show_default=True)] = 4,
    acceptance: Annotated[float, _option(_FIX, "Share of draft tokens that is accepted; default: by the use.")] = -1.0,
    price: Annotated[float, _option(_MONEY, "Dollars per device and hour; default: the catalog.")] = -1.0,
    prices: _Prices = None,
    utilization: Annotated[float, _option(_MONEY, "Mean load over capacity.", show_default=True)] = 0.5,
    daily_load: _DailyLoad = "",
    spot_discount: Annotated[
        float, _option(_MONEY, "Discount of spot instances; 0.6: they cost 40% of the price.")
    ] = 0.0,
    owned: Annotated[
        bool, _option(_MONEY, "Devices are owned: --price is their depreciation, power is added.")
    ] = False,
    pue: Annotated[float, _option(_MONEY, "Power usage effectiveness of the data centre.", show_default=True)] = 1.4,
    kwh_price: Annotated[float, _option(_MONEY, "Dollars per kWh.", show_default=True)] = 0.10,
    overhead: Annotated[float, _option(_MONEY, "Facility cost, as a share of the hardware cost.")] = 0.0,
    engineering: Annotated[float, _option(_MONEY, "Engineering cost, dollars per month.")] = 0.0,
    cold_starts: Annotated[float, _option(_MONEY, "Cold starts per replica and day (paid, without output).")] = 0.0,
    cold_start_minutes: Annotated[
        float, _option(_MONEY, "Minutes until a started replica serves.", show_default=True)
    ] = 5.0,
    current_bill: Annotated[float, _option(_MONEY, "Dollars per month paid today, to compare with.")] = 0.0,
    monthly_tokens: Annotated[
        float, _option(_MONEY, "Tokens per month that the bill pays for, such as 2e9; default: the plan's load.")
    ] = 0.0,
    explain: Annotated[bool, typer.Option(help="Add the rules behind each recommendation.")] = False,
    trait: _Traits = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a self-contained report.")] = None,
    validate: Annotated[
        Path | None, _option(_OTHER, "Score the planning call on measured lock-step rows.", metavar="FILE.csv")
    ] = None,
    validate_poisson: Annotated[
        bool, _option(_OTHER, "Score the planning call on the measured Poisson runs of the package.")
    ] = False,
    calibrate: Annotated[
        bool, _option(_OTHER, "Measure this machine (two minutes) and fit the cost model to it.")
    ] = False,
    as_json: AsJson = False,
    _verbose: Verbose = False,
) -> None:
    """Find the cheapest deployment that keeps the promises, or say which limit binds."""
    if validate is not None:
        from tokenmill.plan.validate.scores import validate as score

        scores = asdict(score(validate))
        emit(scores, as_json, lambda: validate_screen(scores))
        return
    if validate_poisson:
        from tokenmill.plan.validate.poisson_runs import score_runs, summarize_runs

        table = summarize_runs(score_runs())
        emit(table, as_json, lambda: poisson_screen(table))
        return
    if calibrate:
        from tokenmill.calibrate.job import calibrate as measure

        measured = measure(model)
        emit(measured, as_json, lambda: calibrate_screen(measured))
        return
    from tokenmill.hardware.catalog import load_catalog
    from tokenmill.plan.question.pricing import Bill, Pricing, utilization_of_day
    from tokenmill.plan.question.question import Limits, Question, Speculation, Tuning
    from tokenmill.plan.question.workload import preset, usual_acceptance
    from tokenmill.plan.search.answer import answer, search_question
    from tokenmill.plan.search.guide import check_traits

    given: dict[str, Any] = {
        "input_tokens": input_len or None,
        "output_tokens": output_len or None,
        "concurrency": concurrency or None,
        "rate": rate or None,
        "prefix_share": prefix_share if prefix_share >= 0 else None,
        "ttft_ms": ttft if ttft >= 0 else None,
        "itl_ms": itl if itl >= 0 else None,
    }
    given |= _arrivals(arrivals, given)
    catalog = load_catalog(prices)
    drafts = Speculation(draft_tokens, usual_acceptance(use) if acceptance == -1.0 else acceptance)
    question = Question(
        model=_model(model),
        groups=_groups(catalog, gpu or [], any_gpu, engine, model),
        workload=preset(use, **{key: value for key, value in given.items() if value is not None}),
        pricing=Pricing(
            price=None if price == -1.0 else price,
            spot_discount=spot_discount,
            utilization=utilization_of_day(_hours(daily_load)) if daily_load else utilization,
            overhead=overhead,
            engineering=engineering,
            power=owned,
            pue=pue,
            dollars_per_kwh=kwh_price,
            cold_starts_per_day=cold_starts,
            cold_start_minutes=cold_start_minutes,
        ),
        limits=Limits(budget, max_quality_loss),
        weights=weights,
        kv=kv_cache_dtype,
        engine=engine,
        tp=tp,
        ep=ep,
        data_parallel=dp,
        memory_share=gpu_memory_utilization,
        tuning=Tuning(max_num_seqs, max_num_batched_tokens, speculation, drafts),
        fixed_fleet=not any_gpu,
        target_cost=target_cost,
        traits=tuple(trait or ()),
        bill=Bill(current_bill, monthly_tokens) if current_bill or monthly_tokens else None,
    )
    check_traits(question.traits)
    found = search_question(question)
    result = answer(question, catalog, found)
    if explain:
        from tokenmill.plan.search.guide import explain_plan

        result["explain"] = explain_plan(question, result)
    if html is not None:
        from tokenmill.plan.search.html import write_plan_report

        write_plan_report(html, question, result, found)
        result["report"] = str(html)
    emit(result, as_json, lambda: plan_screen(result))


def _model(name: str) -> Any:
    from tokenmill.errors import UserError
    from tokenmill.plan.question.model_names import describe_for_planning

    if not name:
        raise UserError("there is no model", "name one, as in: tokenmill plan llama-3.1-70b --gpu h100x2")
    return describe_for_planning(name)


def _groups(catalog: Any, names: list[str], any_gpu: bool, engine: str, model: str) -> list[Any]:
    from tokenmill.errors import UserError
    from tokenmill.hardware.catalog import DeviceGroup
    from tokenmill.plan.cost.this_machine import calibrated_device, check_engine, is_this_machine

    if names and any_gpu:
        raise UserError("both --gpu and --any-gpu are given", "give one of them")
    if any_gpu:
        return [DeviceGroup(d, 8) for d in catalog.devices.values() if d.kind == "gpu" and d.price is not None]
    if not names:
        raise UserError("there is no hardware", "give --gpu h100x1 (see the catalog), this-machine or --any-gpu")
    groups = []
    for name in names:
        if is_this_machine(name):
            check_engine(engine)
            groups.append(DeviceGroup(calibrated_device(model)))
        else:
            groups.append(catalog.parse_gpu(name))
    return groups


def _arrivals(text: str, given: dict[str, Any]) -> dict[str, Any]:
    """The kind of arrivals; of a trace also its lengths, its rate and its burstiness, unless they are given."""
    from tokenmill.plan.question.workload import ARRIVALS, Arrivals

    if text in ARRIVALS[:2]:
        return {"arrivals": Arrivals(text)}
    from tokenmill.plan.simulate.trace_facts import trace_facts
    from tokenmill.plan.simulate.traces import open_trace

    facts = trace_facts(text, open_trace(text))
    found: dict[str, Any] = {"arrivals": Arrivals("trace", facts.burstiness, facts.words)}
    found["input_tokens"] = given["input_tokens"] or facts.input_tokens
    found["output_tokens"] = given["output_tokens"] or facts.output_tokens
    if facts.rate and not given["rate"] and not given["concurrency"]:
        found["rate"] = facts.rate
    return found


def _hours(text: str) -> list[float]:
    from tokenmill.errors import UserError

    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"'{text}' is not a daily load", "write one number per hour, such as 1,1,2,5,8") from None
