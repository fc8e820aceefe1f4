"""The matrices of a block with recurrent layers: which share an input, and which stay as they are.

Large projections are quantized like any other. Those that make time steps and gates stay float32: they are small, and
an error in a decay grows with the length of the text. So do convolutions and the parameters of states, which are no
matrices. Used by source.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from tokenmill.model.architectures.hybrid import HybridBlock, HybridExperts, HybridMLP
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.layers.attention import SelfAttention
from tokenmill.model.layers.experts import Experts
from tokenmill.model.layers.norm import Norm
from tokenmill.model.layers.recurrent import GatedDeltaRule, Mamba, Mamba2, RecurrentMixer
from tokenmill.quantize.base import LinearGroup

_LARGE = 1 << 20  # weights from which on Mamba's projection to time steps, B and C is worth quantizing
Name = Callable[[object], str]


def kept_weights(block: HybridBlock) -> list[LinearWeight]:
    """Matrices of mixers that stay float32, and routers."""
    kept: list[LinearWeight] = []
    for mixer in block.mixers:
        if isinstance(mixer, Mamba):
            kept += [weight for weight in (mixer.steps, mixer.time) if weight is mixer.time or not _is_large(weight)]
        elif isinstance(mixer, GatedDeltaRule):
            kept += _gates(mixer)
    experts = _experts(block)
    if experts is not None:
        gate = None if experts.shared is None else experts.shared.gate
        kept += [weight for weight in (experts.router, gate) if weight is not None]
    return kept


def hybrid_groups(
    block: HybridBlock, name: Name, expert_groups: Callable[[Experts], list[LinearGroup]]
) -> list[LinearGroup]:
    """In the order of the forward pass. `name`: of a linear or a norm; `expert_groups`: of a layer of experts."""
    # A norm can take a scale of its outputs only where all that read it are scaled back.
    alone = len(block.mixers) == 1
    groups = [
        group for mixer in block.mixers for group in _mixer_groups(mixer, block.mixer_norm if alone else None, name)
    ]
    mlp = block.mlp
    if isinstance(mlp, HybridExperts):
        groups += expert_groups(mlp.experts)
        if mlp.shared is not None:
            groups += _mlp_groups(mlp.shared, None, name)
    elif mlp is not None:
        groups += _mlp_groups(mlp, block.mlp_norm, name)
    return groups


def _mixer_groups(mixer: RecurrentMixer, norm: Norm | None, name: Name) -> Iterator[LinearGroup]:
    if isinstance(mixer, SelfAttention):
        yield _group(mixer.inputs, norm, name)
        if mixer.output_gate:  # it lies between the values and the output
            yield _group([mixer.output], None, name)
        else:
            repeats = mixer.spec.num_heads // mixer.spec.num_kv_heads
            yield LinearGroup((name(mixer.output),), name(mixer.inputs[2]), False, repeats)
    elif isinstance(mixer, Mamba):
        yield _group([mixer.input], norm, name)
        if _is_large(mixer.steps):
            yield _group([mixer.steps], None, name)
        yield _group([mixer.output], None, name)
    elif isinstance(mixer, Mamba2):
        yield _group([mixer.input], norm, name)
        yield _group([mixer.output], None, name)
    else:
        assert isinstance(mixer, GatedDeltaRule)
        gates = _gates(mixer)  # they read the norm too
        yield _group([weight for weight in mixer.inputs if all(weight is not gate for gate in gates)], None, name)
        yield _group([mixer.output], None, name)


def _mlp_groups(mlp: HybridMLP, norm: Norm | None, name: Name) -> Iterator[LinearGroup]:
    yield _group(mlp.inputs, norm, name)
    up = name(mlp.inputs[1]) if len(mlp.inputs) == 2 else None
    yield LinearGroup((name(mlp.output),), up, False)


def _group(weights: Sequence[LinearWeight], norm: Norm | None, name: Name) -> LinearGroup:
    source: Tensor | None = None if norm is None or norm.bias is not None else norm.weight
    return LinearGroup(tuple(map(name, weights)), None if source is None else name(source), source is not None)


def _gates(mixer: GatedDeltaRule) -> list[LinearWeight]:
    """The inputs behind q, k, v and z: decays and weights of updates, a row or two for each head."""
    large = ("qkvz", "qkv", "z")
    return [weight for name, weight in zip(mixer.input_names, mixer.inputs, strict=True) if name not in large]


def _experts(block: HybridBlock) -> Experts | None:
    return block.mlp.experts if isinstance(block.mlp, HybridExperts) else None


def _is_large(weight: LinearWeight) -> bool:
    return weight.out_features * weight.in_features >= _LARGE
