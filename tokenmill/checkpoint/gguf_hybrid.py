"""Models with recurrent layers and attention in GGUF: metadata both ways, tensor names, matrices that lie otherwise.

`jamba` and `granitehybrid` say which layers have attention by a list of numbers of KV heads, 0 for the others;
`qwen3next` by a list or an interval; in `falcon-h1` all have both, and its multipliers are part of the weights. Used by
gguf_description.py, gguf_export.py, gguf_names.py and the writers; the mixers themselves are in gguf_recurrent.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tokenmill.checkpoint.description import LayerDescription, ModelDescription
from tokenmill.checkpoint.fields import UNSUPPORTED, Fields
from tokenmill.checkpoint.gguf_families import GGUFFamily
from tokenmill.checkpoint.gguf_recurrent import read_mixer
from tokenmill.checkpoint.gguf_writer import Value
from tokenmill.checkpoint.mixers import Attention, Mixer, Recurrent
from tokenmill.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

Ranges = tuple[tuple[int, int], ...]  # (first, end) of rows

ROUTER = "blk.0.ffn_gate_inp.weight"
_KV_HEADS, _RECURRENT_LAYERS, _INTERVAL = (
    "attention.head_count_kv",
    "attention.recurrent_layers",
    "full_attention_interval",
)
_NORM, _FINAL_NORM = "pre_ff_layernorm", "model.final_layernorm"
_MLP = {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
# Granite's MLP is that of all layers; beside experts it has the name of a shared one.
_GRANITE = {"gate": "shared_mlp.gate_proj", "up": "shared_mlp.up_proj", "down": "shared_mlp.output_linear"}
_GATE_UP = ".shared_mlp.input_linear.weight"  # Hugging Face: the rows of gate and up in one matrix
_QKVZ = ".linear_attn.in_proj_qkvz.weight"
_REMEDY = "choose a safetensors format"


def layer_names(stored_as: str, names: Collection[str]) -> dict[str, str]:
    """Short name -> canonical name of the parts of a layer that are named unlike in other architectures. `names`: of
    the file's tensors."""
    if stored_as == "granitehybrid":
        ending = "_shexp" if ROUTER in names else ""
        return {f"ffn_{part}{ending}": name for part, name in _GRANITE.items()}
    return {"jamba": {**_MLP, "ffn_norm": _NORM}, "falcon-h1": _MLP}.get(stored_as, {})


def tensor_names(stored_as: str) -> dict[str, str]:
    """The same of whole names, without the ending that other tensors have."""
    return {"ffn_norm": f"{_NORM}.weight"} if stored_as == "falcon-h1" else {}


def final_norm(stored_as: str) -> str:
    return _FINAL_NORM if stored_as in ("jamba", "falcon-h1") else "model.norm"


def num_kv_heads(fields: Fields) -> int:
    """Of the layers that have attention."""
    counts = fields.raw(_KV_HEADS)
    if not isinstance(counts, list):
        return fields.integer(_KV_HEADS)
    found = set(fields.integers(_KV_HEADS)) - {0}
    if len(found) != 1 or min(found) < 0:
        raise fields.error(f"'{_KV_HEADS}' must be one number, and 0 for recurrent layers", UNSUPPORTED)
    return found.pop()


def mixers(
    fields: Fields, family: GGUFFamily, attentions: Sequence[tuple[Mixer, ...]], hidden_size: int, normed: bool
) -> list[tuple[Mixer, ...]]:
    """Of each layer. `attentions`: what each would have if it had attention; `normed`: there are norms in mixers."""
    recurrent = read_mixer(fields, family.hybrid, hidden_size)
    if family.hybrid == "mamba":
        eps = fields.number("attention.layer_norm_rms_epsilon")
        recurrent = replace(recurrent, step_norms="weighted", step_norm_eps=eps)
    if family.side_by_side:
        recurrent = recurrent if normed else replace(recurrent, norm="")
        return [(*attention, recurrent) for attention in attentions]
    recurs = _recurrent_layers(fields, family, len(attentions))
    return [(recurrent,) if each else attention for attention, each in zip(attentions, recurs, strict=True)]


def _recurrent_layers(fields: Fields, family: GGUFFamily, num_layers: int) -> list[bool]:
    if family.hybrid == "delta":
        listed = fields.raw(_RECURRENT_LAYERS)
        if listed is None:
            interval = fields.integer(_INTERVAL, 4)
            return [(layer + 1) % interval != 0 for layer in range(num_layers)]
        key, found = _RECURRENT_LAYERS, [bool(each) for each in listed] if isinstance(listed, list) else []
    else:
        key, found = _KV_HEADS, [count == 0 for count in fields.integers(_KV_HEADS)]
    if len(found) < num_layers:  # layers for drafts may follow
        raise fields.error(f"'{key}' has {len(found)} entries for {num_layers} layers")
    return found[:num_layers]


