"""The server that a traffic log tells of: its configuration, its KV memory and the times of its steps.

Reads `server.json` and `steps.jsonl`, which the engine process writes beside the requests (engine/step_log.py). A cost
model is fitted to the logged steps, so a log can be replayed on any machine. Called by the twin; simulates nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenmill.engine.step_log import SERVER_FILE, STEPS_FILE, VERSION
from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import KVGroup, KVLayout
from tokenmill.plan.cost.measured_cost import FEATURES, MeasuredCost, TimedStep, fit_cost, fit_error
from tokenmill.plan.cost.this_machine import load_calibration
from tokenmill.plan.simulate.engine_shape import EngineShape

_REMEDY = "record one with `tokenmill serve MODEL --traffic-log DIR`"
_MIN_STEPS = 20 * len(FEATURES)
_MAX_FITTED = 50_000


@dataclass(frozen=True, slots=True)
class LoggedStep:
    unix: float  # when it began
    step: TimedStep


@dataclass(frozen=True, slots=True)
class FittedSteps:
    """A cost model and what it rests on."""

    cost: MeasuredCost
    basis: str
    error: float  # median over the steps


@dataclass(frozen=True, slots=True)
class LoggedServer:
    model: str
    name: str
    device: str
    started: str
    config: Mapping[str, Any]  # EngineConfig as it was resolved
    groups: tuple[tuple[str, int, tuple[int, ...]], ...]  # kind, window, layers
    num_pages: int
    steps: Sequence[LoggedStep] = field(default=(), repr=False)

    def shape(self) -> EngineShape:
        c = self.config
        groups = tuple(KVGroup(kind, window, tuple(layers)) for kind, window, layers in self.groups)
        layout = KVLayout(int(c["page_size"]), max(len(group.layers) for group in groups), 1, 1, groups)
        return EngineShape(
            layout,
            self.num_pages,
            int(c["batch_tokens"]),
            int(c["concurrency"]),
            int(c["context"]),
            str(c.get("scheduling", "fcfs")),
            str(c.get("kv_policy", "lru")),
            float(c.get("itl", 0.0)),
        )

    def fit(self, until_unix: float = float("inf")) -> FittedSteps:
        """By the steps that began before `until_unix`, or by this machine's calibration where too few were logged."""
        steps = [each.step for each in self.steps if each.unix <= until_unix][-_MAX_FITTED:]
        if len(steps) >= _MIN_STEPS:
            cost = fit_cost(steps, whole=True)
            day = self.started[:10]
            return FittedSteps(cost, f"{len(steps)} steps that the server logged, {day}", fit_error(cost, steps))
        calibration = load_calibration()
        for name, measured in (calibration.models if calibration else {}).items():
            if name in (self.model, self.name) or Path(name).name == Path(self.model).name:
                assert calibration is not None
                basis = f"plan --calibrate with {name}, {measured.date or calibration.date}"
                return FittedSteps(measured.cost, basis, measured.fit_error)
        raise UserError(
            f"the log has {len(steps)} timed steps, and {self.name or self.model} is not measured on this machine",
            f"log at least {_MIN_STEPS} steps, or run: tokenmill plan {self.model} --calibrate",
        )


def read_server(folder: Path) -> LoggedServer:
    try:
        facts = json.loads((folder / SERVER_FILE).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {folder / SERVER_FILE}: {error.strerror}", _REMEDY) from None
    except ValueError:
        raise UserError(f"{folder / SERVER_FILE} is damaged", _REMEDY) from None
    try:
        if facts["version"] > VERSION:
            raise UserError(f"{folder / SERVER_FILE} is of version {facts['version']}", "upgrade tokenmill")
        groups = tuple((str(kind), int(window), tuple(layers)) for kind, window, layers in facts["groups"])
        server = LoggedServer(
            str(facts["model"]),
            str(facts["name"]),
            str(facts["device"]),
            str(facts["started"]),
            dict(facts["config"]),
            groups,
            int(facts["num_pages"]),
            tuple(_read_steps(folder / STEPS_FILE)),
        )
        server.shape()
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / SERVER_FILE} lacks or misstates {error}", _REMEDY) from None
    return server


def _read_steps(path: Path) -> list[LoggedStep]:
    """Steps of the last engine that wrote here; an earlier one may have had another configuration. A line that was cut
    is skipped."""
    steps: list[LoggedStep] = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return []
    for line in lines:
        try:
            row = json.loads(line)
            if isinstance(row, dict):
                steps = []
                continue
            unix, ms, count, context, *rest = row
            chunks = tuple(zip(rest[::2], rest[1::2], strict=True))
            if ms > 0 and (count or chunks):
                steps.append(LoggedStep(float(unix), TimedStep(chunks, int(count), int(context), float(ms))))
        except (ValueError, TypeError):
            continue
    return steps
