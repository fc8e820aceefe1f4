"""`tokenmill simulate`: a trace or synthetic load through the real scheduler on hardware you may not have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli.options import AsJson, Verbose
from tokenmill.cli.output import emit
from tokenmill.cli.screens.simulate import simulate_screen
from tokenmill.config import parse_count

_Tokens = Annotated[
    int, typer.Option(parser=parse_count, metavar="TOKENS", help="Tokens of each request, without a trace.")
]
_LOAD, _FLEET, _ENGINE = "Load", "Fleet", "Engine"


def simulate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A known name, config.json, directory or GGUF.")] = "",
    gpu: Annotated[str, typer.Option(metavar="NAME[xN]", help="All devices, or this-machine (calibrated).")] = "",
    trace: Annotated[
        str,
        typer.Option(
            metavar="FILE", rich_help_panel=_LOAD, help="Azure, vidur, Mooncake, ServeGen or plain JSON lines."
        ),
    ] = "",
    traffic_log: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", rich_help_panel=_LOAD, help="Replay what `serve --traffic-log DIR` logged on that server."
        ),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="NAME=VALUE",
            rich_help_panel=_LOAD,
            help="With --traffic-log: replicas=2, memory=half, kv-cache-dtype=fp8 or another option; repeatable.",
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="With --traffic-log: dollars per replica and hour; default: the catalog.")
    ] = None,
    rate: Annotated[float, typer.Option(rich_help_panel=_LOAD, help="Requests per second.")] = 0.0,
    burstiness: Annotated[
        float,
        typer.Option(
            rich_help_panel=_LOAD, help="Coefficient of variation of intervals: 1 is Poisson, more is burstier."
        ),
    ] = 1.0,
    concurrency: Annotated[int, typer.Option(rich_help_panel=_LOAD, help="Closed loop: concurrent users.")] = 0,
    input_len: _Tokens = 0,
    output_len: _Tokens = 0,
    spread: Annotated[float, typer.Option(rich_help_panel=_LOAD, help="Lengths vary by this share.")] = 0.0,
    shared_prefix: _Tokens = 0,
    prefixes: Annotated[int, typer.Option(rich_help_panel=_LOAD, help="Number of shared prefixes.")] = 1,
    speedup: Annotated[float, typer.Option(rich_help_panel=_LOAD, help="Replay faster by this factor.")] = 1.0,
    limit: Annotated[int, typer.Option(rich_help_panel=_LOAD, help="Requests; 0: the whole trace, or 1000.")] = 0,
    repeat: Annotated[int, typer.Option(rich_help_panel=_LOAD, help="Replay the trace this many times in a row.")] = 1,
    seed: Annotated[int, typer.Option(rich_help_panel=_LOAD, help="Same seed, same load.")] = 0,
    ttft: Annotated[float, typer.Option(help="Limit for goodput: time to first token, ms.")] = 0.0,
    itl: Annotated[float, typer.Option(help="Limit for goodput: mean time between tokens, ms.")] = 0.0,
    keep_itl: Annotated[bool, typer.Option(help="Schedule as `serve --itl` does: prompts wait for --itl.")] = False,
    replicas: Annotated[int, typer.Option(rich_help_panel=_FLEET, help="Replicas; 0: by --tp.")] = 0,
    router: Annotated[
        str, typer.Option(rich_help_panel=_FLEET, help="round_robin, least_loaded, prefix_aware or least_wait.")
    ] = "round_robin",
    prefill: Annotated[int, typer.Option(rich_help_panel=_FLEET, help="Disaggregated: prefill engines.")] = 0,
    decode: Annotated[int, typer.Option(rich_help_panel=_FLEET, help="Disaggregated: decode engines.")] = 0,
    link: Annotated[
        float, typer.Option(rich_help_panel=_FLEET, help="Bandwidth of KV transfers, GB/s per device.")
    ] = 0.0,
    autoscale: Annotated[
        str, typer.Option(metavar="MIN:MAX", rich_help_panel=_FLEET, help="Scale replicas by queue and KV use.")
    ] = "",
    cold_start: Annotated[float, typer.Option(rich_help_panel=_FLEET, help="Seconds until a replica serves.")] = 120.0,
    target_queue: Annotated[float, typer.Option(rich_help_panel=_FLEET, help="Waiting requests per replica.")] = 4.0,
    target_kv: Annotated[float, typer.Option(rich_help_panel=_FLEET, help="Target share of KV memory in use.")] = 0.8,
    scale_up_window: Annotated[
        float, typer.Option(rich_help_panel=_FLEET, help="Stabilization window, seconds.")
    ] = 0.0,
    scale_down_window: Annotated[
        float, typer.Option(rich_help_panel=_FLEET, help="Stabilization window, seconds.")
    ] = 300.0,
    weights: Annotated[str, typer.Option(rich_help_panel=_ENGINE, help="Weight format; default: as stored.")] = "",
    kv_cache_dtype: Annotated[str, typer.Option(rich_help_panel=_ENGINE, help="bf16, fp8, int8, int4.")] = "bf16",
    engine: Annotated[
        str,
        typer.Option(
            rich_help_panel=_ENGINE,
            help="Engine whose step times are used: vllm, sglang, trtllm, llama.cpp, tokenmill.",
        ),
    ] = "",
    tp: Annotated[
        int, typer.Option(rich_help_panel=_ENGINE, help="Tensor-parallel size; 0: all devices of a replica.")
    ] = 0,
    pp: Annotated[int, typer.Option(rich_help_panel=_ENGINE, help="Pipeline stages.")] = 1,
    context: _Tokens = 0,
    max_num_batched_tokens: Annotated[int, typer.Option(rich_help_panel=_ENGINE, help="Maximum tokens per step.")] = 0,
    max_num_seqs: Annotated[int, typer.Option(rich_help_panel=_ENGINE, help="Maximum sequences per step.")] = 0,
    prefix_caching: Annotated[
        bool, typer.Option(rich_help_panel=_ENGINE, help="Reuse the KV cache of common prefixes.")
    ] = True,
    prices: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML file with prices that replace those of the catalog.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a self-contained report.")] = None,
    as_json: AsJson = False,
    _verbose: Verbose = False,
) -> None:
    """Simulate serving a load: latency percentiles, throughput, goodput, preemptions, cache hits, KV and queue."""
    from tokenmill.errors import UserError
    from tokenmill.plan.simulate.autoscaler import Autoscaling
    from tokenmill.plan.simulate.job import FleetOptions, Limits
    from tokenmill.plan.simulate.question import EngineQuestion, LoadQuestion, ask
    from tokenmill.plan.simulate.report import simulation_series

    if traffic_log is not None:
        if trace or rate or concurrency or gpu or model:
            raise UserError(
                "a traffic log already has a model, a device and a load",
                "drop MODEL, --gpu, --trace, --rate and --concurrency; change the server with --with NAME=VALUE",
            )
        _simulate_log(traffic_log, change or [], price, prices, as_json)
        return
    if change or price is not None:
        raise UserError("--with and --price are for a traffic log", "add --traffic-log DIR")
    if not model:
        raise UserError("there is no model", "give MODEL, or --traffic-log DIR")
    if not gpu:
        raise UserError("there is no hardware", "give --gpu h100x1 (see the catalog) or --gpu this-machine")
    if replicas < 0:
        raise UserError(f"replicas is {replicas}", "give 1 or more")
    scaling = None
    if autoscale:
        least, most = _range(autoscale)
        scaling = Autoscaling(least, most, target_queue, target_kv, cold_start, scale_up_window, scale_down_window)
    fleet = FleetOptions(max(1, replicas), router, prefill, decode, link, scaling, prefix_caching)
    load = LoadQuestion(
        trace, input_len, output_len, rate, burstiness, concurrency, spread, shared_prefix, prefixes,
        speedup, limit, repeat, seed,
    )  # fmt: skip
    asked = EngineQuestion(
        model, gpu, weights, kv_cache_dtype, engine, tp, pp, replicas, context,
        max_num_batched_tokens, max_num_seqs, prices,
    )  # fmt: skip
    simulation, result = ask(asked, load, fleet, Limits(ttft, itl, keep_itl))
    if html is not None:
        from tokenmill.plan.simulate.html import write_simulation_report

        write_simulation_report(html, f"{model} on {gpu}", result, simulation_series(simulation))
        result["report"] = str(html)
    if as_json:
        result["series"] = simulation_series(simulation)
    emit(result, as_json, lambda: simulate_screen(result))


def _simulate_log(folder: Path, changes: list[str], price: float | None, prices: Path | None, as_json: bool) -> None:
    from tokenmill.cli.screens.twin import twin_screen
    from tokenmill.plan.simulate.twin import TwinQuestion, ask_twin

    result = ask_twin(TwinQuestion(folder, tuple(changes), price, prices))
    emit(result, as_json, lambda: twin_screen(result))


def _range(text: str) -> tuple[int, int]:
    from tokenmill.errors import UserError

    least, _, most = text.partition(":")
    if not (least.isdecimal() and most.isdecimal()):
        raise UserError(f"'{text}' is not a range of replicas", "write --autoscale 1:8")
    return int(least), int(most)
