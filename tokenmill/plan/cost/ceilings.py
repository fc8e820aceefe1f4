"""What the hardware allows: the single-stream ceiling, the arithmetic of a prompt, the bare cost of tokens.

Short closed forms (F13, F15 and the refusal of impossible promises). No queueing, no tables; the real estimate is
performance.py's.
"""

from __future__ import annotations

from functools import lru_cache

from tokenmill.errors import UserError
from tokenmill.hardware.catalog import Device
from tokenmill.hardware.weight_formats import WeightFormat, weight_bytes
from tokenmill.plan.question.planned_model import PlannedModel


@lru_cache(1 << 10)
def bytes_read_per_token(model: PlannedModel, weights: WeightFormat) -> float:
    """Weights that one decoded token at batch 1 must read: everything but the embedding table and idle experts."""
    tensors = []
    for kind in model.layers:
        for matrix in kind.matrices():
            tensors.append((kind.count * matrix.parameters * kind.share(matrix), matrix.part, matrix.split))
    tensors.append((float(model.hidden_size * model.vocab_size), "head", "column"))
    return weight_bytes(tensors, weights)


def decode_ceiling(model: PlannedModel, weights: WeightFormat, device: Device, devices: int = 1) -> float:
    """Tokens per second of one stream that no engine can exceed without speculation."""
    return device.bandwidth_gb_s * 1e9 * devices / bytes_read_per_token(model, weights)


def prefill_flops(parameters: float, tokens: int, layers: int = 0, width: int = 0) -> float:
    """2 N per token (not 6 N, which is training), plus causal attention over `width` = heads x head_dim."""
    return 2.0 * parameters * tokens + 2.0 * layers * width * tokens * tokens


def dollars_per_million(
    dollars_per_hour: float, tokens_per_second: float, utilization: float = 1.0, overhead: float = 0.0
) -> float:
    """F15: what a million tokens cost at this throughput and load."""
    if dollars_per_hour < 0:
        raise UserError(f"a price of {dollars_per_hour} $ per hour is negative", "give a price of at least 0")
    if tokens_per_second <= 0 or not 0 < utilization <= 1:
        raise UserError("cost needs a throughput above 0 and a utilization in (0, 1]", "correct them")
    return 1e6 * dollars_per_hour * (1.0 + overhead) / (3600.0 * tokens_per_second * utilization)
