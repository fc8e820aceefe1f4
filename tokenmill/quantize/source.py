"""The model a job reads: its blocks one at a time as float32 tensors in Hugging Face's layout, whatever the file holds.

Rotary pairs are halves and norm vectors include their offset, so that methods see one convention. Builds the
architecture over the mapped checkpoint without loading it; a block's pages are released once it has been read. Used by
the job and the calibration; knows nothing of methods.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.hf_export import exported_description, hf_tensor_name, to_hf_layout
from tokenmill.errors import UserError
from tokenmill.model.architectures import architecture_of
from tokenmill.model.architectures.decoder import Block, Decoder
from tokenmill.model.architectures.hybrid import Hybrid, HybridBlock
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.layers.experts import Experts
from tokenmill.model.layers.latent_attention import LatentSelfAttention
from tokenmill.model.layers.norm import NoNorm, Norm
from tokenmill.model.reader import WeightReader
from tokenmill.quantize.base import LinearGroup
from tokenmill.quantize.hybrid_groups import hybrid_groups, kept_weights

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"
_TILE_ROWS = 4096
_T = TypeVar("_T")


class _NamingReader(WeightReader):
    """Records the name of each vector and array: blocks pass them to Ops without their names."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.vectors: dict[str, Tensor] = {}

    def vector(self, name: str, size: int, offset: float = 0.0) -> Tensor:
        self.vectors[name] = super().vector(name, size, offset)
        return self.vectors[name]

    def array(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.vectors[name] = super().array(name, shape)
        return self.vectors[name]


class SourceModel:
    def __init__(self, checkpoint: Checkpoint, num_positions: int, dropped: Collection[int] = ()) -> None:
        """`num_positions`: the length of calibration sequences. `dropped`: blocks that the model does without; those
        after them move up."""
        self.checkpoint = checkpoint
        architecture = architecture_of(checkpoint.description)
        self.description = exported_description(checkpoint)
        reader = _NamingReader(checkpoint)
        # Norms are read by the source's own offset; rotary tables are those of the layout that blocks are turned into.
        described = replace(checkpoint.description, rope_interleaved=self.description.rope_interleaved)
        self.decoder: Decoder = architecture(reader, described, num_positions)
        reader.finish()
        self._reader = reader
        if dropped:
            self._drop(frozenset(dropped))
        self.names = {id(weight): prefix for prefix, weight in reader.weights.items()}
        self._recurrent = self.decoder.names.recurrent if isinstance(self.decoder, Hybrid) else ""
        self.names |= {
            id(vector): hf_tensor_name(name) if self._is_of_state(name) else name.removesuffix(".weight")
            for name, vector in reader.vectors.items()
        }

    def _drop(self, dropped: frozenset[int]) -> None:
        """Number the blocks anew without these. The names of tensors in the file stay."""
        kept = [index for index in range(len(self.decoder.blocks)) if index not in dropped]
        places = {str(index): str(place) for place, index in enumerate(kept)}

        def renumbered(table: dict[str, _T]) -> dict[str, _T]:
            parts = ((key.split("."), value) for key, value in table.items())
            inside = lambda each: each[:2] == ["model", "layers"]  # noqa: E731
            return {
                ".".join([*key[:2], places[key[2]], *key[3:]] if inside(key) else key): value
                for key, value in parts
                if not inside(key) or key[2] in places
            }

        reader = self._reader
        reader.weights, reader.tensor_names = renumbered(reader.weights), renumbered(reader.tensor_names)
        reader.vectors = renumbered(reader.vectors)
        self.decoder.blocks = [self.decoder.blocks[index] for index in kept]
        self.description = replace(self.description, layers=tuple(self.description.layers[index] for index in kept))

    @property
    def num_blocks(self) -> int:
        return len(self.decoder.blocks)

    def block(self, index: int) -> Block:
        return self.decoder.blocks[index]

    @property
    def final_norm(self) -> str:
        """Its name in files, without the ending; in jobs it is called FINAL_NORM."""
        return self.names[id(self.decoder.norm.weight)]

    def _is_of_state(self, name: str) -> bool:
        """Whether a vector or array belongs to a recurrent mixer: kept under its whole name, and never changed."""
        return bool(self._recurrent) and name.split(".")[3:4] == [self._recurrent]

    def state_names(self, index: int) -> list[str]:
        """Vectors and arrays of a block's recurrent mixer, as files name them."""
        prefix = f"model.layers.{index}."
        return [
            hf_tensor_name(name) for name in self._reader.vectors if name.startswith(prefix) and self._is_of_state(name)
        ]

    def state_shapes(self, index: int) -> tuple[tuple[int, ...], ...]:
        """What a sequence keeps in a recurrent layer; empty for others."""
        return self.description.kv_layers()[index].states

    def linear_names(self, index: int) -> list[str]:
        """Those that may be quantized, in the order of the forward pass."""
        prefix = f"model.layers.{index}."
        kept = self.kept_names(index)
        return [name for name in self._reader.weights if name.startswith(prefix) and name not in kept]

    def kept_names(self, index: int) -> list[str]:
        """Matrices that stay float32: routers, since rounding them changes which experts are chosen, gates of shared
        experts, and what makes decays and time steps of recurrent layers."""
        block = self.block(index)
        if isinstance(block, HybridBlock):
            return [self.names[id(weight)] for weight in kept_weights(block)]
        mlp = block.mlp
        if not isinstance(mlp, Experts):
            return []
        gate = None if mlp.shared is None else mlp.shared.gate
        return [self.names[id(weight)] for weight in (mlp.router, gate) if weight is not None]

    def shape(self, name: str) -> tuple[int, int]:
        weight = self._reader.weights[name]
        return weight.out_features, weight.in_features

    def stored_type(self, name: str) -> str:
        return self._reader.weights[name].type_name

    def read(self, name: str) -> Tensor:
        """A linear or the embedding as float32 [out, in]; its mapped pages are released."""
        weight = self._reader.weights[name]
        values = weight.dequantize(0, weight.out_features).clone()
        for part in self._reader.tensor_names[name]:
            self.checkpoint.release(part)
        return to_hf_layout(f"{name}.weight", values, self.checkpoint.description).contiguous()

    def read_block(self, index: int) -> dict[str, Tensor]:
        """Every tensor of a block: NAME of a linear or norm, NAME.bias of a bias, other vectors as the file names
        them."""
        prefix = f"model.layers.{index}."
        names = [*self.linear_names(index), *self.kept_names(index)]
        tensors = {name: self.read(name) for name in names}
        # Biases of experts may be parts of one tensor.
        tensors |= {f"{n}.bias": bias.clone() for n in names if (bias := self._reader.weights[n].bias) is not None}
        for name, vector in self._reader.vectors.items():
            if not name.startswith(prefix) or name in tensors:
                continue
            if self._is_of_state(name):
                tensors[hf_tensor_name(name)] = to_hf_layout(name, vector, self.checkpoint.description).clone()
            elif name.removesuffix(".weight") not in tensors:
                # A bias keeps its ending; of norms the name is the prefix. Norms stay as they multiply.
                turned = to_hf_layout(name, vector, self.checkpoint.description) if name.endswith(".bias") else vector
                tensors[name.removesuffix(".weight")] = turned.clone()
        return tensors

    def read_edge(self, name: str) -> Tensor:
        """The embedding, the final norm (as it multiplies) or the head; of tied models the head is the embedding."""
        if name == FINAL_NORM:
            return self._reader.vectors[f"{self.final_norm}.weight"].clone()
        return self.read(EMBEDDING if name == HEAD and self.description.tie_embeddings else name)

    def narrowed(self, name: str, dtype: torch.dtype) -> Tensor:
        """The embedding or the head as `dtype`, expanded a tile of rows at a time."""
        weight = self._reader.weights[name]
        table = torch.empty(weight.out_features, weight.in_features, dtype=dtype)
        for begin in range(0, weight.out_features, _TILE_ROWS):
            end = min(begin + _TILE_ROWS, weight.out_features)
            table[begin:end] = narrow(name, weight.dequantize(begin, end), dtype)
        for part in self._reader.tensor_names[name]:
            self.checkpoint.release(part)
        return table

    def embed(self, ids: Tensor, table: Tensor | None = None) -> Tensor:
        """Hidden states before the first block, for token ids of any shape."""
        flat = ids.reshape(-1)
        weight: LinearWeight = self.decoder.embedding
        rows = weight.dequantize_rows(flat) if table is None else table[flat]
        return (rows * self.description.embedding_scale).view(*ids.shape, -1)

    def groups(self, index: int) -> list[LinearGroup]:
        """Linears grouped by shared input, each group with the weight that can absorb a scale of it."""
        block, d = self.block(index), self.description
        if isinstance(block, HybridBlock):
            return hybrid_groups(block, lambda each: self.names[id(each)], self._expert_groups)
        attention, mlp = block.attention, block.mlp

        def group(weights: Sequence[LinearWeight], source: object, is_norm: bool, repeats: int = 1) -> LinearGroup:
            name = None if source is None else self.names[id(source)]
            return LinearGroup(tuple(self.names[id(w)] for w in weights), name, is_norm, repeats)

        def absorbing(norm: Norm | NoNorm) -> Tensor | None:
            """A norm that nothing else reads and that only multiplies."""
            return None if block.shares_norm or norm.bias is not None else norm.weight

        groups = [group(attention.inputs, absorbing(block.attention_norm), True)]
        if isinstance(attention, LatentSelfAttention):
            if attention.query_up is not None:
                groups.append(group([attention.query_up], attention.query_norm, True))
            groups.append(group(attention.projections.stored, attention.row_norm, True))
            groups.append(group([attention.output], None, False))  # its input has rows of several linears' making
        else:
            groups.append(group([attention.output], attention.inputs[2], False, d.num_heads // d.num_kv_heads))
        if isinstance(mlp, Experts):
            return groups + self._expert_groups(mlp)
        return [
            *groups,
            group(mlp.inputs, absorbing(block.mlp_norm), True),
            group([mlp.output], mlp.inputs[1] if mlp.gated else None, False),
        ]

    def _expert_groups(self, mlp: Experts) -> list[LinearGroup]:
        """Router, experts and shared expert read one norm, so no scale of an input can go there. A clamped activation
        passes none on either."""
        pairs = zip(mlp.stacks.gate_up.experts, mlp.stacks.down.experts, strict=True)
        units = [(list(inputs), outputs[0]) for inputs, outputs in pairs]
        if mlp.shared is not None:
            units.append((mlp.shared.inputs, mlp.shared.output))
        groups = []
        for inputs, output in units:
            source = None if mlp.routing.clamp else self.names[id(inputs[1])]
            groups.append(LinearGroup(tuple(self.names[id(weight)] for weight in inputs), None, False))
            groups.append(LinearGroup((self.names[id(output)],), source, False))
        return groups

    def edge_names(self) -> list[str]:
        """The matrices outside of the blocks."""
        return [name for name in self._reader.weights if not name.startswith("model.layers.")]

    def layer_linears(self) -> Iterator[str]:
        for index in range(self.num_blocks):
            yield from self.linear_names(index)


def narrow(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Converted to the dtype of a file; values out of its range are refused rather than written as infinity."""
    narrowed = values.to(dtype)
    if not bool(torch.isfinite(narrowed).all()):
        raise UserError(
            f"{name} holds values that {str(dtype).removeprefix('torch.')} cannot hold", "use --dtype bfloat16"
        )
    return narrowed


def stored_norm(vector: Tensor, offset: float) -> Tensor:
    """A norm as the file keeps it, from how it multiplies."""
    return vector - offset if offset else vector
