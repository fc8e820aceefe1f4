"""Published EAGLE checkpoints (1, 2 and 3) -> EagleLayer, told apart by their tensors.

A directory as the EAGLE authors, vLLM and SGLang have it: a config.json of one Llama layer and the weights. All that
does not fit the target is refused here, in one line: sizes, vocabulary, missing tensors, and those that nobody would
read.
Called by heads.py for `--speculate head:DIR`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tokenmill.checkpoint import hf_config
from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.safetensors import read_json
from tokenmill.errors import CheckpointError, UserError
from tokenmill.model.attention.base import AttentionSpec
from tokenmill.model.layers.rotary import RotaryTable, build_rotary_table
from tokenmill.runtime.speculation.base import Target
from tokenmill.runtime.speculation.eagle_layer import EagleLayer, EagleShape
from tokenmill.runtime.speculation.target_vocabulary import TargetVocabulary

_DOWNLOAD = "download it again, or choose another head"
_PICKLED = "unpickling can run code: write them as safetensors (safetensors.torch.save_file of the tensors) first"
_OTHER = "choose the head that was trained for this model, or use --speculate suffix"
_LAYER_PREFIXES = ("midlayer.", "layers.0.")
_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj")
_INTEGERS = {"d2t": torch.int64}
_UNUSED = ("rotary_emb.inv_freq", "self_attn.rotary_emb.inv_freq")  # follow from the config


def is_published(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def load_eagle(folder: Path, target: Target) -> EagleLayer:
    config = _flat(read_json(folder / "config.json"))
    description, tensors = hf_config.describe(config), _read(folder)
    model = target.model.decoder.description
    if "fc.weight" not in tensors:
        raise CheckpointError(f"{folder} holds no EAGLE head: it has no tensor fc.weight", "give the folder of one")
    if description.num_layers != 1:
        raise UserError(f"the head in {folder} has {description.num_layers} layers, heads of 1 are read", _OTHER)
    if description.vocab_size != model.vocab_size:
        raise UserError(
            f"the head in {folder} is for a vocabulary of {description.vocab_size} tokens, the model has "
            f"{model.vocab_size}",
            _OTHER,
        )
    kept = _kept_layers(config, model.num_layers) if "hidden_norm.weight" in tensors else ()
    shape = _shape(config, description, kept)
    _check(folder, _expected(shape, description, model, tensors), tensors)
    _check_ids(folder, tensors, model.vocab_size)
    device, table = target.model.device, target.model.table
    dtype = torch.float32 if table is None else table.dtype
    embedding = tensors.pop("embed_tokens.weight", None)
    if kept and "lm_head.weight" not in tensors and shape.hidden_size != model.hidden_size:
        raise UserError(f"the head in {folder} has no output matrix of its own width", _DOWNLOAD)
    placed = {name: _placed(name, tensor, dtype, device) for name, tensor in tensors.items() if name != "t2d"}
    embed: Any = target.model.embed
    if embedding is not None:
        embedding = embedding.to(device)
        embed = embedding.__getitem__
    rotary = _rotary(description, target.config.context + target.config.draft_tokens, device)
    layer = EagleLayer(shape, placed, rotary, TargetVocabulary(target.model), embed)
    layer.nbytes += 0 if embedding is None else embedding.nbytes
    return layer


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """The speculators format nests the layer."""
    nested = config.get("transformer_layer_config")
    if not isinstance(nested, dict):
        return config
    return {**nested, **{key: value for key, value in config.items() if key not in ("model_type", "architectures")}}


def _kept_layers(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers of the target whose input is read. Files that name none were trained by EAGLE's own choice; those of
    `eagle_config` name the layer whose output it is."""
    given = config.get("eagle_aux_hidden_state_layer_ids")
    after = 0
    if not given and isinstance(config.get("eagle_config"), dict):
        given, after = config["eagle_config"].get("eagle_aux_hidden_state_layer_ids"), 1
    layers = tuple(int(each) + after for each in given) if given else (2, num_layers // 2, num_layers - 3)
    if any(not 0 <= layer <= num_layers for layer in layers):
        named = ", ".join(map(str, layers))
        raise UserError(f"the EAGLE-3 head reads layers {named} of a model with {num_layers}", _OTHER)
    return layers


def _shape(config: dict[str, Any], d: ModelDescription, kept: tuple[int, ...]) -> EagleShape:
    a, ffn = d.layers[0].attention, d.layers[0].feed_forward
    if ffn is None or not ffn.intermediate_size or a.output_gate or a.head_norms or d.norm != "rms":
        raise UserError(f"a head of model type '{d.model_type}' is not read", "use one with a Llama layer")
    spec = AttentionSpec(0, a.num_heads, a.num_kv_heads, a.head_dim, a.head_dim**-0.5 if a.scale is None else a.scale)
    before = bool(config.get("norm_before_residual", False))
    return EagleShape(d.hidden_size, d.norm_eps, ffn.activation, spec, kept, before)


def _expected(
    shape: EagleShape, d: ModelDescription, model: ModelDescription, tensors: dict[str, Tensor]
) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that is read."""
    hidden, spec, ffn = shape.hidden_size, shape.spec, d.layers[0].feed_forward
    assert ffn is not None
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    read = 2 * hidden if shape.kept_layers else hidden
    joined = len(shape.kept_layers) * model.hidden_size if shape.kept_layers else hidden + model.hidden_size
    expected: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, joined),
        "self_attn.q_proj.weight": (queries, read),
        "self_attn.k_proj.weight": (keys, read),
        "self_attn.v_proj.weight": (keys, read),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (ffn.intermediate_size, hidden),
        "mlp.up_proj.weight": (ffn.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, ffn.intermediate_size),
        "post_attention_layernorm.weight": (hidden,),
    }
    optional: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (model.vocab_size, hidden), "fc.bias": (hidden,)}
    optional |= {f"self_attn.{name}.bias": expected[f"self_attn.{name}.weight"][:1] for name in _MATRICES}
    if shape.kept_layers:
        expected |= {f"{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm", "norm")}
        drafted = tensors["d2t"].shape[0] if "d2t" in tensors else model.vocab_size
        optional |= {"lm_head.weight": (drafted, hidden), "d2t": (drafted,), "t2d": (model.vocab_size,)}
        if "d2t" in tensors:
            expected["lm_head.weight"] = (drafted, hidden)
    else:
        optional["input_layernorm.weight"] = (hidden,)
    if hidden != model.hidden_size and shape.kept_layers:  # the target's embedding is too wide or too narrow
        expected["embed_tokens.weight"] = optional["embed_tokens.weight"]
    return expected | {name: size for name, size in optional.items() if name in tensors}


def _check(folder: Path, expected: dict[str, tuple[int, ...]], tensors: dict[str, Tensor]) -> None:
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise CheckpointError(f"the head in {folder} has no tensor {', '.join(missing)}", _DOWNLOAD)
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise UserError(
                f"{name} of the head in {folder} is {list(tensors[name].shape)}, this model needs {list(shape)}", _OTHER
            )
    left = sorted(tensors.keys() - expected.keys())
    if left:
        raise UserError(f"the head in {folder} has tensors that are not read: {', '.join(left[:6])}", _OTHER)


def _check_ids(folder: Path, tensors: dict[str, Tensor], vocab_size: int) -> None:
    if "d2t" not in tensors:
        return
    ids = tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise UserError(f"d2t of the head in {folder} names tokens that the model does not have", _OTHER)


def _read(folder: Path) -> dict[str, Tensor]:
    """By the name in the layer, wherever the file has it."""
    files = sorted(folder.glob("*.safetensors"))
    if not files and any(folder.glob("*.bin")):
        raise CheckpointError(f"{folder} holds only pickled weights", _PICKLED)
    found: dict[str, Tensor] = {}
    try:
        for path in files:
            found |= load_file(path)
    except Exception as error:
        raise CheckpointError(f"the weights in {folder} cannot be read ({error})", _DOWNLOAD) from error
    if not found:
        raise CheckpointError(f"{folder} has no .safetensors", _DOWNLOAD)
    named = {_own_name(name): tensor for name, tensor in found.items()}
    return {name: tensor for name, tensor in named.items() if name not in _UNUSED}


def _own_name(name: str) -> str:
    name = name.removeprefix("model.")
    for prefix in _LAYER_PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _placed(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Matrices in the type of products; norms and biases in float32."""
    return tensor.to(device, _INTEGERS.get(name, dtype if tensor.dim() == 2 else torch.float32)).contiguous()


def _rotary(d: ModelDescription, num_positions: int, device: torch.device) -> RotaryTable:
    rope = d.rope_table(d.layers[0].rope)
    table = build_rotary_table(rope.rotary_dim, num_positions, rope.theta, rope.scaling, d.rope_interleaved)
    return RotaryTable(table.cos.to(device), table.sin.to(device), table.interleaved)
