"""Command-line flags made from the records they fill: EngineConfig and SamplingParams are the only lists of options.

A decorator adds one flag per field to a verb's signature and hands the verb the finished record. A flag that is not
given stays unset, so that a verb can have defaults of its own. Does not know what the options mean. Imports no torch.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Annotated, Any, get_type_hints

import typer

from tokenmill.cli.values import parse_biases, parse_ids
from tokenmill.config import BY_DEFAULT, TRANSFER_OPTIONS, EngineConfig, from_environment, option_fields
from tokenmill.log import configure
from tokenmill.types import SamplingParams

DEFAULT_MODEL = "smollm2"

_SAMPLING_HELP = {
    "n": "Number of completions per prompt.",
    "max_tokens": "Maximum number of tokens to generate.",
    "min_tokens": "Minimum number of tokens before the output may end.",
    "temperature": "Sampling temperature; 0 is greedy.",
    "top_k": "Sample from the k most likely tokens; 0 disables it.",
    "top_p": "Sample from the smallest set of tokens whose probabilities sum to this.",
    "min_p": "Drop tokens less likely than this share of the most likely token's probability.",
    "typical_p": "Locally typical sampling: probability mass of the tokens kept.",
    "repetition_penalty": "Values above 1 penalize tokens that occur in the prompt or the output.",
    "frequency_penalty": "Subtracted from a token's logit for each time it occurs in the output.",
    "presence_penalty": "Subtracted from a token's logit once it occurs in the output.",
    "logit_bias": "Add BIAS to the logit of token ID. Repeatable.",
    "allowed_token_ids": "Sample none but these token ids, such as 2,32000.",
    "bad_words": "Never write this text. Repeatable.",
    "seed": "Random seed; the same seed gives the same output.",
    "stop": "Stop before this text. Repeatable.",
    "stop_token_ids": "Stop at any of these token ids, such as 2,32000.",
    "ignore_eos": "Continue after the end-of-sequence token.",
    "include_stop_str_in_output": "Include the stop text or token in the output.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "logprobs": "Report the log-probability of each token and of the K most likely alternatives.",
}
# Only in evaluation verbs and the server, or made by the engine.
_NOT_SAMPLING_FLAGS = ("prompt_logprobs", "structured", "cache", "reasoning", "bad_word_ids")

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Alias, Hugging Face id, directory or .gguf file.", show_default=True)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def _set_verbose(verbose: bool) -> None:
    configure("info" if verbose else None)


Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", callback=_set_verbose, help="Log every automatic choice; print tracebacks."),
]


def engine_options(*, without: tuple[str, ...] = (), **defaults: Any) -> Callable[[Callable[..., Any]], Any]:
    """Add the flags of EngineConfig, but those of servers; the verb gets `engine`. `defaults` are the verb's own."""
    specs = [spec for spec in option_fields(EngineConfig) if spec.name not in (*without, *TRANSFER_OPTIONS)]
    flags = [flag for spec in specs for flag in _option_flags(spec, defaults.get(spec.name, spec.default))]

    def build(given: Mapping[str, Any]) -> EngineConfig:
        taken = set(given) | set(from_environment(specs, os.environ))
        unset = {name: value for name, value in defaults.items() if name not in taken}
        return EngineConfig.from_options(unset | dict(given), dict.fromkeys(unset, BY_DEFAULT))

    return lambda verb: _with_peer_flags(_extend(verb, flags, "engine", build))


