"""Checkpoint -> model: build the architecture, account for every tensor, prepare each weight for its kernel.

Weights stay in their stored format: a kernel that repacks owns the packed copy, and the mapped pages of the original
are released. Knows nothing of batches or requests. Called by the engine's construction and by `inspect`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.dummy import DummyCheckpoint
from tokenmill.checkpoint.mixers import LatentAttention, Recurrent
from tokenmill.errors import UserError
from tokenmill.kernels import cpu
from tokenmill.kernels.base import Choice, Declined, candidate_backends, select_linear
from tokenmill.kernels.host import Device, NeedsTorch, on_host
from tokenmill.log import get_logger
from tokenmill.model.architectures import architecture_of
from tokenmill.model.architectures.decoder import Decoder
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.group import ALONE, Group
from tokenmill.model.host_reader import HostReader
from tokenmill.model.layers.experts import expert_layers
from tokenmill.model.linear_groups import head_projections
from tokenmill.model.reader import WeightReader

if TYPE_CHECKING:
    from torch import Tensor

_log = get_logger(__name__)
_PACKING_THREADS = 2
_UNSTABLE_IN_FLOAT16 = ("glm4", "plamo2")  # vLLM refuses it for them, as for the families of Gemma
_NO_KERNEL = "GPU kernels for %s compute in bfloat16"


@dataclass(slots=True, eq=False)
class LoadedModel:
    decoder: Decoder
    weights: dict[str, LinearWeight]  # by canonical prefix
    checkpoint: Checkpoint  # keeps the mapping alive
    device: Device
    kernels: str  # forced backend, or empty
    table: Tensor | None = None  # on a GPU: the embedding, in the type of activations
    group: Group = ALONE  # the ranks that share the matrices

    @property
    def dtype(self) -> str:
        """In which activations are computed: "bfloat16" or "float16" by kernels of a GPU, else "float32"."""
        return "float32" if self.table is None else str(self.table.dtype).removeprefix("torch.")

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices: as stored on the CPU, as prepared for the kernels on a GPU."""
        if self.table is None:
            return sum(weight.nbytes for weight in self.weights.values())
        sizes = {id(kernel): kernel.nbytes for kernel in self._kernels()}
        tied = self.decoder.head is self.decoder.embedding and any(
            getattr(kernel, "weight", None) is self.table for kernel in self._kernels()
        )
        return sum(sizes.values()) + (0 if tied else self.table.numel() * self.table.element_size())

    def embed(self, token_ids: Tensor) -> Tensor:
        """Float32 rows of the embedding, unscaled, on the model's device."""
        if self.table is not None:
            return self.table[token_ids].float()
        return self.decoder.embedding.dequantize_rows(token_ids)

    def _kernels(self) -> list[Any]:
        stacks = [layer.stacks.kernel for layer in expert_layers(self.decoder.blocks)]
        choices = [*(weight.kernel for weight in self.weights.values()), *stacks]
        return [choice.run for choice in choices if choice is not None]


def uses_gpu_kernels(device: Device, kernels: str) -> bool:
    """Whether weights are made ready for GPU kernels: on a GPU unless the reference is asked for, and where tests run
    these kernels by Triton's interpreter."""
    if device.type == "cpu":
        if kernels != "triton":
            return False
        from tokenmill.kernels import triton

        return triton.unavailable(device) is None
    return candidate_backends(kernels) != ("ref",)


def declines_float16(description: ModelDescription) -> str:
    """Why GPU kernels compute this model in bfloat16 only; empty if they need not."""
    mixers = [mixer for layer in description.layers for mixer in layer.mixers]
    reasons = (
        (description.overflows_float16, f"activations of {description.model_type} exceed its range"),
        (description.model_type in _UNSTABLE_IN_FLOAT16, f"{description.model_type} is unstable in it"),
        (
            any(layer.feed_forward and layer.feed_forward.num_experts for layer in description.layers),
            _NO_KERNEL % "experts",
        ),
        (any(isinstance(mixer, LatentAttention) for mixer in mixers), _NO_KERNEL % "latent attention"),
        (any(isinstance(mixer, Recurrent) for mixer in mixers), _NO_KERNEL % "recurrent layers"),
    )
    return next((reason for applies, reason in reasons if applies), "")


