"""Mamba in GGUF (architectures `mamba` and `mamba2`): its metadata both ways, tensor names, and how its tensors lie.

Files hold decays as they multiply (Hugging Face: the logarithm of their negatives), convolutions without the axis of
length one, and of Mamba 2 the numbers by head as columns and the norm by group. Used by gguf_description.py,
gguf_export.py, gguf_names.py and gguf.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.fields import Fields
from tokenmill.checkpoint.gguf_writer import Value
from tokenmill.checkpoint.mixers import Recurrent
from tokenmill.errors import CheckpointError

_MIXER = "mixer"
LAYER_NAMES = {
    "ssm_in": f"{_MIXER}.in_proj",
    "ssm_conv1d": f"{_MIXER}.conv1d",
    "ssm_x": f"{_MIXER}.x_proj",
    "ssm_dt": f"{_MIXER}.dt_proj",
    "ssm_norm": f"{_MIXER}.norm",
    "ssm_out": f"{_MIXER}.out_proj",
}
# Whole names. Mamba 2 has no matrix of time steps, only their bias.
_TENSORS = {"ssm_a": f"{_MIXER}.A", "ssm_d": f"{_MIXER}.D"}
_TENSOR_NAMES = {"mamba": _TENSORS, "mamba2": {**_TENSORS, "ssm_dt.bias": f"{_MIXER}.dt_bias"}}
_CONVOLUTION, _DECAYS, _LOG_DECAYS = f".{_MIXER}.conv1d.weight", f".{_MIXER}.A", f".{_MIXER}.A_log"
_SKIP, _NORM = f".{_MIXER}.D", f".{_MIXER}.norm.weight"


def tensor_names(stored_as: str) -> dict[str, str]:
    """Short name -> canonical name of the parts of a layer whose names have no ending of a matrix or bias."""
    return _TENSOR_NAMES.get(stored_as, {})


def read_mixer(fields: Fields, style: str, hidden_size: int) -> Recurrent:
    """llama.cpp has biases of convolutions, and none of projections."""
    inner, convolution = fields.integer("ssm.inner_size"), fields.integer("ssm.conv_kernel")
    state_size, rank = fields.integer("ssm.state_size"), fields.integer("ssm.time_step_rank")
    if style == "mamba":
        if inner != 2 * hidden_size:
            raise fields.error(f"'ssm.inner_size' is {inner}, Mamba's is twice the hidden size {hidden_size}")
        norms = "plain" if fields.flag("ssm.dt_b_c_rms", False) else ""
        return Recurrent(style, convolution, inner, state_size, rank, convolution_bias=True, step_norms=norms)
    groups = fields.integer("ssm.group_count")
    if inner % rank or inner % groups or rank % groups:
        raise fields.error(
            f"'ssm.inner_size' = {inner}, 'ssm.time_step_rank' = {rank} heads and 'ssm.group_count' = {groups} do not "
            "divide"
        )
    return Recurrent(style, convolution, inner, state_size, num_heads=rank, num_groups=groups, convolution_bias=True)


def architecture_of(mixer: Recurrent) -> str:
    """Falcon-Mamba is stored as Mamba with norms of time steps, B and C."""
    return "falcon_mamba" if mixer.step_norms else mixer.style


def values(d: ModelDescription) -> dict[str, Value]:
    """The keys of the file beyond those that all architectures have; llama.cpp asks for those of attention too."""
    (m,) = d.layers[0].mixers
    assert isinstance(m, Recurrent)
    if m.style == "mamba" and m.inner != 2 * d.hidden_size:
        raise CheckpointError(
            f"llama.cpp has Mamba with twice the hidden size only, this one has {m.inner} of {d.hidden_size}",
            "choose a safetensors format",
        )
    found: dict[str, Value] = {
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.head_count_kv": 0,
        "ssm.conv_kernel": m.convolution,
        "ssm.inner_size": m.inner,
        "ssm.state_size": m.state_size,
        "ssm.time_step_rank": m.rank or m.num_heads,
    }
    if m.style == "mamba2":
        return {**found, "ssm.group_count": m.num_groups}
    return {**found, "ssm.dt_b_c_rms": m.step_norms == "plain"}


def exported(name: str, shape: tuple[int, ...], d: ModelDescription) -> list[tuple[str, tuple[int, ...]]]:
    """(canonical name, shape in the file) of a tensor of a recurrent mixer; empty for others."""
    (m, *_) = d.layers[0].mixers
    if not isinstance(m, Recurrent):
        return []
    by_head = m.style == "mamba2"
    if name.endswith(_CONVOLUTION):
        return [(name, (m.convolved if by_head else m.inner, m.convolution))]
    if name.endswith((_LOG_DECAYS, _DECAYS)):
        decays = (m.num_heads, 1) if by_head else (m.inner, m.state_size)
        return [(name.removesuffix(_LOG_DECAYS).removesuffix(_DECAYS) + _DECAYS, decays)]
    if by_head and name.endswith(_SKIP):
        return [(name, (m.num_heads, 1))]
    if by_head and name.endswith(_NORM):
        return [(name, (m.num_groups, m.inner // m.num_groups))]
    return [(name, shape)]


def is_log_decays(name: str) -> bool:
    return name.endswith(_LOG_DECAYS)


def is_decays(name: str) -> bool:
    return name.endswith(_DECAYS)


def stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a tensor by its canonical name: convolutions as Hugging Face has them, [channels, 1, width]."""
    return (shape[0], 1, shape[1]) if name.endswith(_CONVOLUTION) and len(shape) == 2 else shape


def telling_shapes(d: ModelDescription) -> Mapping[str, tuple[int, ...]]:
    """Tensors from whose presence the reader learns what the metadata does not say."""
    return {} if d.tie_embeddings else {"lm_head.weight": (d.vocab_size, d.hidden_size)}