def given_options(
    records: Mapping[str, type], defaults: Mapping[str, Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the flags of several records, by help panel; the verb gets `given`: those that were typed, by flag name."""
    flags = [
        flag
        for panel, record in records.items()
        for spec in option_fields(record)
        for flag in _option_flags(spec, defaults.get(spec.name, spec.default), panel)
    ]
    with_peers = _with_peer_flags if EngineConfig in records.values() else lambda verb: verb
    return lambda verb: with_peers(_extend(verb, flags, "given", dict))


def _with_peer_flags(verb: Callable[..., Any]) -> Callable[..., Any]:
    verb.takes_engine_options = True  # type: ignore[attr-defined]  # peer_flags.py looks for it
    return verb


def sampling_options(*, without: tuple[str, ...] = (), **defaults: Any) -> Callable[[Callable[..., Any]], Any]:
    """Add the flags of SamplingParams; the verb gets `params`. `defaults` are the verb's own."""
    types = get_type_hints(SamplingParams)
    specs = [spec for spec in fields(SamplingParams) if spec.name not in (*without, *_NOT_SAMPLING_FLAGS)]
    flags = [_sampling_flag(spec, types[spec.name], defaults.get(spec.name, spec.default)) for spec in specs]

    def build(given: Mapping[str, Any]) -> SamplingParams:
        values = {**defaults, **given}
        if "logit_bias" in values:
            values["logit_bias"] = parse_biases(values["logit_bias"])
        return SamplingParams(**values)

    return lambda verb: _extend(verb, flags, "params", build)


def _extend(
    verb: Callable[..., Any],
    flags: list[inspect.Parameter],
    argument: str,
    build: Callable[[Mapping[str, Any]], Any],
) -> Callable[..., Any]:
    """`verb` with `flags` in its signature in place of `argument`, which is built from the flags that were given."""
    types = get_type_hints(verb, include_extras=True)
    own = [
        parameter.replace(annotation=types[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(verb).parameters.items()
        if name != argument
    ]
    clash = {parameter.name for parameter in own} & {flag.name for flag in flags}
    assert not clash, f"flags given twice: {clash}"

    def extended(**values: Any) -> Any:
        given = {flag.name: values.pop(flag.name, None) for flag in flags}
        built = build({name: value for name, value in given.items() if value not in (None, [], ())})
        return verb(**values, **{argument: built})

    extended.__name__, extended.__doc__, extended.__module__ = verb.__name__, verb.__doc__, verb.__module__
    parameters = [*own, *flags]
    extended.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    extended.takes_engine_options = getattr(verb, "takes_engine_options", False)  # type: ignore[attr-defined]
    extended.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return extended


def _option_flags(spec: Field[Any], default: Any, panel: str = "Engine") -> list[inspect.Parameter]:
    """The flag of a field, and its aliases as flags that help does not list."""
    kind, parse, metavar = (spec.metadata[name] for name in ("kind", "parse", "metavar"))
    extra: dict[str, Any] = {"rich_help_panel": panel}
    if metavar and kind is not bool:
        extra["metavar"] = metavar
    if parse is not None:
        extra["parser"] = _or_automatic(parse) if spec.default is None else parse
    elif spec.default is None and kind is not str:
        extra["parser"] = _or_automatic(_number(kind))
    help = _with_default(spec.metadata["help"], default)
    typed = list[str] if kind is tuple else kind
    return [
        _flag(spec.name, typed, help, extra),
        *(_flag(each, typed, help, extra | {"hidden": True}) for each in spec.metadata["aliases"]),
    ]


def _number(kind: type) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise typer.BadParameter(f"'{text}' is not a valid {'integer' if kind is int else 'number'}") from None

    return parse


def _or_automatic(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`auto` is a value of every automatic option."""
    return lambda text: text if isinstance(text, str) and text.lower() == "auto" else parse(text)


def _sampling_flag(spec: Field[Any], kind: Any, default: Any) -> inspect.Parameter:
    extra: dict[str, Any] = {"rich_help_panel": "Sampling"}
    if spec.name == "logit_bias":
        kind, extra["metavar"] = list[str], "ID=BIAS"
    elif spec.name in ("stop", "bad_words"):
        kind = list[str]
    elif spec.name in ("stop_token_ids", "allowed_token_ids"):
        kind = str
        extra |= {"parser": parse_ids, "metavar": "IDS"}
    else:
        kind = next(plain for plain in (bool, int, float) if kind in (plain, plain | None))
    return _flag(spec.name, kind, _with_default(_SAMPLING_HELP[spec.name], default), extra)


def _with_default(help: str, default: Any) -> str:
    if default in (None, "", ()):
        return help
    return f"{help} Default: {('on' if default else 'off') if isinstance(default, bool) else default}."


def _flag(name: str, kind: Any, help: str, extra: dict[str, Any]) -> inspect.Parameter:
    """A flag that is None unless given."""
    text = name.replace("_", "-")
    texts = f"--{text}/--no-{text}" if kind is bool else f"--{text}"
    option = typer.Option(None, texts, help=help, show_default=False, **extra)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind | None)