def check_expert_memory(description: ModelDescription, device: Device, kernels: str) -> None:
    """Refuse memory for experts where there are none, or none on a GPU."""
    if not any(layer.feed_forward is not None and layer.feed_forward.num_experts for layer in description.layers):
        raise UserError(
            f"--expert-memory is given, but model type '{description.model_type}' has no experts",
            "leave --expert-memory out",
        )
    if not uses_gpu_kernels(device, kernels):
        where = "the model runs on the CPU" if device.type == "cpu" else f"the kernels are {kernels}"
        raise UserError(
            f"--expert-memory is given, but {where}", "leave --expert-memory out: all experts are in host memory"
        )


def load_model(
    checkpoint: Checkpoint,
    device: Device,
    num_positions: int,
    kernels: str = "",
    quantization: str = "",
    reader: WeightReader | None = None,
    expert_memory: int = 0,
    dtype: str = "",
) -> LoadedModel:
    """`num_positions`: how many positions the rotary tables cover (the engine's context length). `quantization`: how
    float matrices are quantized while they are loaded onto a GPU. `reader`: replaces the WeightReader of the
    checkpoint. `expert_memory`: bytes of the GPU for experts, which then lie in host memory; 0: all on the GPU.
    `dtype`: "float16" for activations in that type where GPU kernels compute; in bfloat16 otherwise."""
    if expert_memory:
        check_expert_memory(checkpoint.description, device, kernels)
    reader = reader or _reader(checkpoint, device)
    decoder: Decoder = architecture_of(checkpoint.description)(reader, reader.description, num_positions)
    reader.finish()
    if uses_gpu_kernels(device, kernels):
        import torch

        from tokenmill.model.device_weights import Placement, place_weights

        computed = torch.float16 if dtype == "float16" else torch.bfloat16
        placement = Placement(device, kernels, quantization, expert_memory, computed)
        table = place_weights(decoder, reader, placement)
        return LoadedModel(decoder, reader.weights, checkpoint, device, kernels, table)
    if device.type != "cpu":
        from tokenmill.model.device_weights import place_reference

        place_reference(decoder, reader, device)
        return LoadedModel(decoder, reader.weights, checkpoint, device, kernels)

    def prepare(prefix: str) -> None:
        weight = reader.weights[prefix]
        weight.kernel = _on_host(weight) if on_host(device) else select_linear(weight, device, kernels)
        if weight.kernel.backend != "ref":  # the kernel has its own packed copy: one is enough
            for name in reader.tensor_names[prefix]:
                checkpoint.release(name)

    for projections in head_projections(decoder):
        import torch

        projections.place(lambda weight: weight, torch.float32)
    multiplied = [
        prefix
        for prefix, weight in reader.weights.items()
        if weight.kernel is None and (weight is not decoder.embedding or weight is decoder.head)
    ]
    with ThreadPoolExecutor(_PACKING_THREADS) as pool:
        list(pool.map(prepare, multiplied))
    return LoadedModel(decoder, reader.weights, checkpoint, device, kernels)


def _reader(checkpoint: Checkpoint, device: Device) -> WeightReader:
    if on_host(device):
        return HostReader(checkpoint)
    if isinstance(checkpoint, DummyCheckpoint):
        from tokenmill.model.dummy_reader import DummyReader

        return DummyReader(checkpoint, device)
    return WeightReader(checkpoint)


def _on_host(weight: LinearWeight) -> Choice:
    try:
        return Choice("linear", "cpu", cpu.make_linear(weight))
    except Declined as reason:
        raise NeedsTorch(str(reason)) from None
