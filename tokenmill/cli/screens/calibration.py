"""The screens of `tokenmill plan --validate` and `plan --calibrate`: how far predictions are from measurements."""

from __future__ import annotations

from tokenmill.cli.render.screen import Cell, Facts, Result, Screen, Table, Tone, Value, left, right
from tokenmill.cli.render.units import change, count, counted, percent, plain_number


def validate_screen(result: Result) -> Screen:
    headline = (
        f"The planning call misses measured TPOT by {percent(result['tpot_mape_dense'], 1)} (dense) and "
        f"{percent(result['tpot_mape_moe'], 1)} (experts) on average, TTFT by {percent(result['ttft_mape'], 1)}; "
        f"rank correlation {result['spearman']:.3f}"
    )
    whole = result["rows_dense"] + result["rows_moe"]
    rows = [
        _row("TPOT, dense", result, "tpot_mape_dense", "tpot_median_error_dense", "spearman_dense", "rows_dense"),
        _row("TPOT, experts", result, "tpot_mape_moe", "tpot_median_error_moe", "spearman_moe", "rows_moe"),
        ("TTFT, all", percent(result["ttft_mape"], 1), percent(result["ttft_median_error"], 1), "", count(whole)),
        _row("TTFT, dense", result, "ttft_mape_dense", "", "", "rows_dense"),
        _row("TTFT, experts", result, "ttft_mape_moe", "", "", "rows_moe"),
        _row("TPOT, split pools", result, "tpot_mape_split", "tpot_median_error_split", "spearman_split", "rows_split"),
        _row("TTFT, split pools", result, "ttft_mape_split", "ttft_median_error_split", "", "rows_split"),
        _row("TPOT, saturated", result, "tpot_mape_saturated", "", "", "rows_saturated"),
        _row("TTFT, saturated", result, "ttft_mape_saturated", "", "", "rows_saturated"),
    ]
    columns = (left(""), right("mean error"), right("median error"), right("rank correlation"), right("rows"))
    notes = [Cell(f"{count(number)} rows skipped: {reason}", "dim") for reason, number in result["skipped"].items()]
    notes.append(Cell("saturated rows are part of the lines above, and shown apart", "dim"))
    return Screen(headline, "plain", [Table(f"{count(result['rows'])} rows", columns, rows)], notes)


def poisson_screen(result: Result) -> Screen:
    if not result:
        return Screen("No measured runs under Poisson arrivals", "warning", [], [])
    every = result["all runs"]
    headline = (
        f"The planning call misses TTFT P50 by {percent(every['ttft_mape'], 1)} and ITL P50 by "
        f"{percent(every['itl_mape'], 1)} on average under Poisson arrivals"
    )
    rows = [
        (name, *(percent(row[key], 1) for key in ("ttft_mape", "itl_mape", "throughput_mape")), count(row["runs"]))
        for name, row in result.items()
    ]
    columns = (left(""), right("TTFT"), right("ITL"), right("throughput"), right("runs"))
    return Screen(headline, "plain", [Table("Mean error of predictions", columns, rows)], [])


def _row(name: str, result: Result, mean: str, median: str, rank: str, rows: str) -> tuple[str, ...]:
    return (
        name,
        percent(result[mean], 1),
        percent(result[median], 1) if median else "",
        f"{result[rank]:.3f}" if rank else "",
        count(result[rows]),
    )


def calibrate_screen(result: Result) -> Screen:
    place = result.get("gpu") or "this machine"
    rates = result["gflops"]
    best = max(rates.values()) if isinstance(rates, dict) else rates
    headline = (
        f"Calibrated {result['model']} on {place}: {plain_number(result['bandwidth_gb_s'])} GB/s, "
        f"{plain_number(best)} GFLOP/s, step times fitted to {percent(result['engine']['fit_error'], 1)}"
    )
    rows = []
    for each in result["predicted_against_measured"]:
        name, predicted, measured = each["what"], each["predicted"], each["measured"]
        error = predicted / measured - 1 if measured else None
        tone: Tone = "good" if error is not None and abs(error) <= 0.1 else "warning"
        rows.append((name, plain_number(predicted), plain_number(measured), Cell(change(error), tone)))
    columns = (left(""), right("predicted"), right("measured"), right("error"))
    facts: list[tuple[str, Value]] = [
        ("processor", f"{result['cpu']}, {counted(result['cores'], 'core')}, {result['threads']} threads"),
        ("steps timed", count(result["steps_timed"])),
        ("saved in", Cell(result["file"], "dim")),
    ]
    if result.get("gpu"):
        facts.insert(0, ("GPU", f"{result['gpu']}, {result['gpu_memory_bytes'] / 2**30:.0f} GiB"))
    machine = Facts("Machine", facts)
    notes = [Cell(f"not measured in full: {each}", "warning") for each in result["skipped"]]
    return Screen(headline, "good", [Table("Predicted against measured", columns, rows), machine], notes)
