"""The output directory: the winning model, serve.yaml, launch lines, results.json and report.html.

Also written for an interrupted run, with partial results. Called by the job.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

from tokenmill.checkpoint.sources.cache import write_json
from tokenmill.deploy.engines import ENGINES
from tokenmill.deploy.serving import Serving
from tokenmill.errors import UserError
from tokenmill.hardware.catalog import load_catalog
from tokenmill.optimize.report import render_report
from tokenmill.optimize.results import CandidateResult, Outcome

if TYPE_CHECKING:
    from tokenmill.optimize.setup import Setup as Search

REPORT, RESULTS, SERVE = "report.html", "results.json", "serve.yaml"
_OTHER_ENGINES = {"gguf": ("llamacpp", "ollama"), "directory": ("vllm", "sglang")}


def write_outputs(out: Path, outcome: Outcome, search: Search) -> None:
    """Fills `outcome.launch_lines` and `outcome.commands` on the way."""
    chosen = outcome.chosen or (outcome.baseline if outcome.state == "complete" else None)
    if chosen is not None and chosen.artefact is not None:
        model = _place_model(out, Path(chosen.artefact.path))
        _write_serve(out / SERVE, chosen, search)
        outcome.launch_lines = launch_lines(out, model, chosen, search)
        (out / "launch.txt").write_text(
            "".join(f"# {engine}\n{line}\n" for engine, line in outcome.launch_lines.items()), encoding="utf-8"
        )
    outcome.commands = [*outcome.commands, *_reproduction(outcome, search)]
    write_json(out / RESULTS, plain(outcome))
    (out / REPORT).write_text(render_report(outcome), encoding="utf-8")


def plain(outcome: Outcome) -> Any:
    """The outcome as JSON values; NaN and infinity become null."""
    content = asdict(outcome)
    content |= {
        "cost_reduction": outcome.cost_reduction,
        "quality_loss": outcome.quality_loss,
        "target_met": outcome.target_met,
    }
    return _finite(content)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def _place_model(out: Path, artefact: Path) -> Path:
    """A hard link where the disk allows it, else a copy: the directory can be moved as a whole."""
    model = out / ("model.gguf" if artefact.is_file() else "model")
    for old in (out / "model.gguf", out / "model"):
        if old.is_dir():
            shutil.rmtree(old)
        old.unlink(missing_ok=True)
    if artefact.is_dir():
        shutil.copytree(artefact, model, copy_function=_link)
    else:
        _link(str(artefact), str(model))
    return model


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def _write_serve(path: Path, chosen: CandidateResult, search: Search) -> None:
    engine = search.engine
    settings: dict[str, Any] = {
        "context": min(8192, search.artefacts.checkpoint.description.context_length),
        "concurrency": engine.concurrency,
        "batch-tokens": chosen.batch_tokens,
        "kv-cache-dtype": chosen.kv,
        "prefix-caching": engine.prefix_caching,
        "speculate": chosen.speculate,
    }
    if engine.threads:
        settings["threads"] = engine.threads
    path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")


def launch_lines(out: Path, model: Path, chosen: CandidateResult, search: Search) -> dict[str, str]:
    """Launch line of this engine, and of the other engines that read the format."""
    lines = {"tokenmill": f"tokenmill serve {model} --config {out / SERVE}"}
    name = re.sub(r"[^a-z0-9]+", "-", f"{search.artefacts.source.stem}-{chosen.weights}".lower()).strip("-")
    serving = Serving(
        model=str(model),
        name=name,
        device=load_catalog().find_device("neoverse-n1"),
        weights=chosen.weights,
        stored=chosen.weights,
        max_sequences=search.engine.decided("concurrency"),
        batch_tokens=chosen.batch_tokens,
        context=min(8192, search.artefacts.checkpoint.description.context_length),
        weight_bytes=chosen.artefact.nbytes if chosen.artefact else 0,
        users=search.engine.decided("concurrency"),
    )
    for engine in _OTHER_ENGINES["gguf" if model.is_file() else "directory"]:
        try:
            launch = ENGINES.get(engine)().launch(serving)
        except UserError:
            continue  # it does not read this format, or not on a CPU
        lines[engine] = " && ".join([*launch.prepare, " ".join(launch.command)])
    return lines


def _reproduction(outcome: Outcome, search: Search) -> list[str]:
    """Commands that make and measure the chosen candidate by hand."""
    chosen, baseline = outcome.chosen, outcome.baseline
    if chosen is None or baseline is None or chosen.artefact is None or baseline.artefact is None:
        return []
    made, base = (each.artefact.command.rpartition("--out ")[2] for each in (chosen, baseline) if each.artefact)
    model = outcome.model if made.startswith("tokenmill pull") else made
    text = outcome.workload
    flags = f"--concurrency {text['concurrency']} --input-len {search.traffic.input_tokens}"
    flags += f" --output-len {search.traffic.output_tokens} --num-prompts {2 * text['concurrency']}"
    return [
        baseline.artefact.command,
        chosen.artefact.command,
        f"tokenmill eval divergence {model} --reference {base} --text TEXT --context {search.effort.context}",
        *(
            f"tokenmill bench throughput {each} {flags} --kv-cache-dtype {result.kv}"
            f" --batch-tokens {result.batch_tokens} --speculate {result.speculate}"
            for each, result in ((base, baseline), (model, chosen))
        ),
    ]
