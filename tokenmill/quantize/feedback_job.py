"""Every block of a model in given ggml types, with error feedback: each matrix sees its predecessors as stored, and
makes good for what they lost (methods/drift.py).

The result is bytes by linear, for the export to write. Called by gguf_job.py for `mixed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tokenmill.quantize.calibrate import CalibratedBlock, HiddenStates
from tokenmill.quantize.ggml.blocks import dequantize, quantize
from tokenmill.quantize.ggml.feedback import FEEDBACK_TYPES, FeedbackFactor
from tokenmill.quantize.methods.drift import undrifted
from tokenmill.quantize.source import SourceModel


@torch.no_grad()
def pack_with_feedback(
    source: SourceModel,
    type_of: Mapping[str, str],
    stored: Mapping[str, str],
    states: HiddenStates,
    device: torch.device,
    tapes: bool,
    progress: Callable[[int, int], None],
) -> dict[str, Tensor]:
    """Linear -> bytes [out, bytes per row], rows in Hugging Face's order. `stored`: types in which the source already
    holds a linear; those bytes are copied by the export."""
    packed: dict[str, Tensor] = {}
    float_states = HiddenStates(states.values.clone(), states.batch)
    for index in range(source.num_blocks):
        block = CalibratedBlock(source, index, states, device, float_states, tapes)
        block.begin_rounding()
        for group in block.groups:
            names = [name for name in group.names if name in type_of and stored.get(name) != type_of[name]]
            factor, weights = None, {name: block.weight(name) for name in names}
            if any(type_of[name] in FEEDBACK_TYPES for name in names):
                statistics, drift = block.statistics_beside_float(group)
                factor = _factor(statistics.hessian)
                weights = weights if drift is None else undrifted(weights, drift)
            for name, weight in weights.items():
                weight = weight.cpu()
                if factor is None or type_of[name] not in FEEDBACK_TYPES:
                    importance = None if factor is None else factor.importance
                    packed[name] = quantize(type_of[name], weight, importance)
                else:
                    packed[name] = factor.quantize(type_of[name], weight)
                block.replace(name, dequantize(type_of[name], packed[name]).to(device))
        block.advance_float()
        block.advance()
        progress(index + 1, source.num_blocks)
    return packed


def _factor(hessian: Tensor | None) -> FeedbackFactor | None:
    return None if hessian is None or not bool(hessian.diagonal().any()) else FeedbackFactor(hessian.cpu())
