"""`tokenmill quantize`: make a model smaller, and measure what it lost."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli.options import DEFAULT_MODEL, AsJson, Model, Verbose
from tokenmill.cli.output import emit
from tokenmill.cli.progress import progress_bar
from tokenmill.cli.render.units import duration, size
from tokenmill.cli.screens.quantize import quantize_screen
from tokenmill.config import parse_count, parse_size
from tokenmill.errors import UserError, unknown_name

if TYPE_CHECKING:
    from tokenmill.quantize.finish import GateRequest
    from tokenmill.quantize.job import QuantizeJob


def parse_share(text: str | float) -> float:
    """ "1%" or 0.01 -> 0.01."""
    if isinstance(text, float | int):
        return float(text)
    try:
        share = float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if share < 0:
        raise UserError(f"'{text}' is not a share", "write it like 1% or 0.01")
    return share


def parse_options(pairs: list[str]) -> tuple[tuple[str, Any], ...]:
    """["order=static", "gptq.mse=true"] -> pairs; their types are the method's business."""
    options = []
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UserError(f"'{pair}' is not an option", "write it like order=static")
        options.append((name.strip(), value.strip()))
    return tuple(options)


def quantize(
    model: Model = DEFAULT_MODEL,
    out: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Directory (or .gguf file) to write. Required.")
    ] = None,
    method: Annotated[
        str,
        typer.Option(help="A method, or several joined by '+', such as smoothquant+gptq. Default: gptq; for GGUF rtn."),
    ] = "",
    format: Annotated[
        str,
        typer.Option(
            help="compressed-tensors, gptq, gptq_v2, awq, bitsandbytes, fp8, dense, sparse-24 or gguf. Default: by fit."
        ),
    ] = "",
    bits: Annotated[int | None, typer.Option(help="Bits per weight, where the method allows a choice.")] = None,
    group_size: Annotated[
        int | None,
        typer.Option(help="Weights per scale; 0: a whole row. Default: 128, 64 or 32 by what divides."),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option("--symmetric/--asymmetric", help="Without or with zero points. Default: the method's."),
    ] = None,
    activations: Annotated[
        str, typer.Option(help="Rounding of the inputs: int8 or fp8 (W4A8), fp4, none. Default: the method's.")
    ] = "",
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Option of a method. Repeatable.")
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Layer to leave unquantized: its name, or re:REGEX. Repeatable."),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A recipe in YAML instead of these flags.")
    ] = None,
    file_size: Annotated[
        int,
        typer.Option(
            "--size",
            parser=parse_size,
            metavar="SIZE",
            help="mixed only: bytes that the weights may take, such as 900MB.",
        ),
    ] = 0,
    tune_scales: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="STEPS",
            help="Then learn scales and norms against the unquantized model's logits, in so many steps, such as 100.",
        ),
    ] = 0,
    train_codes: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="STEPS",
            help="Then train codes too, in so many steps instead, such as 400 with --calibration-drawn 512. 2 bits.",
        ),
    ] = 0,
    low_rank: Annotated[
        int,
        typer.Option(
            min=0, metavar="RANK", help="Also write OUT/low_rank, a LoRA adapter of what rounding lost, such as 8."
        ),
    ] = 0,
    type: Annotated[str, typer.Option(help="GGUF only: type or mix of the file, such as Q4_K_M.")] = "",
    dtype: Annotated[
        str, typer.Option(help="Dtype of unquantized tensors: auto, float16, bfloat16 or float32.")
    ] = "auto",
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text, or jsonl of texts or chats. Default: a built-in text.")
    ] = None,
    calibration_samples: Annotated[int, typer.Option(help="Sequences to calibrate on.")] = 128,
    calibration_drawn: Annotated[
        int, typer.Option(min=0, help="Sequences that the model draws itself, to calibrate on beside the text's.")
    ] = 0,
    calibration_length: Annotated[
        int,
        typer.Option(parser=parse_count, metavar="TOKENS", help="Tokens per sequence. 0: 512, or the model's context."),
    ] = 0,
    memory: Annotated[int, typer.Option(parser=parse_size, metavar="SIZE", help="Memory limit, such as 4GiB.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads. 0: all.")] = 0,
    device: Annotated[str, typer.Option(help="Where blocks are computed: auto (a GPU if any), cpu or cuda.")] = "auto",
    gate: Annotated[
        bool, typer.Option("--gate/--no-gate", help="Measure the result and refuse it if it lost too much.")
    ] = True,
    gate_text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to measure on. Default: held-out text.")
    ] = None,
    max_quality_loss: Annotated[
        float | None,
        typer.Option(
            "--max-quality-loss",
            "--max-loss",
            parser=parse_share,
            metavar="SHARE",
            help="Maximum rise of perplexity. Default: 5%.",
        ),
    ] = None,
    max_kld: Annotated[
        float | None,
        typer.Option(
            min=0.0, metavar="NATS", help="Maximum mean KL divergence. Default: 2 ln(1 + --max-quality-loss), 0.098."
        ),
    ] = None,
    drop_layers: Annotated[
        int, typer.Option(min=0, help="Blocks to leave out: those whose absence costs least on the calibration text.")
    ] = 0,
    kv_scales: Annotated[
        bool, typer.Option("--kv-scales", help="Also write calibrated scales of an FP8 KV cache (k_scale, v_scale).")
    ] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Discard the unfinished work of an earlier run.")] = False,
    as_json: AsJson = False,
    _verbose: Verbose = False,
) -> None:
    """Quantize a model by any method into any format. A killed job resumes where it stopped.

    A result whose perplexity or divergence from the source exceeds its limit is refused and kept as OUT.rejected.
    """
    if out is None:
        raise UserError("no output is given", "give a path, as in: tokenmill quantize smollm2 --out smollm2-int4")
    limits = gate_request(gate, gate_text, max_quality_loss, max_kld, threads, device, memory)
    if format == "gguf" or type:
        wrong = {
            "--format": format not in ("", "gguf"),
            "--recipe": recipe,
            "--group-size": group_size,
            "--option": option and method != "mixed",
            "--activations": activations,
            "--kv-scales": kv_scales,
            "--drop-layers": drop_layers,
            "--tune-scales": tune_scales,
            "--train-codes": train_codes,
            "--low-rank": low_rank,
            "--calibration-drawn": calibration_drawn,
            "--ignore": ignore,
            "--dtype": dtype != "auto",
            "--symmetric/--asymmetric": symmetric is not None,
            "--restart": restart,
        }
        if any(wrong.values()):
            raise UserError(
                f"{', '.join(name for name, given in wrong.items() if given)} does not go with a GGUF",
                "give --type (such as Q4_K_M) or --bits, and --method rtn, imatrix or mixed",
            )
        from tokenmill.quantize.gguf_job import GGUFJob, run_gguf_job

        by_limit = method == "mixed" and not (type or bits or file_size)
        gguf = GGUFJob(
            model,
            out,
            method or "rtn",
            type,
            bits,
            calibration,
            calibration_samples,
            calibration_length,
            device,
            size=file_size,
            max_kld=(max_kld or 0.0) if by_limit else 0.0,
            **mixed_options(parse_options(option or [])),
        )
        with progress_bar("blocks") as advance:
            report = run_gguf_job(
                gguf,
                limits,
                memory,
                lambda done, total, _: advance(done, total),
                lambda seconds: print(f"mixed to gguf: about {duration(seconds)}", file=sys.stderr),
            )
        emit(report, as_json, lambda: quantize_screen(report, model))
        return
    from tokenmill.quantize.job import QuantizeJob
    from tokenmill.quantize.recipe import RecipeRequest
    from tokenmill.quantize.recipe_file import read_recipe

    if recipe is not None:
        if option or bits is not None or group_size is not None or symmetric is not None or method or activations:
            raise UserError(
                "--recipe already names the method",
                "leave out --method, --bits, --group-size, --activations and --option",
            )
        request = read_recipe(recipe)
        request = replace(request, ignore=(*request.ignore, *(ignore or ())))
    else:
        request = RecipeRequest(
            method or "gptq",
            bits,
            group_size,
            symmetric,
            parse_options(option or []),
            tuple(ignore or ()),
            activations=activations,
        )
    job = QuantizeJob(
        model=model,
        out=out,
        recipe=request,
        format=format,
        dtype=dtype,
        calibration=calibration,
        calibration_samples=calibration_samples,
        calibration_length=calibration_length,
        drawn=calibration_drawn,
        memory=memory,
        threads=threads,
        device=device,
        restart=restart,
        drop_layers=drop_layers,
        kv_scales=kv_scales,
        size=file_size,
        low_rank=low_rank,
        tune=tune_scales,
        train=train_codes,
        gate=limits,
    )
    _run(job, as_json)


