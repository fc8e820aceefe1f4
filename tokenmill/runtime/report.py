"""What a checkpoint contains and which kernels compute it on this machine: the facts behind `tokenmill inspect`.

Builds the architecture on the mapped file and prepares one weight of each type and shape, to learn which kernel takes
it; nothing else is read or repacked, so that a large model takes little time and memory. Benchmarks use it to name
their kernels.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.tokenizer_files import tokenizer_of
from tokenmill.config import EngineConfig, ResolvedConfig, Setting
from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.hardware.memory import kv_bytes_per_token
from tokenmill.kernels import cpu
from tokenmill.kernels.base import Choice, Declined, select, select_linear
from tokenmill.model.architectures import architecture_of
from tokenmill.model.architectures.decoder import Decoder
from tokenmill.model.device_weights import Placement, Uploader, expert_placement, slots_for
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.formats.stacks import ExpertStacks, WeightStack
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.kvstore.choice import StoreChoice, native_layer_count, reading_path
from tokenmill.model.layers.experts import expert_layers
from tokenmill.model.linear_groups import head_projections
from tokenmill.model.loader import LoadedModel, check_expert_memory, uses_gpu_kernels
from tokenmill.model.reader import WeightReader
from tokenmill.resolution import resolve, settle
from tokenmill.runtime.build import find_facts, kv_arrangement
from tokenmill.runtime.executors import EXECUTORS
from tokenmill.runtime.executors.eager import FORWARD_OPS, OPS, RECURRENT_OPS


@dataclass(frozen=True, slots=True)
class Implementation:
    """The kernel or executor that computes something, and those that declined, with their reasons."""

    what: str
    runs_on: str
    declined: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoredType:
    """All tensors of one type in the file."""

    type: str
    tensors: int
    parameters: int
    bytes: int


@dataclass(frozen=True, slots=True)
class KVReport:
    dtype: str
    read_as: str  # what attention does with the pages
    native_layers: int  # that stay 16-bit floats although the dtype is quantized
    page_size: int  # tokens
    bytes_per_token: float  # what one more token of a long sequence costs: sliding layers no longer grow
    context: int  # that the engine would use
    bytes_full_context: int  # one request of that length, sliding and recurrent layers included
    full_layers: int
    sliding_layers: int
    sliding_window: int
    recurrent_layers: int
    state_bytes: int  # of one request's recurrent states, whatever its length
    latent_layers: int = 0  # of which pages hold one row for all heads


@dataclass(frozen=True, slots=True)
class ExpertReport:
    layers: int
    num_experts: int  # of each layer
    experts_per_token: int
    bytes: int  # of all of them, as stored
    gpu_slots: int  # experts of each layer that the GPU holds at a time, with --expert-memory; 0: all or no GPU
    gpu_bytes: int  # of these


@dataclass(frozen=True, slots=True)
class TokenizerReport:
    kind: str
    vocab_size: int
    bos_id: int | None
    adds_bos: bool
    eos_ids: tuple[int, ...]
    special_tokens: int
    chat_template: bool


@dataclass(frozen=True, slots=True)
class ModelReport:
    description: ModelDescription
    parameters: int
    bytes: int
    weights: tuple[StoredType, ...]
    kv: KVReport
    experts: ExpertReport | None  # of models that have some
    tokenizer: TokenizerReport
    executor: Implementation
    kernels: tuple[Implementation, ...]
    settings: tuple[Setting, ...]  # every engine option and where its value comes from


def inspect_model(path: Path, options: EngineConfig) -> ModelReport:
    checkpoint = open_checkpoint(path)
    facts, device = find_facts(options, checkpoint.description.context_length, tensors=True, checkpoint=checkpoint)
    config = resolve(options, facts)
    model = survey(checkpoint, config, device)
    layout, choice = kv_arrangement(config, model.decoder.kv_layers(), model.device)
    store = choice.build(layout, 1, model.device, config.kernels, 1)
    executor = _executor(model, store, config.executor)
    stored = stored_types(checkpoint)
    return ModelReport(
        description=checkpoint.description,
        parameters=sum(each.parameters for each in stored),
        bytes=sum(each.bytes for each in stored),
        weights=stored,
        kv=_kv_report(checkpoint.description, config, layout, choice, store),
        experts=_expert_report(model, config),
        tokenizer=_tokenizer_report(path, checkpoint),
        executor=executor,
        kernels=implementations(model, executor.runs_on, store),
        settings=tuple(
            settle(
                config,
                kv_native_layers=(choice.edge_layers, f"recommended for {choice.name}"),
                executor=(executor.runs_on, "the fastest that supports the model"),
            ).settings()
        ),
    )


def survey(checkpoint: Checkpoint, config: ResolvedConfig, device: torch.device) -> LoadedModel:
    """The model with its kernels chosen but not filled: weights of one type and shape share one choice, and on a GPU
    only one of them is sent there."""
    description = checkpoint.description
    if config.expert_memory:
        check_expert_memory(description, device, config.kernels)
    reader = WeightReader(checkpoint)
    decoder = architecture_of(description)(reader, description, 1)
    reader.finish()
    chosen: dict[tuple[str, int, int, bool], Choice] = {}
    dtype = torch.float16 if config.dtype == "float16" else torch.bfloat16
    for projections in head_projections(decoder):
        projections.attach()
    stacked = _survey_experts(decoder, config, device) if uses_gpu_kernels(device, config.kernels) else set()
    for weight in reader.weights.values():
        if id(weight) in stacked:
            continue
        key = (weight.type_name, weight.out_features, weight.in_features, weight.bias is not None)
        if weight.kernel is not None or (weight is decoder.embedding and decoder.head is not weight):
            continue  # projections by head; or only looked up, never multiplied
        if key not in chosen:
            chosen[key] = select_linear(Uploader(device).weight(weight), device, config.kernels, dtype)
        weight.kernel = chosen[key]
    table = torch.empty(0, 0, device=device, dtype=dtype) if uses_gpu_kernels(device, config.kernels) else None
    return LoadedModel(decoder, reader.weights, checkpoint, device, config.kernels, table)


def _survey_experts(decoder: Decoder, config: ResolvedConfig, device: torch.device) -> set[int]:
    """Choose the grouped kernels of experts by one expert of each type and shape; identities of the matrices that have
    one."""
    layers = expert_layers(decoder.blocks)
    place = expert_placement(layers, Placement(device, config.kernels, config.quantization, config.expert_memory))
    chosen: dict[tuple[str, str, int, int], Choice] = {}
    stacked: set[int] = set()
    for stacks, routing in ((mlp.stacks, mlp.routing) for mlp in layers):
        key = (stacks.gate_up.type_name, stacks.down.type_name, stacks.down.in_features, stacks.down.out_features)
        try:
            if key not in chosen:
                gate_up, down = (WeightStack(stack.experts[:1]) for stack in (stacks.gate_up, stacks.down))
                chosen[key] = place(ExpertStacks(gate_up, down), routing)
        except Declined:
            continue
        stacks.kernel = chosen[key]
        stacked |= {id(block) for block in stacks.blocks()}
    return stacked


def implementations(model: LoadedModel, executor: str, store: KVStore | None = None) -> tuple[Implementation, ...]:
    """One line for each way a weight type is multiplied, and for each op. `store`: whose pages attention reads."""
    linears = {
        Implementation(f"linear {weight.type_name}", _linear_name(weight), _reasons(weight.kernel.declined)): None
        for weight in model.weights.values()
        if weight.kernel is not None
    }
    stacks = [layer.stacks for layer in expert_layers(model.decoder.blocks)]
    for each in stacks:
        if each.kernel is not None:
            linears[Implementation(f"experts {each.gate_up.type_name}", each.kernel.backend, ())] = None
    ops = []
    for op in (*OPS, *(RECURRENT_OPS if store is not None and store.layout.states else ())):
        fallback = _attention_fallback(store) if executor.startswith("cuda") and op == "attention" else None
        if fallback is not None:
            ops.append(Implementation(op, "ref", (f"triton: {fallback}",)))
        elif executor != "eager" and op in FORWARD_OPS:  # the forward pass is one program of one backend
            ops.append(Implementation(op, f"{executor} program", ()))
        else:
            choice = select(op, model.device, model.kernels)
            ops.append(Implementation(op, choice.backend, _reasons(choice.declined)))
    return (*linears, *ops)


def _attention_fallback(store: KVStore | None) -> str | None:
    """Why attention over these pages is computed by the torch spec on a GPU; None if it is not."""
    slots = () if store is None else range(store.layout.layers_per_page)
    return next((reason for slot in slots if store and (reason := store.gpu_declines(slot)) is not None), None)


def kernel_names(model: LoadedModel, executor: str) -> dict[str, str]:
    """Op or weight type -> implementation; several for one type are joined."""
    names: dict[str, str] = {}
    for each in implementations(model, executor):
        names[each.what] = f"{names[each.what]}, {each.runs_on}" if each.what in names else each.runs_on
    return names


def num_threads(config: ResolvedConfig) -> int:
    """Threads of the CPU kernels."""
    if cpu.unavailable(torch.device("cpu")) is not None:
        return torch.get_num_threads()
    size: int = cpu.module().Pool.shared(config.threads).size
    return size


def stored_types(checkpoint: Checkpoint) -> tuple[StoredType, ...]:
    """The file by tensor type, largest first."""
    totals: dict[str, tuple[int, int, int]] = {}
    for name in checkpoint.names():
        tensor = checkpoint.tensor(name)
        tensors, parameters, nbytes = totals.get(tensor.type_name, (0, 0, 0))
        totals[tensor.type_name] = (tensors + 1, parameters + prod(tensor.shape), nbytes + tensor.nbytes)
    types = [StoredType(type_name, *total) for type_name, total in totals.items()]
    return tuple(sorted(types, key=lambda stored: -stored.bytes))


def _executor(model: LoadedModel, store: KVStore, wanted: str) -> Implementation:
    """The executor that the engine would choose. It is not built: some allocate large buffers."""
    declined: list[tuple[str, str]] = []
    for name in EXECUTORS if wanted == "auto" else (wanted,):
        reason = EXECUTORS.get(name).declines(model, store)
        if reason is None:
            return Implementation("step", name, _reasons(declined))
        declined.append((name, reason))
    raise UserError(f"executor '{wanted}' cannot run here: {declined[-1][1]}", "use --executor auto")


def _linear_name(weight: LinearWeight) -> str:
    assert weight.kernel is not None
    detail = getattr(weight.kernel.run, "detail", "")
    return f"{weight.kernel.backend} ({detail})" if detail else weight.kernel.backend


def _reasons(declined: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(f"{name}: {reason}" for name, reason in declined)


def _kv_report(
    description: ModelDescription, config: ResolvedConfig, layout: KVLayout, choice: StoreChoice, store: KVStore
) -> KVReport:
    context = config.context
    page_bytes = choice.page_bytes(layout)
    latent_layers = description.layer_kinds.count("latent")
    return KVReport(
        dtype=choice.name,
        read_as=reading_path(store),
        native_layers=native_layer_count(layout, choice.edge_layers),
        page_size=layout.page_size,
        bytes_per_token=kv_bytes_per_token(layout, page_bytes),
        context=context,
        bytes_full_context=layout.peak_pages(context) * page_bytes + layout.state_bytes,
        full_layers=sum(len(group.layers) for group in layout.groups if group.kind == "full"),
        sliding_layers=description.num_sliding_layers,
        sliding_window=description.sliding_window if description.num_sliding_layers else 0,
        recurrent_layers=len(layout.states),
        state_bytes=layout.state_bytes,
        latent_layers=latent_layers,
    )


def _expert_report(model: LoadedModel, config: ResolvedConfig) -> ExpertReport | None:
    layers = expert_layers(model.decoder.blocks)
    if not layers:
        return None
    num_experts, nbytes = len(layers[0].stacks.down), sum(b.nbytes for mlp in layers for b in mlp.stacks.blocks())
    slots, gpu_bytes = 0, 0
    if config.expert_memory:
        plan = slots_for(layers, config.expert_memory, config.quantization)
        slots = plan.num_slots if plan.num_slots < num_experts else 0
        gpu_bytes = slots * plan.slot_bytes
    return ExpertReport(len(layers), num_experts, layers[0].routing.experts_per_token, nbytes, slots, gpu_bytes)


def _tokenizer_report(path: Path, checkpoint: Checkpoint) -> TokenizerReport:
    tokenizer, template = tokenizer_of(path, "auto")
    begins = tokenizer.encode("")[:1] if tokenizer.reads_text else []
    return TokenizerReport(
        kind=_tokenizer_kind(path, checkpoint) if tokenizer.reads_text else "none: prompts are token ids",
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        adds_bos=bool(begins) and begins[0] == tokenizer.bos_id,
        eos_ids=tuple(dict.fromkeys((*checkpoint.description.eos_ids, *tokenizer.eos_ids))),
        special_tokens=len(tokenizer.special_ids),
        chat_template=template is not None,
    )


def _tokenizer_kind(path: Path, checkpoint: Checkpoint) -> str:
    metadata = getattr(checkpoint, "metadata", None)
    if metadata is not None:
        names = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
        return " ".join(str(name) for name in names if name) or "unknown"
    content = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    return str(content.get("model", {}).get("type") or "unknown")
