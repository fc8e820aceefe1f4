"""Command-line flags made from the records they fill: EngineConfig and SamplingParams are the only lists of options.

A decorator adds one flag per field to a verb's signature and hands the verb the finished record. A flag that is not
given stays out, so that a verb can have defaults of its own. Knows nothing of what the options mean. Imports no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Annotated, Any, get_type_hints

import typer

from tokenmill.cli.values import parse_biases, parse_ids
from tokenmill.config import EngineConfig, parse_count
from tokenmill.log import configure
from tokenmill.types import SamplingParams

DEFAULT_MODEL = "smollm2"

_SAMPLING_HELP = {
    "n": "How many answers to one prompt.",
    "max_tokens": "Most tokens to generate.",
    "min_tokens": "Do not end before this many tokens.",
    "temperature": "Randomness; 0 always takes the most likely token.",
    "top_k": "Choose among the k most likely tokens; 0 is off.",
    "top_p": "Choose among the most likely tokens that together have this probability.",
    "min_p": "Drop tokens below this share of the most likely one's probability.",
    "typical_p": "Choose among the tokens of typical information that together have this probability.",
    "repetition_penalty": "Above 1 makes tokens of the prompt and the output less likely.",
    "frequency_penalty": "Lowers a token's logit by this for each time it is in the output.",
    "presence_penalty": "Lowers a token's logit by this once it is in the output.",
    "logit_bias": "Add to a token's logit, as ID=BIAS. Repeatable.",
    "seed": "Same seed, same answer.",
    "stop": "End before this text. Repeatable.",
    "stop_token_ids": "End at one of these token ids, such as 2,32000.",
    "ignore_eos": "Go on after the model's end-of-text token.",
    "include_stop_str_in_output": "Keep the stop text or token in the answer.",
    "skip_special_tokens": "Leave control tokens out of the text.",
    "logprobs": "Report the log-probability of each token and of the k most likely ones.",
}
_NOT_SAMPLING_FLAGS = ("prompt_logprobs", "structured", "cache")  # the evaluation verbs and the server are for those

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Alias, Hugging Face id, directory or .gguf file.", show_default=True)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def _set_verbose(verbose: bool) -> None:
    configure("info" if verbose else None)


Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", callback=_set_verbose, help="Log every automatic choice; tracebacks on errors."),
]


def engine_options(*, without: tuple[str, ...] = (), **defaults: Any) -> Callable[[Callable[..., Any]], Any]:
    """Add the flags of EngineConfig; the verb gets `engine`. `defaults` are the verb's own."""
    specs = [spec for spec in fields(EngineConfig) if spec.name not in without]
    flags = [flag for spec in specs for flag in _engine_flags(spec, defaults.get(spec.name, spec.default))]

    def build(given: Mapping[str, Any]) -> EngineConfig:
        named = {spec.name for spec in specs if {spec.name, *spec.metadata["aliases"]} & set(given)}
        return EngineConfig.from_options({name: v for name, v in defaults.items() if name not in named} | dict(given))

    return lambda verb: _extend(verb, flags, "engine", build)


def given_options(
    records: Mapping[str, type], defaults: Mapping[str, Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the flags of several records, by help panel; the verb gets `given`: those that were typed, by flag name."""
    flags = [
        flag
        for panel, record in records.items()
        for spec in fields(record)
        for flag in _engine_flags(spec, defaults.get(spec.name, spec.default), panel)
    ]
    return lambda verb: _extend(verb, flags, "given", dict)


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
    """`verb` with `flags` in its signature instead of `argument`, which is built from those that were given."""
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
    extended.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return extended


def _engine_flags(spec: Field[Any], default: Any, panel: str = "Engine") -> list[inspect.Parameter]:
    """The flag of a field, and its aliases as flags that help does not list."""
    parse, aliases = spec.metadata["parse"], spec.metadata["aliases"]
    extra: dict[str, Any] = {"rich_help_panel": panel}
    if parse is not None:
        extra |= {"parser": parse, "metavar": "TOKENS" if parse is parse_count else "SIZE"}
    help = _with_default(spec.metadata["help"], default)
    kind = list[str] if isinstance(spec.default, tuple) else type(spec.default)
    return [
        _flag(spec.name, kind, help, extra),
        *(_flag(each, kind, help, extra | {"hidden": True}) for each in aliases),
    ]


def _sampling_flag(spec: Field[Any], kind: Any, default: Any) -> inspect.Parameter:
    extra: dict[str, Any] = {"rich_help_panel": "Sampling"}
    if spec.name == "logit_bias":
        kind, extra["metavar"] = list[str], "ID=BIAS"
    elif spec.name == "stop":
        kind = list[str]
    elif spec.name == "stop_token_ids":
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
