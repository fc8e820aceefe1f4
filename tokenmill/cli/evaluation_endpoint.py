"""`tokenmill eval endpoint`: how far a served model is from a reference, and which rounding of it that looks like."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli.options import AsJson, Verbose, engine_options
from tokenmill.cli.output import emit
from tokenmill.cli.progress import print_note, progress_bar
from tokenmill.cli.screens.endpoint import endpoint_screen
from tokenmill.config import ADAPTER_OPTIONS, EngineConfig

_EXAMPLE = "tokenmill eval endpoint http://127.0.0.1:8000 --reference smollm2"


@engine_options(without=("context", *ADAPTER_OPTIONS), prefix_caching=False)
def endpoint(
    url: Annotated[str, typer.Argument(metavar="URL", help="Base URL of an OpenAI-compatible API.")] = "",
    reference: Annotated[
        str, typer.Option(metavar="MODEL", help="The model to compare with: the checkpoint before it was rounded.")
    ] = "",
    model: Annotated[str, typer.Option(metavar="NAME", help="Name of the model there. Default: its first.")] = "",
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", metavar="KEY", help="API key of the endpoint.", show_envvar=True)
    ] = "",
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to probe with, UTF-8. Default: a built-in text.")
    ] = None,
    passages: Annotated[int, typer.Option(help="Passages of the text that are sent.")] = 24,
    length: Annotated[int, typer.Option(help="Tokens of a passage.")] = 96,
    candidates: Annotated[
        str, typer.Option(metavar="NAMES", help="Roundings to compare with: GGUF types or .gguf files, by commas.")
    ] = "",
    kv: Annotated[
        str, typer.Option(metavar="NAMES", help="KV cache dtypes to compare with, by commas; none: only the weights.")
    ] = "",
    method: Annotated[
        str, typer.Option(metavar="prompt|generated|answers", help="How to ask. Default: the best that it offers.")
    ] = "",
    timeout: Annotated[float, typer.Option(help="Seconds that one answer may take.")] = 120.0,
    as_json: AsJson = False,
    _verbose: Verbose = False,
    *,
    engine: EngineConfig,
) -> None:
    """Divergence of any OpenAI-compatible endpoint from a reference, and the rounding of it that it is most like.

    By the log-probabilities it gives, or by sampled answers where it gives none, with a wider uncertainty.
    """
    from tokenmill.errors import UserError, unknown_name

    if not url or not reference:
        raise UserError("the endpoint or the reference is missing", f"write: {_EXAMPLE}")
    from tokenmill.checkpoint.sources import resolve
    from tokenmill.evaluate.endpoint import EndpointClient
    from tokenmill.evaluate.endpoint_probe import METHODS, ProbePlan
    from tokenmill.evaluate.endpoint_report import KV_DTYPES, WEIGHTS, EndpointJob, measure_endpoint
    from tokenmill.evaluate.windows import read_text
    from tokenmill.quantize.calibration_text import built_in_held_out
    from tokenmill.quantize.roundings import RoundingFiles

    if method and method not in METHODS:
        raise unknown_name("method", method, METHODS)
    with EndpointClient(url, model, api_key, timeout) as client, progress_bar("passages") as advance:
        path = resolve(reference).path
        job = EndpointJob(
            path,
            read_text(text) if text else built_in_held_out(),
            ProbePlan(passages, length),
            _names(candidates) or WEIGHTS,
            () if kv == "none" else _names(kv) or KV_DTYPES,
            method,
        )
        report = measure_endpoint(client, job, engine, RoundingFiles(path).find, print_note, advance)
    result = asdict(report) | {"reference": reference}
    emit(result, as_json, lambda: endpoint_screen(result))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
