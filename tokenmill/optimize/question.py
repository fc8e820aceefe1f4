"""What `tokenmill optimize` is asked: the model, the traffic, the limits and what the choice is compared with.

Refuses values that no run could answer. Knows nothing of how it is answered. Made by the command line, read by the job.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.optimize.candidates import STORED
from tokenmill.optimize.evidence import Limits
from tokenmill.optimize.loop import Effort
from tokenmill.optimize.objectives import Objectives
from tokenmill.optimize.traffic import TrafficRequest


@dataclass(frozen=True, slots=True)
class OptimizeJob:
    """`device`: empty for a GPU where one can be used. `today`: how it is served now, a command or a URL; empty: by our
    engine from the stored file. `rivals`: names, URLs, or "auto" for what is installed."""

    model: str
    out: Path
    target_cost: float = -0.6
    max_quality_loss: float = 0.01
    traffic: TrafficRequest = field(default_factory=TrafficRequest)
    price: float | None = None
    text: Path | None = None
    gpus: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()
    kv: tuple[str, ...] = ()
    effort: Effort = field(default_factory=Effort)
    engine: EngineConfig = field(default_factory=EngineConfig)
    restart: bool = False
    command: str = ""
    device: str = ""
    objectives: Objectives = field(default_factory=Objectives)
    tasks: tuple[Path, ...] = ()
    max_task_loss: float = 0.02
    max_kld: float | None = None
    today: str = ""
    rivals: tuple[str, ...] = ("auto",)
    quality_off: bool = False
    traffic_log: Path | None = None

    def __post_init__(self) -> None:
        if not -1 < self.target_cost <= 0:
            raise UserError(f"--target-cost is {self.target_cost:g}", "give a saving such as -60%")
        if not self.max_quality_loss >= 0:
            raise UserError(f"--max-quality-loss is {self.max_quality_loss:g}", "give 0 or more, such as 1%")
        if not self.max_task_loss >= 0:
            raise UserError(f"--max-task-loss is {self.max_task_loss:g}", "give 0 or more, such as 2%")
        if self.max_kld is not None and not self.max_kld >= 0:
            raise UserError(f"--max-kld is {self.max_kld:g}", "give 0 or more, such as 0.02")
        if self.effort.seconds <= 0 or self.effort.runs < 1:
            raise UserError("there is no time to measure in", "give --minutes and --runs above 0")
        if self.made_up and not self.quality_off:
            raise UserError("made-up weights (--load-format dummy) have no quality", "add --quality off: speed only")
        if self.made_up and set(self.candidates) - {STORED}:
            raise UserError(
                "--candidates with made-up weights (--load-format dummy): there are none to quantize to files",
                "leave it out: what the engine rounds to at load is tried",
            )

    @property
    def made_up(self) -> bool:
        """Weights of the shape in config.json: speed can be measured, quality cannot."""
        return self.engine.load_format == "dummy"

    @property
    def limits(self) -> Limits:
        return Limits(self.max_quality_loss, self.max_kld, self.max_task_loss)
