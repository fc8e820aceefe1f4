"""The help of `tokenmill` itself: the verbs in groups, one line each.

The table is the only list of what verbs are for; a verb's own help lists its options. Called by main.py.
"""

from __future__ import annotations

import os
from typing import Any

import typer
from typer.core import TyperGroup

from tokenmill import __version__

GROUPS: dict[str, dict[str, str]] = {
    "Serve and run": {
        "run": "Answer one prompt",
        "chat": "Talk with a model on the terminal",
        "serve": "Serve models over HTTP (OpenAI, Ollama and Anthropic APIs)",
        "route": "Route requests to several servers by what they have cached",
        "run-batch": "Answer a file of requests (OpenAI's batch format), resumable",
        "embed": "Vectors of the texts in a file, by an embedding model",
        "pull": "Download a model, or find it in the cache",
        "list": "Models on this disk",
        "rm": "Delete a model from this disk",
        "ps": "Models of a running server",
        "stop": "Unload a model of a running server",
    },
    "Make smaller and faster": {
        "quantize": "Quantize a model and measure what it lost",
        "convert": "Write a model in another file format; merge or extract adapters",
        "finetune": "Train an adapter on a text, or repair what quantization lost",
        "train-draft": "Train a draft head for speculative decoding",
        "optimize": "Find the cheapest deployment that keeps quality and latency",
    },
    "Measure": {
        "bench": "Speed: latency, throughput, or a server under load",
        "eval": "Quality: perplexity, divergence from a reference, tasks",
        "inspect": "What a checkpoint is, what it needs, which kernels run it here",
        "doctor": "What this machine and this installation can do",
    },
    "Plan and deploy": {
        "plan": "The cheapest deployment that keeps your latency promises",
        "simulate": "A load on hardware you may not have, through the real scheduler",
        "ray": "Serve on a Ray cluster: deploy, upgrade, status, delete",
        "deploy": "Launch lines, Kubernetes manifests, compose files, systemd units",
    },
}


class VerbGroup(TyperGroup):
    """The group of all verbs, whose help is the table."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        formatter.write(help_text(bold="NO_COLOR" not in os.environ))


def help_text(bold: bool) -> str:
    """`bold` codes are taken out again where the output is not a terminal (by click)."""
    width = max(len(verb) for verbs in GROUPS.values() for verb in verbs)
    lines = [f"tokenmill {__version__}: run, shrink, measure and deploy language models", ""]
    lines += ["Usage: tokenmill VERB [ARGUMENTS]", ""]
    for title, verbs in GROUPS.items():
        lines.append(typer.style(title, bold=True) if bold else title)
        lines += [f"  {verb:<{width}}  {purpose}" for verb, purpose in verbs.items()]
        lines.append("")
    lines.append("`tokenmill VERB --help` lists the options of a verb; every verb takes --json.")
    return "\n".join(lines) + "\n"
