"""Which models a server offers, under which names and with which options: from the command line or a config file.

    models:
      - model: smollm2             # alias, Hugging Face id, directory or .gguf file
        name: small                # default: as `model` is written
        aliases: [gpt-4o-mini]
        context: 4k                # any option of the engine, and those of the server that concern a model
        keep_alive: 10m
      - gemma3-270m
    splits:
      chat: {small: 0.9, gemma3-270m: 0.1}

Everything wrong with names and weights is refused here, before a model is looked for. Knows nothing of processes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.config import EngineConfig, option_fields
from tokenmill.engine.adapters.registry import split_option
from tokenmill.errors import UserError, unknown_name
from tokenmill.serve.config import ServeConfig, split_options
from tokenmill.serve.fleet.routing import LATEST
from tokenmill.serve.keep_alive import parse_keep_alive

_OWN_FIELDS = ("model", "name", "aliases")
# Options of the server that may differ from model to model.
_MODEL_OPTIONS = (
    "keep_alive",
    "tool_call_parser",
    "tool_parser_plugin",
    "reasoning_parser",
    "reasoning_parser_plugin",
    "chat_template",
    "generation_config",
    "override_generation_config",
    "max_queued_requests",
    "max_queued_tokens",
    "text_workers",
    "text_worker_memory",
)
# What is made for one checkpoint: a model that joins has its own.
_OF_CHECKPOINT = (
    "served_model_name",
    "tool_call_parser",
    "tool_parser_plugin",
    "reasoning_parser",
    "reasoning_parser_plugin",
    "chat_template",
    "generation_config",
    "override_generation_config",
)
_ONE_MODEL = {  # options that make sense for one model only, with the remedy
    "served_model_name": "give `name` and `aliases` in the file of --config",
    "traffic_log": "record the traffic of one model at a time",
}
_SUMS = (1.0, 100.0)
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model as it was asked for."""

    source: str  # alias, Hugging Face id or path
    names: tuple[str, ...]  # in the API; the first is its own, the others are aliases
    config: ServeConfig
    engine: EngineConfig

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def keep_alive(self) -> float:
        return parse_keep_alive(self.config.keep_alive)


@dataclass(frozen=True, slots=True)
class Catalog:
    models: tuple[ModelSpec, ...]
    splits: Mapping[str, Mapping[str, float]]  # name -> shares of models, which sum to 1

    @property
    def config(self) -> ServeConfig:
        """What concerns the server as a whole."""
        return self.models[0].config


def read_catalog(models: Sequence[str], given: Mapping[str, Any], in_file: Mapping[str, Any], file: str) -> Catalog:
    """`models` and `given` are typed; `in_file` is what the config file says."""
    common = {name: value for name, value in in_file.items() if name not in ("models", "splits")}
    listed = in_file.get("models")
    if listed is not None and models:
        raise UserError(f"models are given on the command line and in {file}", "keep one of them")
    if listed is not None and (not isinstance(listed, list) or not listed):
        raise UserError(f"models in {file} is not a list", "write `models:` and under it `- model: NAME`")
    entries = [_entry(each, file) for each in listed] if listed is not None else [{"model": each} for each in models]
    specs = tuple(_spec(entry, given, common, file) for entry in entries)
    if len(specs) > 1:
        for name, remedy in _ONE_MODEL.items():
            if getattr(specs[0].config, name):
                raise UserError(f"--{name.replace('_', '-')} is given for {len(specs)} models", remedy)
    _check_names(specs)
    splits = _splits(in_file.get("splits") or {}, specs, file)
    _check_adapters(specs, splits)
    return Catalog(specs, splits)


def _entry(entry: Any, file: str) -> Mapping[str, Any]:
    entry = {"model": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, dict) or not isinstance(entry.get("model"), str) or not entry["model"]:
        raise UserError(f"an entry of models in {file} has no `model`", "give an alias, a Hugging Face id or a path")
    return {str(name): value for name, value in entry.items()}


