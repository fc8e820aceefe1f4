"""Makes the engine of a model: one process, or several that share its requests. Called by the server and run-batch."""

from __future__ import annotations

from pathlib import Path

from tokenmill.checkpoint.read_ahead import read_ahead
from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.supervision.engine import Engine, Grouping
from tokenmill.serve.supervision.engine_client import EngineClient
from tokenmill.serve.supervision.spare import SpareEngine
from tokenmill.serve.supervision.startup import StartupReport


def make_engine(
    path: Path,
    config: ServeConfig,
    engine_config: EngineConfig,
    report: StartupReport,
    spare: SpareEngine | None = None,
    grouping: Grouping | None = None,
) -> Engine:
    """`spare`: shared with other models. The weights are on their way when the process opens them."""
    if config.read_ahead:
        read_ahead(path)
    steps = str(Path(config.traffic_log).expanduser()) if config.traffic_log else ""
    count = engine_config.data_parallel_size
    if count > 1 and (engine_config.kv_listen or engine_config.kv_peer):
        raise UserError("engines that share requests have no address for KV pages", "leave out --data-parallel-size")
    if count > 1 and grouping is None:
        raise UserError("--data-parallel-size is for serve and LLM", "leave it out")
    engines = [
        EngineClient(
            path,
            engine_config,
            config.stall_timeout,
            report.phase,
            config.spare_engine,
            steps,
            bool(config.price),
            spare,
        )
        for _ in range(count)
    ]
    return engines[0] if grouping is None or count == 1 else grouping(engines)