def values(d: ModelDescription, family: GGUFFamily) -> dict[str, Value]:
    """The keys of the file beyond those that all architectures have."""
    m = next(mixer for layer in d.layers for mixer in layer.mixers if isinstance(mixer, Recurrent))
    found: dict[str, Value] = {"ssm.conv_kernel": m.convolution}
    if m.style == "delta":
        if m.key_dim != m.value_dim:
            raise _refused(d, f"values as wide as keys only, this one has {m.value_dim} and {m.key_dim}")
        sizes = {"inner_size": m.num_heads * m.value_dim, "state_size": m.key_dim, "group_count": m.num_key_heads}
        recurs = [layer.kind == "recurrent" for layer in d.layers]
        interval = recurs.index(False) + 1 if False in recurs else d.num_layers + 1
        found[_RECURRENT_LAYERS] = recurs
        found[_INTERVAL] = interval  # all that older readers know
    else:
        if not family.side_by_side and m.inner != 2 * d.hidden_size:
            raise _refused(d, f"twice the hidden size only, this one has {m.inner} channels of {d.hidden_size}")
        sizes = {"inner_size": m.inner, "state_size": m.state_size}
        sizes |= {"group_count": m.num_groups} if m.num_groups else {}
    found |= {f"ssm.{name}": size for name, size in sizes.items()}
    found["ssm.time_step_rank"] = m.rank or m.num_heads
    if m.style != "delta" and not family.side_by_side:
        found[_KV_HEADS] = [0 if layer.kind == "recurrent" else layer.attention.num_kv_heads for layer in d.layers]
    if family.optional_rope:
        found["rope.scaling.finetuned"] = bool(d.rope_tables)
    return found


def _refused(d: ModelDescription, words: str) -> CheckpointError:
    return CheckpointError(f"llama.cpp has '{d.architecture}' with {words}", _REMEDY)


def rearranges(d: ModelDescription) -> bool:
    """Whether a GGUF cuts, reorders or multiplies matrices of this model."""
    return d.architecture in ("granitemoehybrid", "falcon_h1", "qwen3_next")


def parts(name: str, shape: tuple[int, ...], d: ModelDescription) -> list[tuple[str, Ranges]]:
    """(canonical name, rows) of the matrices that a file has instead of one of Hugging Face's; empty for others."""
    if name.endswith(_GATE_UP):
        stem, size = name.removesuffix(_GATE_UP), shape[0] // 2
        halves = enumerate(("gate", "up"))
        return [(f"{stem}.{_GRANITE[part]}.weight", ((n * size, (n + 1) * size),)) for n, part in halves]
    if not name.endswith(_QKVZ):
        return []
    m = next(mixer for layer in d.layers for mixer in layer.mixers if isinstance(mixer, Recurrent))
    width = m.num_heads // m.num_key_heads * m.value_dim
    pieces: list[list[tuple[int, int]]] = []
    at = 0
    for count in (m.key_dim, m.key_dim, width, width):  # q, k, v and z of a key head lie side by side
        period = 2 * (m.key_dim + width)
        pieces.append([(head * period + at, head * period + at + count) for head in range(m.num_key_heads)])
        at += count
    stem = name.removesuffix(_QKVZ) + ".linear_attn.in_proj_"
    q, k, v, z = pieces
    return [(f"{stem}qkv.weight", (*q, *k, *v)), (f"{stem}z.weight", (*z,))]


def without_multipliers(d: ModelDescription) -> ModelDescription:
    """As a file describes the model: Falcon-H1's multipliers are part of the weights."""
    if d.architecture != "falcon_h1":
        return d
    if d.tie_embeddings and d.embedding_scale != d.logit_scale:
        raise CheckpointError("GGUF cannot express a tied head with a multiplier of its own", _REMEDY)
    return replace(d, layers=tuple(map(_plain_layer, d.layers)), embedding_scale=1.0, logit_scale=1.0)


def _plain_layer(layer: LayerDescription) -> LayerDescription:
    ffn = layer.feed_forward
    assert ffn is not None
    ffn = replace(ffn, gate_scale=1.0, output_scale=1.0)
    return replace(layer, mixers=tuple(map(_plain_mixer, layer.mixers)), feed_forward=ffn)


def _plain_mixer(mixer: Mixer) -> Mixer:
    if isinstance(mixer, Recurrent):
        return replace(mixer, multipliers=(1.0,) * len(mixer.multipliers), output_scale=1.0)
    return replace(mixer, scale=None, output_scale=1.0) if isinstance(mixer, Attention) else mixer


def multiplied(name: str, rows: Tensor, begin: int, d: ModelDescription) -> Tensor:
    """Rows of a tensor from row `begin` on, by the multipliers that `without_multipliers` leaves out."""
    if d.architecture != "falcon_h1":
        return rows
    rows, at = rows.clone(), -begin
    for count, factor in _factors(name, rows.shape[0] + begin, d):
        rows[max(at, 0) : max(at + count, 0)] *= factor
        at += count
    return rows


def _factors(name: str, count: int, d: ModelDescription) -> list[tuple[int, float]]:
    """(number of rows, what they are multiplied by) of a tensor by its canonical name; `count`: its rows at least."""
    if name.startswith("model.layers."):
        layer, module = d.layers[int(name.split(".")[2])], name.split(".", 3)[3].rpartition(".")[0]
        recurrent = next(mixer for mixer in layer.mixers if isinstance(mixer, Recurrent))
        if module == "mamba.in_proj":
            group = recurrent.num_groups * recurrent.state_size
            widths = (recurrent.inner, recurrent.inner, group, group, recurrent.num_heads)
            return list(zip(widths, recurrent.multipliers, strict=True))
        attention, ffn = layer.attention, layer.feed_forward
        assert ffn is not None
        plain = attention.head_dim**-0.5
        factor = {
            "self_attn.q_proj": (plain if attention.scale is None else attention.scale) / plain,
            "self_attn.o_proj": attention.output_scale,
            "mamba.out_proj": recurrent.output_scale,
            "feed_forward.gate_proj": ffn.gate_scale,
            "feed_forward.down_proj": ffn.output_scale,
        }.get(module, 1.0)
    else:
        factor = {"model.embed_tokens.weight": d.embedding_scale, "lm_head.weight": d.logit_scale}.get(name, 1.0)
    return [(count, factor)]
