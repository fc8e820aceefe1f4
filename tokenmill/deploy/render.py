"""From a plan to files: engine x target -> {file name: text}. The only way in for the CLI and for `optimize`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml  # type: ignore[import-untyped]

from tokenmill.deploy.cluster import Cluster, cluster_files
from tokenmill.deploy.compose import compose, compose_files
from tokenmill.deploy.engines import ENGINES
from tokenmill.deploy.engines.base import Engine, Launch, checked_model
from tokenmill.deploy.hardening import create_keys_script, has_keys
from tokenmill.deploy.hardening import notes as hardening_notes
from tokenmill.deploy.kubernetes import Manifest, device_resource
from tokenmill.deploy.serving import Serving
from tokenmill.deploy.systemd import units
from tokenmill.errors import UserError, unknown_name

TARGETS = ("command", "kubernetes", "compose", "systemd")


@dataclass(frozen=True, slots=True)
class Rendered:
    files: dict[str, str]
    command: tuple[str, ...]  # of one replica
    prepare: tuple[str, ...]
    notes: tuple[str, ...]


def find_engine(name: str) -> Engine:
    """By name; the planner's spellings are accepted too."""
    engine: Engine = ENGINES.get("llamacpp" if name == "llama.cpp" else name)()
    return engine


def render(target: str, engine: Engine, serving: Serving, cluster: Cluster | None = None) -> Rendered:
    """`cluster`: for the target kubernetes."""
    if target not in TARGETS:
        raise unknown_name("target", target, TARGETS)
    asked = cluster or Cluster()
    if target != "kubernetes" and (asked.split or asked.router or asked.gateway or asked.nodes > 1):
        raise UserError(f"pools and gateways need a cluster, not {target}", "give --target kubernetes")
    checked_model(serving.model)
    launch = engine.launch(serving)
    notes = [*launch.notes, *hardening_notes(engine)]
    if serving.draft_tokens:
        notes.append(
            f"the plan counts on speculation with {serving.draft_tokens} drafts: add a drafter of your choice to the "
            "command, or plan with --speculation off"
        )
    if target == "kubernetes":
        files = {name: _yaml(objects) for name, objects in cluster_files(engine, serving, launch, asked).items()}
        if asked.split:
            notes += engine.router(serving, ("prefill",), ("decode",))[1].notes
        elif asked.scaler != "none" and engine.signals is None:
            notes.append(f"{engine.name} publishes no metrics: no autoscaling")
        if asked.gateway:
            notes.append(f"the InferencePool needs an endpoint picker: install one as Service {serving.name}-epp")
        if serving.on_gpu:
            notes.append(f"nodes need the vendor's device plugin: pods ask for {device_resource(serving)}")
    elif target == "compose":
        files = {"compose.yaml": _yaml([compose(engine, serving, launch)]), **compose_files(engine, launch)}
    elif target == "systemd":
        files = units(engine, serving, launch) | launch.files
    else:
        files = {"launch.sh": launch_script(engine, launch), **launch.files}
    if has_keys(engine) and target != "command":
        files["create-keys.sh"] = _script(create_keys_script(engine, target, serving.name))
    if launch.prepare and target != "command":
        files["prepare.sh"] = _script(launch.prepare)
    return Rendered(files, launch.command, launch.prepare, tuple(notes))


def launch_script(engine: Engine, launch: Launch) -> str:
    """A shell script: what to prepare, the environment, then the command with one flag per line."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in launch.environment]
    command = "exec " + shell_line(launch.command)
    if engine.key_variable:
        lines.insert(0, f': "${{{engine.key_variable}:?set it to an API key: the server listens on all interfaces}}"')
        lines.append(f"export {engine.key_variable}")
    if engine.key_flag:
        command += f' \\\n  {engine.key_flag} "${engine.key_variable}"'
    return _script((*launch.prepare, *lines, command))


def shell_line(command: Sequence[str]) -> str:
    text, words = shlex.quote(command[0]), list(command[1:])
    for word in words:
        text += (" \\\n  " if word.startswith("--") else " ") + shlex.quote(word)
    return text


def _script(lines: Sequence[str]) -> str:
    return "#!/bin/sh\nset -eu\n" + "\n".join(lines) + "\n"


class _Dumper(yaml.SafeDumper):
    """Nothing by reference, texts of several lines as blocks: what a person would write."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _block(dumper: yaml.SafeDumper, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _block)


def _yaml(documents: Sequence[Manifest]) -> str:
    text: str = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1000)
    return text
