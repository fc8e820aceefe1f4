"""`tokenmill convert`: the same weights in another file format."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli.options import AsJson, Verbose
from tokenmill.cli.output import emit
from tokenmill.cli.screens.convert import convert_screen


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
    as_json: AsJson = False,
    _verbose: Verbose = False,
) -> None:
    """Write a model in another format without rounding it again. What is lost, if anything, is measured and listed."""
    from tokenmill.checkpoint.sources import resolve
    from tokenmill.quantize.convert import DENSE, GGUF
    from tokenmill.quantize.convert import convert as run

    chosen = format or (GGUF if out.suffix == ".gguf" else DENSE)
    result = asdict(run(resolve(model).path, out, chosen, dtype))
    emit(result, as_json, lambda: convert_screen(result))
