"""Assembles the runtime: model, KV store, executor and runner, sized by the shared memory model.

Finds the facts that automatic options are resolved from. Called by the engine's construction; knows nothing of
scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.config import EngineConfig, ResolvedConfig
from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import KVLayout, LayerKV, build_layout
from tokenmill.hardware.machine import available_memory, has_gpu_driver, usable_cores
from tokenmill.hardware.memory import DEFAULT_SHARE, GIB, KVBudget, RuntimeCosts, activation_bytes, free_within, plan_kv
from tokenmill.kernels import cpu
from tokenmill.kernels.base import candidate_backends
from tokenmill.kernels.gpu_generation import generic_is_forced
from tokenmill.kernels.host import HOST, Device, NeedsTorch, has_torch, on_host, torch_device
from tokenmill.log import get_logger
from tokenmill.model.kvstore import KV_STORES
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.kvstore.checkpoint_scales import load_kv_scales
from tokenmill.model.kvstore.choice import StoreChoice, choose_store, page_multiple
from tokenmill.model.loader import LoadedModel, declines_float16, load_model, uses_gpu_kernels
from tokenmill.resolution import DEVICE_DEFAULTS, Facts
from tokenmill.runtime.executors import EXECUTORS, choose_executor
from tokenmill.runtime.executors.base import Executor
from tokenmill.runtime.ranks.layout import stage_layout
from tokenmill.runtime.runner import ModelRunner
from tokenmill.runtime.speculation.base import Target
from tokenmill.runtime.speculation.speculator import build_speculator

if TYPE_CHECKING:
    from tokenmill.runtime.ranks.seat import Crew, Seat

_log = get_logger(__name__)
DEFAULT_ADAPTERS, DEFAULT_RANK = 8, 16  # where nobody said more: slots, and the highest rank
_HOST_DRAFTERS = ("off", "", "auto", "ngram", "suffix")  # those that look up what was said
_HOST_PAGES = ("float32", "float16")
_GPU_SHARE = 0.95  # of the GPU memory that weights, activations and the runtime leave free


@dataclass(slots=True, eq=False)
class Runtime:
    runner: ModelRunner
    model: LoadedModel
    store: KVStore
    layout: KVLayout
    budget: KVBudget
    executor: Executor[Any]
    declined_executors: tuple[tuple[str, str], ...]
    native_layers: int = 0  # at each end, whose KV pages are 16-bit floats though the others are quantized
    crew: Crew | None = None  # the other ranks

    def check(self) -> None:
        """Raise RankError if another rank has ended."""
        if self.crew is not None:
            self.crew.check()

    def close(self) -> None:
        if self.crew is not None:
            self.crew.stop()


def find_device(config: EngineConfig) -> tuple[Device, str]:
    """The device and the reason for it; the CPU is HOST, which needs no torch. Raises UserError if --device cuda cannot
    be used."""
    if config.device == "cpu":
        return HOST, ""
    if config.device != "cuda" and not (has_torch() and has_gpu_driver()):
        return HOST, "no GPU driver is here" if has_torch() else "torch is not installed"
    torch_device("GPUs are used through it")
    import torch

    from tokenmill.kernels import triton as gpu

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cuda")
    reason = gpu.unavailable(device) if has_gpu else "torch finds no NVIDIA GPU"
    if reason is None:
        forced = "; generic kernels are forced by TOKENMILL_GPU_KERNELS" if generic_is_forced() else ""
        return device, f"found {torch.cuda.get_device_name(device)}{forced}"
    if config.device == "cuda":
        raise UserError(f"device cuda cannot be used: {reason}", "use --device cpu")
    if has_gpu:
        _log.warning("the GPU is not used: %s", reason)
    return HOST, reason


def find_facts(
    config: EngineConfig, trained_context: int, tensors: bool = False, checkpoint: Checkpoint | None = None
) -> tuple[Facts, Device]:
    """What automatic options are resolved from. `tensors`: the device must be one of torch. `checkpoint`: of a model
    that generates."""
    device, reason = find_device(config)
    if tensors and on_host(device):
        device = torch_device("tensors are asked for")
    dtype = config.kv_cache_dtype or DEVICE_DEFAULTS[device.type].kv_cache_dtype
    if on_host(device) and dtype in KV_STORES and dtype not in _HOST_PAGES:
        torch_device(_coded_pages(dtype))
    threads, threads_reason = usable_cores(), "usable cores"
    if cpu.unavailable(device) is None:
        cpu.use_threads(config.threads or 0)
        threads, threads_reason = cpu.num_threads(), "one per physical core"
    facts = Facts(device.type, reason, trained_context, threads, threads_reason, page_multiple(dtype))
    facts = replace(facts, gpu_kernels=uses_gpu_kernels(device, config.kernels or ""))
    if checkpoint is not None:
        facts = replace(facts, half_pages=_suits_halves(checkpoint, config, device))
    if checkpoint is not None and facts.gpu_kernels:
        declined = declines_float16(checkpoint.description)
        facts = replace(facts, stored_dtype=checkpoint.float_type(), no_float16=declined)
    return facts, device


def _suits_halves(checkpoint: Checkpoint, config: EngineConfig, device: Device) -> bool:
    """Whether KV pages of float16 are faster than of float32, and lose no more than the weights have."""
    if cpu.unavailable(device) is not None or candidate_backends(config.kernels or "")[0] != "cpu":
        return False
    heads = [layer.head_dim for layer in checkpoint.description.kv_layers() if layer.head_dim]
    rounded = checkpoint.is_quantized() or checkpoint.stores_halves()
    return rounded and all(cpu.multiplies_halves(head_dim) for head_dim in heads)


def build_runtime(checkpoint: Checkpoint, config: ResolvedConfig, device: Device, seat: Seat | None = None) -> Runtime:
    """`seat`: of one rank among several; every one of them calls this. On HOST nothing imports torch, unless the model
    or an option needs it."""
    if config.kv_calibration and not Path(config.kv_calibration).is_file():
        raise UserError(f"cannot read '{config.kv_calibration}'", "give a text file with --kv-calibration")
    try:
        if on_host(device):
            reason = "ranks compute with it" if seat is not None else needs_torch(config)
            try:
                if not reason:
                    return _build(checkpoint, config, device, seat)
            except NeedsTorch as error:
                reason = str(error)
            _log.info("torch is imported: %s", reason)
            device = torch_device(reason)
        return _build(checkpoint, config, device, seat)
    except BaseException:
        if seat is not None and seat.crew is not None:
            seat.crew.stop()
        raise


def needs_torch(config: ResolvedConfig) -> str:
    """Which of these options has no form without torch, on a CPU; empty if all have."""
    drafter = config.speculate.partition(":")[0]
    reasons = (
        (candidate_backends(config.kernels)[0] != "cpu", "these kernels compute with it"),
        (cpu.unavailable(HOST) is not None, f"it computes instead of them: {cpu.unavailable(HOST)}"),
        (config.executor not in ("auto", "recorded"), f"the executor {config.executor} computes with it"),
        (bool(EXECUTORS.added), "executors of plugins may compute with it"),
        (config.load_format == "dummy", "dummy weights are made with it"),
        (bool(config.quantization), "--quantization computes with it"),
        (config.serves_adapters, "adapters are read with it"),
        (drafter not in _HOST_DRAFTERS, f"--speculate {drafter} computes with it"),
        (config.kv_cache_dtype not in _HOST_PAGES, _coded_pages(config.kv_cache_dtype)),
    )
    return next((reason for applies, reason in reasons if applies), "")


def _coded_pages(dtype: str) -> str:
    return f"KV pages of type {dtype} are coded with it"


def _build(checkpoint: Checkpoint, config: ResolvedConfig, device: Device, seat: Seat | None) -> Runtime:
    on_gpu, context = device.type == "cuda", config.context
    _use_threads(config, device, seat is not None)
    reader = None
    if seat is not None:
        from tokenmill.model.rank_reader import rank_reader

        reader = rank_reader(checkpoint, device, seat.place, seat.exact)
    model = load_model(
        checkpoint, device, context, config.kernels, config.quantization, reader, config.expert_memory, config.dtype
    )
    layout, choice = kv_arrangement(config, model.decoder.kv_layers(), device)
    if seat is not None:
        model.group = seat.group
        layout = stage_layout(checkpoint.description, seat.place, layout)
    ranks = (1 if seat is None else seat.place.grid.size) * config.data_parallel_size
    free = _free_on_gpu(checkpoint, config, model) if on_gpu else available_memory() // ranks
    if on_gpu and config.serves_adapters:
        from tokenmill.model.adapters import slot_bytes

        free = max(0, free - _num_adapters(config, model) * slot_bytes(model, _max_rank(config)))
    stated = free if config.gpu_memory_utilization is not None else config.memory and config.memory // ranks
    memory = 0 if stated is None else max(1, stated)
    share = _GPU_SHARE if on_gpu else DEFAULT_SHARE
    budget = plan_kv(
        layout, choice.page_bytes(layout), context, config.concurrency, memory, free, share, config.prefix_caching,
        queues_steps=model.table is not None, fixed_bytes=choice.fixed_bytes(layout, config.concurrency),
    )  # fmt: skip
    if seat is not None:  # one page table for all ranks: as many pages as the one with the fewest has
        adapters = _num_adapters(config, model) if config.serves_adapters else 0
        pages, slots, adapters = seat.agree([budget.num_pages, budget.num_state_slots, adapters])
        budget = replace(budget, num_pages=pages, num_state_slots=slots)
    store = choice.build(layout, budget.num_pages, device, config.kernels, config.concurrency)
    store.hold_states(budget.num_state_slots, budget.num_spare_states)
    _settle_codes(store, model, config, checkpoint, seat)
    if seat is not None:
        from tokenmill.runtime.ranks.choice import rank_executor
        from tokenmill.runtime.ranks.runner import RankedRunner

        _log_memory(budget, store, config)
        rank = rank_executor(model, store, config, seat)
        if adapters:
            rank.hold_adapters(adapters, _max_rank(config))
        speculator = None if seat.crew is None else build_speculator(Target(model, store, rank, config))
        ranked = RankedRunner(rank, store, speculator)
        return Runtime(ranked, model, store, layout, budget, rank, (), choice.edge_layers, seat.crew)
    executor, declined = choose_executor(config.executor, model, store, config)
    if not config.kernels:  # forcing a backend is asking for its speed
        _warn_of_fallback(executor.name, declined, device)
    _log_memory(budget, store, config)
    if config.serves_adapters:
        executor.hold_adapters(_num_adapters(config, model), _max_rank(config))
    speculator = build_speculator(Target(model, store, executor, config))
    runner = ModelRunner(executor, store, speculator)
    return Runtime(runner, model, store, layout, budget, executor, declined, choice.edge_layers)


def _settle_codes(
    store: KVStore, model: LoadedModel, config: ResolvedConfig, checkpoint: Checkpoint, seat: Seat | None
) -> None:
    """What the store takes from the checkpoint or has to measure before anything is written."""
    load_kv_scales(store, checkpoint)
    on_gpu = model.device.type == "cuda"
    if store.conditions_keys and not (on_gpu and seat is not None):  # ranks would have to measure together
        from tokenmill.runtime.observation.key_conditioning import condition_keys

        condition_keys(store, model, config, config.context)
    if config.kv_calibration and not store.calibrates:
        raise UserError(
            f"--kv-calibration is given, but KV pages of type {store.name} are not calibrated",
            "leave it out, or use --kv-cache-dtype kvquant3",
        )
    if store.calibrates:
        from tokenmill.runtime.observation.head_samples import calibrate_store

        calibrate_store(store, model, config, checkpoint, config.context)


def _use_threads(config: ResolvedConfig, device: Device, divided: bool) -> None:
    if not on_host(device):
        import torch

        torch.set_num_threads(config.threads if divided or config.is_set("threads") else usable_cores())
    if cpu.unavailable(device) is None:
        cpu.use_threads(config.threads)


def _log_memory(budget: KVBudget, store: KVStore, config: ResolvedConfig) -> None:
    layout, context = store.layout, config.context
    _log.info(
        "KV cache: %d pages of %d tokens, predicted %.1f MiB, allocated %.1f MiB (%s); %.1f requests of %d tokens",
        budget.num_pages,
        layout.page_size,
        budget.nbytes / 2**20,
        (store.nbytes + store.states.nbytes) / 2**20,
        budget.reason,
        budget.full_requests,
        context,
    )
    if layout.states:
        _log.info(
            "recurrent states: %d slots of %.1f MiB, %d of them for snapshots, and %d spare ones for queued steps",
            budget.num_state_slots,
            layout.state_bytes / 2**20,
            budget.num_state_slots - config.concurrency,
            budget.num_spare_states,
        )


def _num_adapters(config: ResolvedConfig, model: LoadedModel) -> int:
    """Slots: as many as were stated, or as the stated memory holds of the highest rank."""
    if not config.lora_memory:
        return config.max_loras or DEFAULT_ADAPTERS
    from tokenmill.model.adapters import slot_bytes

    nbytes = slot_bytes(model, _max_rank(config))
    values = sum(weight.out_features * weight.in_features for weight in model.weights.values())
    if model.table is None and model.weight_bytes > 1.5 * values:
        nbytes *= 4  # beside a float base, factors on a CPU are float32
    if nbytes > config.lora_memory:
        raise UserError(
            f"an adapter of rank {_max_rank(config)} may take {nbytes / 2**20:.1f} MiB, --lora-memory is "
            f"{config.lora_memory / 2**20:.1f} MiB",
            "raise it, or lower --max-lora-rank",
        )
    return config.lora_memory // nbytes


def _max_rank(config: ResolvedConfig) -> int:
    return config.max_lora_rank or DEFAULT_RANK


def _warn_of_fallback(executor: str, declined: tuple[tuple[str, str], ...], device: Device) -> None:
    """A slower executor than this device could have is never silent."""
    for name, reason in declined:
        if name.startswith("cuda") == (device.type == "cuda"):
            _log.warning("steps run on the slower executor %s, because %s declined: %s", executor, name, reason)


def kv_arrangement(config: ResolvedConfig, layers: list[LayerKV], device: Device) -> tuple[KVLayout, StoreChoice]:
    """How KV memory is divided and held."""
    choice = choose_store(config.kv_cache_dtype, config.kv_native_layers, layers, device, config.dtype)
    return build_layout(layers, config.page_size), choice


def _largest_dequantized(model: LoadedModel) -> int:
    """Bytes of the largest group-quantized matrix in 16 bits, to which products with many tokens dequantize it."""
    kernels = [weight.kernel.run for weight in model.weights.values() if weight.kernel is not None]
    matrices: list[Any] = [getattr(kernel, "whole", kernel) for kernel in kernels]
    kinds = ("int4", "grouped4", "grouped8", "w4a8", "w4a8g32", "w4a8row")
    grouped = [matrix for matrix in matrices if getattr(matrix, "kind", "") in kinds]
    return max((2 * matrix.rows * matrix.depth for matrix in grouped), default=0)


def _free_on_gpu(checkpoint: Checkpoint, config: ResolvedConfig, model: LoadedModel) -> int:
    """Bytes for the KV cache: what is free now minus what the memory model predicts for the steps."""
    import torch

    from tokenmill.runtime.executors.cuda.prompts import MAX_PROMPT_TOKENS

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    d = checkpoint.description
    steps = activation_bytes(
        config.batch_tokens, d.hidden_size, d.intermediate_size, d.vocab_size, max_sequences=config.concurrency
    )
    # Captured steps with prompts share a memory pool, but blocks of a smaller one may not fit a larger one.
    captured = min(config.batch_tokens, MAX_PROMPT_TOKENS)
    steps += 2 * activation_bytes(captured, d.hidden_size, d.intermediate_size, d.vocab_size, max_sequences=0)
    steps += 2 * _largest_dequantized(model)  # in a captured step and in an eager one
    runtime = RuntimeCosts().total(1)
    _log.info(
        "GPU memory: %.2f GiB in all, weights %.2f GiB (%.2f GiB allocated), steps %.2f, runtime %.2f, %.2f GiB free",
        total / GIB,
        model.weight_bytes / GIB,
        torch.cuda.memory_allocated(model.device) / GIB,
        steps / GIB,
        runtime / GIB,
        free / GIB,
    )
    if config.gpu_memory_utilization is not None:
        free = free_within(config.gpu_memory_utilization, total, free, torch.cuda.memory_reserved(model.device))
    return max(0, int(free - steps - runtime))