def _spec(entry: Mapping[str, Any], given: Mapping[str, Any], common: Mapping[str, Any], file: str) -> ModelSpec:
    source, aliases = str(entry["model"]), entry.get("aliases") or ()
    aliases = (aliases,) if isinstance(aliases, str) else tuple(aliases)
    own = {name: value for name, value in entry.items() if name not in _OWN_FIELDS}
    allowed = {*_MODEL_OPTIONS, *(spec.name for spec in option_fields(EngineConfig))}
    whole = {spec.name for spec in option_fields(ServeConfig)} - allowed
    for name in own:
        if name.replace("-", "_") in whole:
            raise UserError(f"{name} is an option of the whole server, not of '{source}'", "write it beside `models:`")
    config, engine = split_options(given, {**common, **own}, file)
    names = (str(entry.get("name") or source), *aliases)
    if config.served_model_name and names == (source,):
        names = config.served_model_name
    if not all(isinstance(name, str) and name for name in names):
        raise UserError(f"a name of model '{source}' is not a text", "correct `name` and `aliases`")
    return ModelSpec(source, names, config, engine)


def _check_names(specs: Sequence[ModelSpec]) -> None:
    seen: dict[str, str] = {}
    for spec in specs:
        for name in dict.fromkeys(spec.names):
            if name in seen:
                problem = f"two models are called '{name}': '{seen[name]}' and '{spec.source}'"
                raise UserError(problem, "give one of them another `name` in the file of --config")
            seen[name] = spec.source


def _check_adapters(specs: Sequence[ModelSpec], splits: Collection[str]) -> None:
    """An adapter is asked for by its name: it has one of its own."""
    taken = {name for spec in specs for name in spec.names} | set(splits)
    for spec in specs:
        names = [split_option(each)[0] for each in spec.engine.lora]
        for name in names:
            if name in taken or name.removesuffix(LATEST) in taken:
                problem = f"adapter '{name}' of '{spec.name}' has the name of a model or of an adapter of another one"
                raise UserError(problem, "write `lora: [NAME=DIR]` with another name, under its own model")
        taken.update(names)


def _splits(splits: Any, specs: Sequence[ModelSpec], file: str) -> dict[str, dict[str, float]]:
    if not isinstance(splits, dict) or not all(isinstance(shares, dict) and shares for shares in splits.values()):
        raise UserError(f"splits in {file} are no names with shares", "write `splits:` and `chat: {a: 0.9, b: 0.1}`")
    own = {name: spec.name for spec in specs for name in spec.names}
    found: dict[str, dict[str, float]] = {}
    for name, shares in splits.items():
        if str(name) in own:
            raise UserError(f"split '{name}' has the name of a model", "give it another")
        numbers = [value for value in shares.values() if type(value) in (int, float) and 0 <= value < float("inf")]
        total = sum(numbers)
        if len(numbers) < len(shares) or not any(abs(total - whole) <= _TOLERANCE * whole for whole in _SUMS):
            raise UserError(f"the shares of split '{name}' sum to {total:g}", "make them sum to 1, or to 100")
        for model in shares:
            if str(model) not in own:
                raise unknown_name(f"model in split '{name}'", str(model), own)
        found[str(name)] = {own[str(model)]: share / total for model, share in shares.items()}
    return found


def single(source: str, config: ServeConfig, engine: EngineConfig) -> Catalog:
    """One model, for those who have their records already."""
    return Catalog((ModelSpec(source, config.served_model_name or (source,), config, engine),), {})


def added(like: ModelSpec, source: str) -> ModelSpec:
    """A model that joins a running server, with the options of another but for what is made for that one."""
    plain = ServeConfig()
    config = replace(like.config, **{name: getattr(plain, name) for name in _OF_CHECKPOINT})
    plain_engine = EngineConfig()
    drafter = like.engine.speculate.startswith(("draft:", "head:"))
    speculate = plain_engine.speculate if drafter else like.engine.speculate
    engine = replace(like.engine, lora=(), load_format=plain_engine.load_format, speculate=speculate)
    return ModelSpec(source, (source,), config, engine)
