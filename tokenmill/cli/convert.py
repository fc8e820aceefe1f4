"""`tokenmill convert`: the same weights in another file format; adapters merged into a base, or extracted from two."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli.options import AsJson, Verbose
from tokenmill.cli.output import emit
from tokenmill.cli.progress import progress_bar
from tokenmill.cli.quantize import gate_request, parse_options, parse_share
from tokenmill.cli.screens.convert import convert_screen, extract_screen, merge_screen
from tokenmill.errors import UserError

if TYPE_CHECKING:
    from tokenmill.quantize.merge import Requantization

_MERGE, _EXTRACT = "Merge adapters", "Extract an adapter"


def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Alias, Hugging Face id, directory or .gguf file.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory (or .gguf file) to write.")],
    format: Annotated[
        str,
        typer.Option(
            help="compressed-tensors, gptq, gptq_v2, awq, bitsandbytes, fp8, gguf, or safetensors (all floats). "
            "Default: gguf for an OUT of that name, else safetensors."
        ),
    ] = "",
    dtype: Annotated[
        str,
        typer.Option(help="Dtype of unquantized tensors: float32, float16, bfloat16, or auto: lossless."),
    ] = "auto",
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR[=WEIGHT]", help="PEFT adapter to merge into MODEL. Repeatable.", rich_help_panel=_MERGE
        ),
    ] = None,
    method: Annotated[
        str, typer.Option(help="Quantize the merged weights by this method, as in quantize.", rich_help_panel=_MERGE)
    ] = "",
    bits: Annotated[int | None, typer.Option(help="Bits per weight.", rich_help_panel=_MERGE)] = None,
    group_size: Annotated[int | None, typer.Option(help="Weights per scale.", rich_help_panel=_MERGE)] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Option of the method. Repeatable.", rich_help_panel=_MERGE),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A recipe in YAML instead of these flags.", rich_help_panel=_MERGE),
    ] = None,
    type: Annotated[
        str, typer.Option(help="Quantize into a GGUF of this type, such as Q4_K_M.", rich_help_panel=_MERGE)
    ] = "",
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text that the method calibrates on.", rich_help_panel=_MERGE),
    ] = None,
    gate: Annotated[
        bool, typer.Option("--gate/--no-gate", help="Refuse what lost too much.", rich_help_panel=_MERGE)
    ] = True,
    gate_text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text to measure on. Default: built-in.", rich_help_panel=_MERGE),
    ] = None,
    max_quality_loss: Annotated[
        float | None,
        typer.Option(
            parser=parse_share, metavar="SHARE", help="Maximum rise of perplexity. Default: 5%.", rich_help_panel=_MERGE
        ),
    ] = None,
    max_kld: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="NATS", help="Maximum mean KL divergence.", rich_help_panel=_MERGE),
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where blocks are quantized: auto, cpu or cuda.", rich_help_panel=_MERGE)
    ] = "auto",
    extract_adapter: Annotated[
        str,
        typer.Option(
            metavar="BASE",
            help="Write the difference of MODEL to this base as a PEFT adapter.",
            rich_help_panel=_EXTRACT,
        ),
    ] = "",
    rank: Annotated[int, typer.Option(help="Rank of the extracted adapter.", rich_help_panel=_EXTRACT)] = 16,
    as_json: AsJson = False,
    _verbose: Verbose = False,
) -> None:
    """Write a model in another format without rounding it again. What is lost, if anything, is measured and listed.

    With --adapter the adapters are merged first; with --method, --recipe or --type the merged weights are quantized,
    and what that loses is measured against base plus adapter unmerged. With --extract-adapter an adapter is written.
    """
    recipe_flags = {
        "--method": method, "--bits": bits, "--group-size": group_size, "--option": option, "--recipe": recipe,
        "--type": type, "--calibration": calibration, "--gate-text": gate_text,
        "--max-quality-loss": max_quality_loss, "--max-kld": max_kld,
    }  # fmt: skip
    given = [name for name, value in recipe_flags.items() if value not in (None, "")]
    if given and not adapter:
        raise UserError(
            f"{given[0]} is for merged adapters", "give --adapter, or use `tokenmill quantize` to round a model"
        )
    if extract_adapter:
        if adapter or format:
            raise UserError("--extract-adapter writes a PEFT adapter", "leave --adapter and --format out")
        _extract(model, extract_adapter, out, rank, as_json)
    elif adapter:
        gguf = type or format == "gguf" or (out.suffix == ".gguf" and not format)
        if recipe is not None and (method or bits is not None or group_size is not None or option):
            raise UserError("--recipe already names the method", "leave --method, --bits, --group-size, --option out")
        requantize = None
        if method or recipe is not None or type or bits is not None or group_size is not None:
            limits = gate_request(gate, gate_text, max_quality_loss, max_kld, 0, device, 0)
            requantize = _requantization(method, bits, group_size, option, recipe, type, calibration, device, limits)
        _merge(model, out, adapter, "gguf" if gguf else format, dtype, requantize, as_json)
    else:
        _convert(model, out, format, dtype, as_json)


def _convert(model: str, out: Path, format: str, dtype: str, as_json: bool) -> None:
    from tokenmill.checkpoint.sources import resolve
    from tokenmill.quantize.convert import DENSE, GGUF
    from tokenmill.quantize.convert import convert as run

    chosen = format or (GGUF if out.suffix == ".gguf" else DENSE)
    result = asdict(run(resolve(model).path, out, chosen, dtype))
    emit(result, as_json, lambda: convert_screen(result))


def _requantization(
    method: str,
    bits: int | None,
    group_size: int | None,
    option: list[str] | None,
    recipe: Path | None,
    type: str,
    calibration: Path | None,
    device: str,
    gate: Any,
) -> Requantization:
    from tokenmill.quantize.merge import Requantization
    from tokenmill.quantize.recipe import RecipeRequest
    from tokenmill.quantize.recipe_file import read_recipe

    request = (
        read_recipe(recipe)
        if recipe is not None
        else RecipeRequest(method or "gptq", bits, group_size, None, parse_options(option or []))
    )
    return Requantization(request, type, calibration, device, gate)


def _merge(
    model: str,
    out: Path,
    adapters: list[str],
    format: str,
    dtype: str,
    requantize: Requantization | None,
    as_json: bool,
) -> None:
    from tokenmill.quantize.merge import MergeJob, merge, parse_adapter

    job = MergeJob(model, out, tuple(map(parse_adapter, adapters)), format, dtype, requantize)
    with progress_bar("blocks") as advance:
        result = merge(job, lambda done, total, _: advance(done, total))
    emit(result, as_json, lambda: merge_screen(result, model))


def _extract(tuned: str, base: str, out: Path, rank: int, as_json: bool) -> None:
    from tokenmill.checkpoint.sources import resolve
    from tokenmill.quantize.extract import extract

    with progress_bar("matrices") as advance:
        report = extract(
            resolve(tuned).path, resolve(base).path, out, rank, base, lambda done, total, _: advance(done, total)
        )
    result = asdict(report)
    emit(result, as_json, lambda: extract_screen(result, base))
