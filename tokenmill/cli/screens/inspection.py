"""The screen of `tokenmill inspect`: what a checkpoint is, what it needs, and which kernels run it here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.cli.render.screen import Bar, Cell, Facts, Result, Screen, Section, Table, left, right, shares
from tokenmill.cli.render.units import count, counted, percent, quantity, size

_REFERENCE = "ref"


def inspect_screen(result: Result) -> Screen:
    shapes = result["shapes"]
    headline = (
        f"{result['model']}: {result['architecture']}, {quantity(result['parameters'])} parameters, "
        f"{size(result['bytes'])} at {result['bits_per_weight']:.2f} bits per weight, "
        f"context of {count(shapes['context_length'])} tokens"
    )
    sections: list[Section] = [_model(result), _weights(result), _memory(result), _kernels(result)]
    if result.get("options"):
        sections.append(_options(result["options"]))
    return Screen(headline, "plain", sections, _declined(result))


def _model(result: Result) -> Facts:
    shapes, tokenizer = result["shapes"], result["tokenizer"]
    tied = "tied" if shapes.get("tie_embeddings") else "separate"
    heads = f"{shapes['num_heads']} heads of {shapes['head_dim']}, {shapes['num_kv_heads']} for keys and values"
    heads = heads if shapes["num_heads"] else "no attention"
    if result["kv_cache"].get("latent_layers"):
        heads = f"{shapes['num_heads']} heads over one latent row of {shapes['head_dim']} per token"
    chat = "with a chat template" if tokenizer["chat_template"] else "no chat template (a base model)"
    return Facts(
        "Model",
        [
            ("name", result["name"]),
            ("layers", f"{shapes['num_layers']} of width {count(shapes['hidden_size'])}; {heads}"),
            ("feed-forward", f"{count(shapes['intermediate_size'])} wide, {shapes['activation']}"),
            *([("experts", _experts(result["experts"]))] if result.get("experts") else []),
            ("tokenizer", f"{tokenizer['kind']}, {count(tokenizer['vocab_size'])} tokens, {chat}"),
            ("embeddings", f"{count(shapes['vocab_size'])} rows, input and output {tied}"),
            ("KV cache", _cache(result["kv_cache"])),
            ("file", Cell(f"{result['path']} ({result['source']})", "dim")),
        ],
    )


def _experts(experts: Mapping[str, Any]) -> str:
    text = (
        f"{experts['num_experts']} in each of {experts['layers']} layers, {experts['experts_per_token']} for a token; "
        f"{size(experts['bytes'])}"
    )
    if not experts["gpu_slots"]:
        return text
    held = f"{experts['gpu_slots']} of each layer at a time on the GPU ({size(experts['gpu_bytes'])})"
    return f"{text} in host memory, {held}"


def _weights(result: Result) -> Table:
    whole = max(1, result["bytes"])
    rows = [
        (
            each["type"],
            count(each["tensors"]),
            quantity(each["parameters"]),
            size(each["bytes"]),
            percent(each["bytes"] / whole),
            Bar(each["bytes"] / whole),
        )
        for each in result["weights"]
    ]
    columns = (left("weights"), right("tensors"), right("parameters"), right("size"), right("share"), left(""))
    return Table("Weights by type", columns, rows)


def _memory(result: Result) -> Table:
    kv = result["kv_cache"]
    return shares(
        f"Memory of one sequence of {count(kv['context'])} tokens",
        [
            ("weights", result["bytes"], size(result["bytes"]), "plain"),
            ("KV cache", kv["bytes_full_context"], size(kv["bytes_full_context"]), "plain"),
        ],
    )


def _cache(kv: Mapping[str, Any]) -> str:
    kinds = [f"{kv['full_layers']} layers of full attention"] if kv["full_layers"] else []
    if kv.get("latent_layers"):
        kinds.append(f"{kv['latent_layers']} layers of latent attention")
    if kv["sliding_layers"]:
        kinds.append(f"{kv['sliding_layers']} sliding over {count(kv['sliding_window'])} tokens")
    if kv["recurrent_layers"]:
        kinds.append(f"{kv['recurrent_layers']} recurrent with {size(kv['state_bytes'])} per sequence")
    pages = f"{size(kv['bytes_per_token'])} per token in pages of {kv['page_size']}"
    return f"{kv['dtype']}, {pages}; {', '.join(kinds)}"


def _kernels(result: Result) -> Table:
    by_kernel: dict[str, list[str]] = {}
    for each in result["kernels"]:
        by_kernel.setdefault(each["implementation"], []).append(each["op"])
    rows = [
        (Cell(name, "warning" if name.split()[0] == _REFERENCE else "good"), ", ".join(ops))
        for name, ops in by_kernel.items()
    ]
    executor = result["executor"]["chosen"]
    return Table(f"Computed here by the {executor} executor", (left("kernel"), left("operations")), rows)


def _options(options: Sequence[Mapping[str, Any]]) -> Table:
    """What is not left at its default, and who set it."""
    rows = [(each["name"].replace("_", "-"), str(each["value"]), Cell(each["source"], "dim")) for each in options]
    return Table("Options", (left("option"), left("value"), left("set by")), rows)


def _declined(result: Result) -> list[Cell]:
    """Why faster ones do not run, each reason once."""
    by_reason: dict[str, list[str]] = {}
    for each in result["kernels"]:
        for reason in each["declined"]:
            by_reason.setdefault(reason, []).append(each["op"])
    notes = [Cell(f"executor declined: {reason}", "dim") for reason in result["executor"]["declined"]]
    for reason, ops in by_reason.items():
        shown = ", ".join(ops[:3]) + (f" and {counted(len(ops) - 3, 'other')}" if len(ops) > 3 else "")
        notes.append(Cell(f"declined for {shown}: {reason}", "warning"))
    return notes