def _run(job: QuantizeJob, as_json: bool) -> None:
    from tokenmill.quantize.device import describe_device
    from tokenmill.quantize.job import prepare, run_job

    prepared = prepare(job)
    forecast = prepared.forecast
    on_device = f", {size(forecast.device_bytes)} of GPU memory" if forecast.device_bytes else ""
    print(
        f"{prepared.recipe.method} to {prepared.file_format.name} on {describe_device(prepared.device)}: "
        f"about {duration(forecast.seconds)}, {size(forecast.memory_bytes)} of memory{on_device}, "
        f"{size(forecast.disk_bytes)} of temporary disk",
        file=sys.stderr,
    )
    with progress_bar("blocks") as advance:
        result = asdict(run_job(prepared, lambda done, total, _: advance(done, total)))
    emit(result, as_json, lambda: quantize_screen(result, job.model))


def mixed_options(options: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """Of mixed precision in a GGUF: types=Q4_K,Q6_K, the types that matrices may get."""
    for name, _ in options:
        if name != "types":
            raise unknown_name("option of mixed in a GGUF", name, ["types"])
    return {name: tuple(each.strip().upper() for each in value.split(",")) for name, value in options}


def gate_request(
    enabled: bool,
    text: Path | None,
    max_quality_loss: float | None,
    max_kld: float | None,
    threads: int,
    device: str,
    memory: int,
) -> GateRequest:
    from tokenmill.quantize.finish import DEFAULT_MAX_LOSS, GateRequest

    return GateRequest(
        enabled,
        text,
        DEFAULT_MAX_LOSS if max_quality_loss is None else max_quality_loss,
        max_kld=max_kld,
        threads=threads,
        # The engine has needs of its own of a GPU (Triton): where it declines one that quantizes, the CPU measures.
        device="cpu" if device == "cpu" else "auto",
        in_turn=memory > 0,
    )
