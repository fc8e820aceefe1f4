"""`tokenmill plan`: model + hardware + workload + promises -> the cheapest deployment, with intervals and reasons."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmill.cli.options import AsJson, Verbose
from tokenmill.cli.output import emit
from tokenmill.config import parse_count

_Tokens = Annotated[int, typer.Option(parser=parse_count, metavar="TOKENS")]


def _percent(text: str | float) -> float:
    """-60% or -0.6."""
    from tokenmill.errors import UserError

    if isinstance(text, float):  # the default, already a number
        return text
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise UserError(f"'{text}' is not a share", "write -60% or -0.6") from None


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A known name, config.json, directory or GGUF.")] = "",
    gpu: Annotated[list[str] | None, typer.Option(metavar="NAME[xN]", help="Devices; repeatable.")] = None,
    any_gpu: Annotated[bool, typer.Option(help="Consider every priced GPU of the catalog, 1 to 8 of each.")] = False,
    use: Annotated[str, typer.Option(help="Workload preset: chat, agent, rag, summarize, code, batch.")] = "chat",
    input_len: _Tokens = 0,
    output_len: _Tokens = 0,
    concurrency: Annotated[int, typer.Option(help="Users at once.")] = 0,
    rate: Annotated[float, typer.Option(help="Requests per second, instead of --concurrency.")] = 0.0,
    prefix_share: Annotated[float, typer.Option(help="Share of each prompt found in the cache.")] = -1.0,
    ttft: Annotated[float, typer.Option(help="Promise: time to first token, ms; 0: none.")] = -1.0,
    itl: Annotated[float, typer.Option(help="Promise: time between tokens, ms; 0: none.")] = -1.0,
    budget: Annotated[float, typer.Option(help="At most this many dollars a month.")] = 0.0,
    max_quality_loss: Annotated[float, typer.Option(help="At most this percent, at the high end.")] = 0.0,
    target_cost: Annotated[float, typer.Option(parser=_percent, metavar="-60%", help="Against unquantized.")] = 0.0,
    weights: Annotated[str, typer.Option(help="Fix the weight format (bf16, fp8, int8, awq, q4_k_m, ...).")] = "",
    kv_cache_dtype: Annotated[str, typer.Option(help="Fix the KV dtype (bf16, fp8, int8, int4).")] = "",
    engine: Annotated[str, typer.Option(help="Fix the engine (vllm, sglang, trtllm, llama.cpp, tokenmill).")] = "",
    tp: Annotated[int, typer.Option(help="Fix the tensor-parallel width.")] = 0,
    price: Annotated[float, typer.Option(help="Dollars per device and hour; else the catalog.")] = -1.0,
    prices: Annotated[Path | None, typer.Option(metavar="FILE", help="TOML laid over the catalog.")] = None,
    utilization: Annotated[float, typer.Option(help="Mean load over capacity.")] = 0.5,
    spot_discount: Annotated[float, typer.Option(help="0.6: spot costs 40 % of the price.")] = 0.0,
    overhead: Annotated[float, typer.Option(help="Facility and engineering, share of hardware.")] = 0.0,
    explain: Annotated[bool, typer.Option(help="Add the rules behind each recommendation.")] = False,
    trait: Annotated[
        list[str] | None,
        typer.Option(help="Of the use, for --explain: structured, fine-tuned, critical, development. Repeatable."),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a self-contained report.")] = None,
    validate: Annotated[Path | None, typer.Option(metavar="FILE.csv[.gz]", help="Score the model on rows.")] = None,
    calibrate: Annotated[bool, typer.Option(help="Measure this machine (two minutes) and re-anchor.")] = False,
    as_json: AsJson = False,
    _verbose: Verbose = False,
) -> None:
    """Find the cheapest deployment that keeps the promises, or say which limit binds."""
    if validate is not None:
        from tokenmill.plan.validate import validate as score

        emit(asdict(score(validate)), as_json)
        return
    if calibrate:
        from tokenmill.plan.calibrate import calibrate as measure

        emit(measure(model or "smollm2"), as_json)
        return
    from tokenmill.plan.answer import Question, answer, search_question
    from tokenmill.plan.cost import Pricing
    from tokenmill.plan.search import Limits

    given: dict[str, Any] = {
        "input_tokens": input_len or None,
        "output_tokens": output_len or None,
        "concurrency": concurrency or None,
        "rate": rate or None,
        "prefix_share": prefix_share if prefix_share >= 0 else None,
        "ttft_ms": ttft if ttft >= 0 else None,
        "itl_ms": itl if itl >= 0 else None,
    }
    from tokenmill.hardware.catalog import load_catalog
    from tokenmill.plan.guide import check_traits
    from tokenmill.plan.workload import preset

    catalog = load_catalog(prices)
    question = Question(
        model=_model(model),
        groups=_groups(catalog, gpu or [], any_gpu),
        workload=preset(use, **{key: value for key, value in given.items() if value is not None}),
        pricing=Pricing(None if price == -1.0 else price, spot_discount, utilization, overhead),
        limits=Limits(budget, max_quality_loss),
        weights=weights,
        kv=kv_cache_dtype,
        engine=engine,
        tp=tp,
        fixed_fleet=not any_gpu,
        target_cost=target_cost,
        traits=tuple(trait or ()),
    )
    check_traits(question.traits)
    found = search_question(question)
    result = answer(question, catalog, found)
    if explain:
        from tokenmill.plan.guide import explain_plan

        result["explain"] = explain_plan(question, result)
    if html is not None:
        from tokenmill.plan.report import write_plan_report

        write_plan_report(html, question, result, found)
        result["report"] = str(html)
    emit(result, as_json)


def _model(name: str) -> Any:
    from tokenmill.errors import UserError
    from tokenmill.plan.model_names import describe_for_planning

    if not name:
        raise UserError("there is no model", "name one, as in: tokenmill plan llama-3.1-70b --gpu h100x2")
    return describe_for_planning(name)


def _groups(catalog: Any, names: list[str], any_gpu: bool) -> list[Any]:
    from tokenmill.errors import UserError
    from tokenmill.hardware.catalog import DeviceGroup

    if names and any_gpu:
        raise UserError("both --gpu and --any-gpu are given", "give one of them")
    if any_gpu:
        return [DeviceGroup(d, 8) for d in catalog.devices.values() if d.kind == "gpu" and d.price is not None]
    if not names:
        raise UserError("there is no hardware", "give --gpu h100x1 (see the catalog) or --any-gpu")
    return [catalog.parse_gpu(name) for name in names]
