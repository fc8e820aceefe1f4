"""The model's own layer for tokens further ahead as a drafter: `--speculate mtp`.

DeepSeek-V3 and its like keep it behind the last layer of the file (`enorm`, `hnorm`, `eh_proj`, `shared_head`),
Qwen3-Next and Qwen3.5 under `mtp.`. It joins the target's last state, behind the final norm, with the embedding of the
next token, and is otherwise a block of the model's architecture, with the model's embedding and head. What a block
computes is therefore not written here. Its products are those of the model on a CPU, plain torch on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tokenmill.checkpoint.base import StoredTensor
from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.mixers import Recurrent
from tokenmill.checkpoint.safetensors import SafetensorsCheckpoint
from tokenmill.errors import UserError
from tokenmill.kernels.base import select, select_linear
from tokenmill.log import get_logger
from tokenmill.model.architectures.decoder import Block
from tokenmill.model.architectures.hybrid import Hybrid, HybridBlock
from tokenmill.model.attention.base import AttentionSpec
from tokenmill.model.attention.latent import LatentSpec
from tokenmill.model.layers.norm import Norm
from tokenmill.model.layers.rotary import build_rotary_tables
from tokenmill.model.linear_groups import head_projections
from tokenmill.model.loader import LoadedModel
from tokenmill.model.reader import WeightReader
from tokenmill.runtime.executors.eager import FORWARD_OPS, EagerOps
from tokenmill.runtime.speculation.base import Target, refuse_argument
from tokenmill.runtime.speculation.layer_drafter import AttendNew, DraftLayer, LayerDrafter
from tokenmill.runtime.speculation.target_vocabulary import TargetVocabulary
from tokenmill.types import Batch

_log = get_logger(__name__)
_OTHER = "use --speculate suffix, or a head: --speculate head:DIR"
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # of the model's own


class MtpDrafter(LayerDrafter):
    name = "mtp"

    @classmethod
    def build(cls, argument: str, target: Target) -> MtpDrafter:
        refuse_argument(cls.name, argument)
        return cls(load_mtp(target), target)


class MtpLayer(DraftLayer):
    """The first of the file's layers for drafting, which also makes the drafts after the first, from its own states."""

    def __init__(self, reader: WeightReader, target: LoadedModel, num_positions: int) -> None:
        d = reader.description
        number = d.num_layers - 1
        prefix, tables = f"model.layers.{number}", build_rotary_tables(reader, d, num_positions)
        self.embedding_norm, self.state_norm = (Norm(reader, d, f"{prefix}.{name}") for name in ("enorm", "hnorm"))
        self.join = reader.linear(f"{prefix}.eh_proj", d.hidden_size, 2 * d.hidden_size)
        self.norm = Norm(reader, d, f"{prefix}.shared_head.norm")
        decoder = target.decoder
        self.block: Any
        if isinstance(decoder, Hybrid):
            self.block = HybridBlock(reader, d, number, tables, decoder.names)
            self.attention, self.attention_norm = self.block.mixers[0], self.block.mixer_norm
        else:
            self.block = decoder.block_class(reader, d, number, tables.get(d.layers[number].rope))
            assert isinstance(self.block, Block)
            self.attention, self.attention_norm = self.block.attention, self.block.attention_norm
        self.blocks = [self.block]
        self.spec: AttentionSpec = _absorbed(self.attention.spec)
        self.key_width = self.spec.num_kv_heads * self.spec.head_dim
        for name in _COPIES:
            reader.ignore(f"{prefix}.{name}")

    def attach(self, target: LoadedModel, weights: Iterable[Any]) -> None:
        """Once placed on the device."""
        self._place = _Place(target, {op: select(op, target.device, "ref").run for op in FORWARD_OPS})
        self._vocabulary = TargetVocabulary(target)
        self.nbytes = sum(weight.nbytes for weight in weights)

    def forward(self, ops: Any) -> Any:
        """What a trace of the layer's products passes through."""
        return self.block(ops, ops.linear(None, [self.join])[0], None)

    def features(self, hidden: Tensor) -> Tensor:
        return self._vocabulary.normed(hidden)

    def keys(self, features: Tensor, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        kept: list[Tensor] = []

        def keep(q: Tensor, k: Tensor, v: Tensor, _spec: AttentionSpec) -> Tensor:
            kept.extend((k, v))
            return torch.zeros_like(q)

        ops = _LayerOps(self._place, positions, keep)
        self.attention(ops, self.attention_norm(ops, self._joined(ops, features, token_ids)))
        k, v = kept
        return k, v

    def step(self, features: Tensor, token_ids: Tensor, positions: Tensor, attend: AttendNew) -> Tensor:
        ops = _LayerOps(self._place, positions, attend)
        residual, update = self.block(ops, self._joined(ops, features, token_ids), None)
        state: Tensor = self.norm(ops, ops.add(residual, update))
        return state

    def best(self, features: Tensor) -> tuple[Tensor, Tensor]:
        chances, ids = self._vocabulary.top_of_normed(features, 1)
        return chances[:, 0], ids[:, 0]

    def _joined(self, ops: EagerOps, features: Tensor, token_ids: Tensor) -> Tensor:
        embedding = self.embedding_norm(ops, self._vocabulary.embed(token_ids))
        return ops.linear(torch.cat([embedding, self.state_norm(ops, features)], 1), [self.join])[0]


@dataclass(frozen=True, slots=True)
class _Place:
    """What EagerOps asks of its executor."""

    model: LoadedModel
    run: dict[str, Any]
    adapters: None = None


class _LayerOps(EagerOps):
    """One token of each row, with an attention of the caller's."""

    absorbs = True

    def __init__(self, place: Any, positions: Tensor, attend: AttendNew) -> None:
        none = positions[:0]
        super().__init__(place, Batch(none, positions, none, none, (), (), none, max_query=1, max_seq=1))
        self._attend = attend

    def attention(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        return self._attend(q, k, v, spec)


def load_mtp(target: Target) -> MtpLayer:
    model, config = target.model, target.config
    stored = model.checkpoint
    if not isinstance(stored, SafetensorsCheckpoint):
        raise UserError(f"--speculate mtp reads Hugging Face directories, {stored.path.name} is none", _OTHER)
    layer = _LayerCheckpoint(SafetensorsCheckpoint(stored.path, draft_layers=True), model.decoder.description)
    if not layer.names():
        raise UserError(f"{stored.path.name} brings no layer for drafting (num_nextn_predict_layers, mtp.*)", _OTHER)
    reader = WeightReader(layer)
    mtp = MtpLayer(reader, model, config.context + config.draft_tokens)
    reader.finish()
    if model.device.type != "cpu":
        from tokenmill.model.device_weights import place_reference

        _log.info("--speculate mtp: the draft layer is computed by plain torch on this device")
        as_decoder: Any = mtp
        place_reference(as_decoder, reader, model.device)
    else:
        as_decoder = mtp
        for projections in head_projections(as_decoder):
            projections.place(lambda weight: weight, torch.float32)
        for weight in reader.weights.values():
            weight.kernel = weight.kernel or select_linear(weight, model.device, model.kernels)
    mtp.attach(model, reader.weights.values())
    return mtp


class _LayerCheckpoint:
    """The target's file as if it held the draft layer alone, behind those that the model is described with."""

    def __init__(self, stored: SafetensorsCheckpoint, d: ModelDescription) -> None:
        self._stored = stored
        self.path = stored.path
        self._prefix = f"model.layers.{d.num_layers}."
        full = [layer for layer in d.layers if not any(isinstance(mixer, Recurrent) for mixer in layer.mixers)]
        own = [layer for layer in full if layer.mixers and not layer.kind.startswith(("sliding", "chunked"))]
        if not own:
            raise UserError(f"model type '{d.model_type}' has no layer of the kind that drafts", _OTHER)
        self.description = replace(d, layers=(*d.layers, own[-1]), draft_layers=0)

    def names(self) -> list[str]:
        return [name for name in self._stored.names() if name.startswith(self._prefix)]

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def tensor(self, name: str) -> StoredTensor:
        return self._stored.tensor(name)

    def release(self, name: str) -> None:
        self._stored.release(name)

    def float_type(self) -> str:
        return self._stored.float_type()

    def is_quantized(self) -> bool:
        return self._stored.is_quantized()

    def stores_halves(self) -> bool:
        return self._stored.stores_halves()

    def quantization(self) -> dict[str, object]:
        return self._stored.quantization()


def _absorbed(spec: AttentionSpec | LatentSpec) -> AttentionSpec:
    return spec.absorbed if isinstance(spec, LatentSpec) else spec
