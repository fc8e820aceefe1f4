"""Mamba in GGUF (architectures `mamba` and `mamba2`, and in hybrids): metadata both ways, names, how its tensors lie.

Files hold decays as they multiply (Hugging Face: the logarithm of their negatives), convolutions without the axis of
length one, and of Mamba 2 the numbers by head as columns and the norm by group. Models that have attention too are in
gguf_hybrid.py. Used by gguf_description.py, gguf_export.py, gguf_names.py and gguf.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.fields import Fields
from tokenmill.checkpoint.gguf_families import FAMILIES
from tokenmill.checkpoint.gguf_writer import Value
from tokenmill.checkpoint.mixers import Recurrent
from tokenmill.errors import CheckpointError

# The canonical name of the mixer: in models of nothing else, in hybrids, and of the gated delta rule.
_MIXERS = _ALONE, _MAMBA, _DELTA = "mixer", "mamba", "linear_attn"
_NORM_ENDING = "norm.weight"
_CONVOLUTION, _DECAYS, _LOG_DECAYS, _SKIP, _NORM = (
    tuple(f".{mixer}.{name}" for mixer in _MIXERS) for name in ("conv1d.weight", "A", "A_log", "D", "norm.weight")
)


def layer_names(stored_as: str) -> dict[str, str]:
    """Short name -> canonical name of the parts of a recurrent mixer."""
    style, mixer = _style(stored_as)
    if not style:
        return {}
    names = {"ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
    if style == "delta":  # older files keep q, k, v and z in one matrix, as Hugging Face does
        names |= {"attn_qkv": "in_proj_qkv", "attn_gate": "in_proj_z", "ssm_ba": "in_proj_ba", "ssm_in": "in_proj_qkvz"}
    else:
        names |= {"ssm_in": "in_proj", "ssm_x": "x_proj", "ssm_dt": "dt_proj"}
        names |= {f"ssm_{part}_norm": f"{part}_layernorm" for part in ("dt", "b", "c")}
    return {short: f"{mixer}.{name}" for short, name in names.items()}


def tensor_names(stored_as: str) -> dict[str, str]:
    """The same of those whose names have no ending of a matrix or bias. Only Mamba has a matrix of time steps, others
    just their bias."""
    style, mixer = _style(stored_as)
    if not style:
        return {}
    names = {"ssm_a": f"{mixer}.A", "ssm_d": f"{mixer}.D"}
    return names if style == "mamba" else {**names, "ssm_dt.bias": f"{mixer}.dt_bias"}


def _style(stored_as: str) -> tuple[str, str]:
    """(style of the recurrent layers, canonical name of their mixer)."""
    family = FAMILIES.get(stored_as)
    if family is None:
        return "", ""
    if family.recurrent:
        return family.recurrent, _ALONE
    return family.hybrid, _DELTA if family.hybrid == "delta" else _MAMBA


def read_mixer(fields: Fields, style: str, hidden_size: int) -> Recurrent:
    """llama.cpp has biases of Mamba's convolutions, and none of projections. `time_step_rank` is the number of heads,
    where there are some."""
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
    if style == "delta":
        value_dim = inner // rank
        return Recurrent(
            style, convolution, num_heads=rank, num_key_heads=groups, key_dim=state_size, value_dim=value_dim
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


def exported(name: str, d: ModelDescription) -> list[tuple[str, tuple[int, ...]]]:
    """(canonical name, shape in the file) of a tensor, in models with recurrent layers; empty in others."""
    m = next((mixer for layer in d.layers for mixer in layer.mixers if isinstance(mixer, Recurrent)), None)
    if m is None:
        return []
    by_head = m.style == "mamba2"
    if name.endswith(_CONVOLUTION):
        return [(name, (m.convolved, m.convolution))]
    if name.endswith((*_LOG_DECAYS, *_DECAYS)):
        decays = {"mamba": (m.inner, m.state_size), "mamba2": (m.num_heads, 1)}.get(m.style, (m.num_heads,))
        return [(name.removesuffix("_log"), decays)]
    if by_head and name.endswith(_SKIP):
        return [(name, (m.num_heads, 1))]
    if by_head and name.endswith(_NORM):
        return [(name, (m.num_groups, m.inner // m.num_groups))]
    return []


def has_offset(name: str) -> bool:
    """Whether a tensor, by its canonical name, is a norm to which a family may add an offset: not those in mixers."""
    return name.endswith(_NORM_ENDING) and not name.endswith(_NORM)


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
