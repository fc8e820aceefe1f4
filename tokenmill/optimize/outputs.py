"""The output directory: the winning model, its settings and manifests, launch lines, results.json and report.html.

Also written for an interrupted run, with partial results. Knows the outcome and a few facts of the workload, not how
anything was measured. Called by the job.
"""

from __future__ import annotations

import math
import os
import platform
import re
import shlex
import shutil
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tokenmill import __version__
from tokenmill.checkpoint.sources.cache import write_json
from tokenmill.config import EngineConfig
from tokenmill.deploy.engines import ENGINES
from tokenmill.deploy.engines.base import WEIGHTS_FOLDER, Launch
from tokenmill.deploy.engines.tokenmill import Tokenmill
from tokenmill.deploy.probes import FILES_FOLDER
from tokenmill.deploy.render import render
from tokenmill.deploy.serving import SHUTDOWN_SECONDS, Serving, object_name
from tokenmill.errors import UserError
from tokenmill.hardware.catalog import Device, load_catalog
from tokenmill.hardware.device_price import this_device
from tokenmill.hardware.machine import detect_machine
from tokenmill.optimize.report import render_report
from tokenmill.optimize.results import Artefact, CandidateResult, Outcome
from tokenmill.optimize.summary import REPORT, RESULTS
from tokenmill.optimize.wording import MADE_UP, not_shown

SERVE = "serve.yaml"
_LAUNCHES = "launch.txt"
_DRAFTER = "drafter"
_OTHER_ENGINES = {"gguf": ("llamacpp", "ollama"), "directory": ("vllm", "sglang")}
_PACKAGES = ("torch", "triton", "numpy", "transformers")
_MAX_CONTEXT = 8192
_DUMMY = ["--load-format", "dummy"]


@dataclass(frozen=True, slots=True)
class Workload:
    """What the outputs need to know of the run beside its outcome."""

    engine: EngineConfig  # with the workload's concurrency
    context_length: int  # of the model
    input_tokens: int  # mean
    output_tokens: int
    quality_context: int  # tokens in a window of text
    drafter: Path | None = None  # folder of the head that was trained for the choice


def write_outputs(out: Path, outcome: Outcome, workload: Workload) -> None:
    """Fills `outcome.launch_lines`, `files`, `commands`, `versions` and `date` on the way."""
    chosen = outcome.chosen or (outcome.baseline if outcome.state == "complete" else None)
    if chosen is not None and chosen.artefact is not None:
        model = _place_model(out, Path(chosen.artefact.path))
        device = this_device(load_catalog(), detect_machine(), outcome.device)
        dummy = _DUMMY if outcome.made_up else []
        settings = _serve_settings(chosen, workload, _place_drafter(out, workload.drafter))
        note = f"# {MADE_UP}\n" if dummy else ""
        settings = note + settings
        outcome.files = {SERVE: settings}
        outcome.launch_lines = {
            "tokenmill": shlex.join(["tokenmill", "serve", str(model), "--config", str(out / SERVE), *dummy])
        }
        if device is not None:
            serving = _serving(outcome, model, chosen, workload, device)
            outcome.launch_lines |= {} if dummy else _other_launches(serving, model, chosen.kv)
            outcome.files |= _manifests(serving, model, settings, note)
        lines = (f"# {engine}\n{line}\n" for engine, line in outcome.launch_lines.items())
        _write_files(out, outcome.files | {_LAUNCHES: note + "".join(lines)})
    outcome.commands = [*outcome.commands, *_reproduction(outcome, workload)]
    rivals = {each.engine: each.engine_version for each in outcome.rivals if each.engine_version}
    outcome.versions = _versions() | rivals | outcome.versions
    outcome.date = datetime.now().astimezone().isoformat(timespec="seconds")
    write_json(out / RESULTS, plain(outcome))
    (out / REPORT).write_text(render_report(outcome), encoding="utf-8")


