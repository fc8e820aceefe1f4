"""The engine that `plan --calibrate` measured on this machine, as one that can be simulated.

Turns a stored calibration (cost/this_machine.py) into an engine shape and a cost model. Measures nothing.
"""

from __future__ import annotations

from tokenmill.hardware.kv_layout import KVGroup, KVLayout
from tokenmill.plan.cost.this_machine import ModelCalibration, model_calibration
from tokenmill.plan.simulate.engine_shape import EngineShape
from tokenmill.plan.simulate.job import SimulatedEngine


def calibrated_engine(calibration: ModelCalibration) -> SimulatedEngine:
    c = calibration
    groups = tuple(KVGroup(kind, window, tuple(layers)) for kind, window, layers in c.groups)
    layout = KVLayout(c.page_size, max(len(group.layers) for group in groups), 1, 1, groups)
    shape = EngineShape(layout, c.num_pages, c.batch_tokens, c.max_running, c.context)
    return SimulatedEngine(shape, c.cost, c.request_ms)


def measured_engine(model: str) -> SimulatedEngine:
    """The engine as it was measured here with this model; refused where it was not."""
    return calibrated_engine(model_calibration(model))
