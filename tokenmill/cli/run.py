"""`tokenmill run`: one prompt, one answer, streamed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli.options import DEFAULT_MODEL, AsJson, Model, Verbose, engine_options, sampling_options
from tokenmill.cli.output import print_json
from tokenmill.cli.progress import print_note
from tokenmill.cli.streaming import Answer, Streamer, answer_footer, answer_record, logprob_records
from tokenmill.cli.values import parse_ids
from tokenmill.config import ADAPTER_MEMORY, EngineConfig
from tokenmill.errors import UserError
from tokenmill.resolution import reserve_concurrency
from tokenmill.types import SamplingParams, StructuredSpec

MAX_TOKENS = 256


@sampling_options(max_tokens=MAX_TOKENS, temperature=0.0)
@engine_options(without=("seed", *ADAPTER_MEMORY), concurrency=1, speculate="auto")
def run(
    model: Model = DEFAULT_MODEL,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="The prompt; '-' or none: read from stdin.")
    ] = None,
    token_ids: Annotated[str | None, typer.Option(help="Prompt as token ids instead, such as 1,2,3.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself, without the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message, before the prompt.")] = None,
    json_schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The answer must be JSON of the schema in this file.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The answer must match this regular expression.")] = None,
    as_json: AsJson = False,
    _verbose: Verbose = False,
    *,
    engine: EngineConfig,
    params: SamplingParams,
) -> None:
    """Answer one prompt. Greedy unless --temperature is given, so that the same prompt gives the same answer.

    A model with a chat template is asked through it (see --raw); a base model continues the text.
    """
    prompt = parse_ids(token_ids) if token_ids is not None else _prompt_text(text)
    if token_ids is not None and text is not None:
        raise UserError("both a text and --token-ids are given", "keep one of them")
    if system is not None and (raw or token_ids is not None):
        raise UserError("--system needs the chat template", "leave out --raw and --token-ids")
    params = replace(params, structured=_structured(json_schema, regex))
    engine = reserve_concurrency(engine, params.n, "--n")
    with Streamer(model, engine) as streamer:
        chat = isinstance(prompt, str) and not raw and (streamer.has_template or system is not None)
        if chat:
            messages = [{"role": "system", "content": system}] if system is not None else []
            prompt = streamer.render([*messages, {"role": "user", "content": prompt}])
        streams = not as_json and params.n == 1
        answer = streamer.stream(prompt, params, chat, _write if streams else lambda _index, _text: None)
    _finish(answer, params, as_json)


def _structured(json_schema: Path | None, regex: str | None) -> StructuredSpec | None:
    if json_schema is not None and regex is not None:
        raise UserError("both --json-schema and --regex are given", "keep one of them")
    if regex is not None:
        return StructuredSpec("regex", regex)
    if json_schema is None:
        return None
    try:
        return StructuredSpec("json_schema", json_schema.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {json_schema}: {error}", "check the path") from None


def _prompt_text(text: str | None) -> str:
    if text is None and sys.stdin.isatty():
        raise UserError("no prompt is given", 'give one, as in: tokenmill run smollm2 "Why is the sky blue?"')
    if text in (None, "-"):
        text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise UserError("the prompt is empty", 'give one, as in: tokenmill run smollm2 "Why is the sky blue?"')
    return text


def _write(_index: int, text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _finish(answer: Answer, params: SamplingParams, as_json: bool) -> None:
    output = answer.output
    if answer.interrupted:
        raise KeyboardInterrupt
    assert output is not None
    record = answer_record(output, params.logprobs)
    if as_json:
        print_json(record)
        return
    if params.n == 1:
        print()
    for each in output.outputs:
        if params.n > 1:
            print(f"[{each.index}] {each.text}")
        if params.logprobs is not None:
            for record in logprob_records(each, params.logprobs):
                top = " ".join(f"{token_id}:{logprob:.4f}" for token_id, logprob in record["top"])
                print(f"{record['token_id']}\t{record['logprob']:.4f}\t{top}")
    sys.stdout.flush()
    print_note(answer_footer(record))