def plain(outcome: Outcome) -> Any:
    """The outcome as JSON values; NaN and infinity become null."""
    content = asdict(outcome)
    winner = outcome.winner
    content |= {
        "cost_reduction": outcome.cost_reduction,
        "cost_reduction_today": outcome.cost_reduction_today,
        "saving": asdict(outcome.saving) if outcome.saving else None,
        "saving_today": asdict(outcome.saving_today) if outcome.saving_today else None,
        "quality_loss": outcome.quality_loss,
        "target_met": outcome.target_met,
        "objective_met": outcome.objective_met,
        "winner": None if winner is None else {"name": winner.name, "engine": winner.engine},
        "not_shown": not_shown(outcome),
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


def _versions() -> dict[str, str]:
    """Of what computes, without importing it."""
    found = {"tokenmill": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _place_model(out: Path, artefact: Path) -> Path:
    """A hard link where the disk allows it, else a copy: the directory can be moved as a whole."""
    model = out / ("model.gguf" if artefact.is_file() else "model")
    for old in (out / "model.gguf", out / "model"):
        if old.is_dir():
            shutil.rmtree(old)
        old.unlink(missing_ok=True)
    if artefact.is_dir():
        model.mkdir()
        for file in filter(Path.is_file, artefact.iterdir()):  # not its folders: --out may be one of them
            _link(str(file), str(model / file.name))
    else:
        _link(str(artefact), str(model))
    return model


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def _write_files(out: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text, encoding="utf-8")


def _place_drafter(out: Path, folder: Path | None) -> str:
    """The argument of --speculate, empty without a trained drafter."""
    if folder is None:
        return ""
    placed = out / _DRAFTER
    shutil.rmtree(placed, ignore_errors=True)
    shutil.copytree(folder, placed)
    return str(placed)


def _serve_settings(chosen: CandidateResult, workload: Workload, drafter: str = "") -> str:
    engine = workload.engine
    settings: dict[str, Any] = {
        "context": min(_MAX_CONTEXT, workload.context_length),
        "concurrency": engine.concurrency,
        "batch-tokens": chosen.batch_tokens,
        "kv-cache-dtype": chosen.kv,
        "prefix-caching": engine.prefix_caching,
        "speculate": f"{chosen.speculate}:{drafter}" if drafter else chosen.speculate,
    }
    settings |= {name.replace("_", "-"): value for name, value in chosen.options.items()}
    if engine.load_format != "auto":
        settings["load-format"] = engine.load_format
    if engine.threads:
        settings["threads"] = engine.threads
    text: str = yaml.safe_dump(settings, sort_keys=False)
    return text


def _serving(outcome: Outcome, model: Path, chosen: CandidateResult, workload: Workload, device: Device) -> Serving:
    """The chosen artefact in the words of `deploy`: it lies there already, so nothing is quantized at the start."""
    sequences = workload.engine.decided("concurrency")
    return Serving(
        model=str(model),
        name=object_name(f"{Path(outcome.source).stem}-{chosen.weights}"),
        device=device,
        weights=chosen.weights,
        stored=chosen.weights,
        max_sequences=sequences,
        batch_tokens=chosen.batch_tokens,
        context=min(_MAX_CONTEXT, workload.context_length),
        weight_bytes=chosen.artefact.nbytes if chosen.artefact else 0,
        users=sequences,
    )


def _other_launches(serving: Serving, model: Path, kv: str) -> dict[str, str]:
    """Launch lines of the other engines that read the format. A KV dtype that only this engine has becomes 16 bits."""
    bits = _kv_bits(kv)
    serving = replace(serving, kv_bits=bits or 16.0)
    lines = {}
    for engine in _OTHER_ENGINES["gguf" if model.is_file() else "directory"]:
        try:
            launch = ENGINES.get(engine)().launch(serving)
        except UserError:
            continue  # it does not read this format, or not on this device
        label = engine if bits else f"{engine} (16-bit KV: it has no {kv})"
        lines[label] = " && ".join([*launch.prepare, shlex.join(launch.command)])
    return lines


def _kv_bits(name: str) -> float | None:
    """Bits of a KV dtype that other engines have too; None: of this engine alone."""
    if name in ("auto", "float32", "float16", "bfloat16"):
        return 16.0
    match = re.match(r"(?:fp|int)(\d+)", name)
    return float(match[1]) if match else None


class _ProvenTokenmill(Tokenmill):
    """This engine, started with the settings that were measured and nothing else."""

    def __init__(self, settings: str) -> None:
        self._settings = settings

    def launch(self, serving: Serving, role: str = "") -> Launch:
        super().launch(serving, role)  # refuses devices that it is not deployed on
        command = ["tokenmill", "serve", serving.model, "--config", f"{FILES_FOLDER}/{SERVE}"]
        command += ["--host", "0.0.0.0", "--port", str(self.port), "--served-model-name", serving.name]
        command += ["--shutdown-timeout", str(SHUTDOWN_SECONDS)]
        return Launch(tuple(command), files={SERVE: self._settings})


def _manifests(serving: Serving, model: Path, settings: str, first: str = "") -> dict[str, str]:
    """Kubernetes objects for this engine; the model is expected in the volume of weights, under its own name."""
    placed = replace(serving, model=f"{WEIGHTS_FOLDER}/{model.name}")
    try:
        found = render("kubernetes", _ProvenTokenmill(settings), placed)
    except UserError:
        return {}  # this engine is not deployed on this device
    note = f"{first}# Copy {model.name} of this folder into the volume {serving.name}-weights first.\n"
    return {f"kubernetes/{name}": note + text if name == "serving.yaml" else text for name, text in found.files.items()}


def _reproduction(outcome: Outcome, workload: Workload) -> list[str]:
    """Commands that make and measure the chosen candidate by hand."""
    chosen, baseline = outcome.chosen, outcome.baseline
    if chosen is None or baseline is None or chosen.artefact is None or baseline.artefact is None:
        return []
    model, base = (_made(each.artefact, outcome.model) for each in (chosen, baseline) if each.artefact)
    dummy = _DUMMY if outcome.made_up else []
    concurrency = workload.engine.decided("concurrency")
    flags = f"--concurrency {concurrency} --input-len {workload.input_tokens}"
    flags += f" --output-len {workload.output_tokens} --num-prompts {2 * concurrency}"
    quality = f"tokenmill eval divergence {model} --reference {base} --text TEXT --context {workload.quality_context}"
    return [
        *filter(None, dict.fromkeys((baseline.artefact.command, chosen.artefact.command))),
        *([] if outcome.quality_off else [quality]),
        *(
            f"tokenmill bench throughput {each} {flags} --kv-cache-dtype {result.kv}"
            f" --batch-tokens {result.batch_tokens} --speculate {result.speculate}{_options(result, dummy)}"
            for each, result in ((base, baseline), (model, chosen))
        ),
    ]


def _made(artefact: Artefact, model: str) -> str:
    """What the artefact's command makes; the model itself where nothing is made of it."""
    _, made, name = artefact.command.rpartition("--out ")
    return name if made else model


def _options(result: CandidateResult, more: list[str]) -> str:
    """The further settings of a candidate as flags."""
    flags = list(more)
    for name, value in result.options.items():
        flag = name.replace("_", "-")
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return "".join(f" {word}" for word in flags)
