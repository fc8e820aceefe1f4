"""What this installation can do: versions, machine, kernels, cached models, and whether tokens really move.

A verdict of "ready" has seen an answer from the smallest cached model. Called by `tokenmill doctor`.
"""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tokenmill import __version__
from tokenmill.checkpoint.embedding_files import read_encoder
from tokenmill.checkpoint.sources import cache_root, list_cached
from tokenmill.checkpoint.sources.base import Resolved
from tokenmill.errors import UserError
from tokenmill.hardware.machine import Machine, detect_machine, usable_cores
from tokenmill.kernels import cpu, gpu_generation
from tokenmill.kernels.host import HOST, has_torch

_SELF_TEST_BYTES = 500 * 10**6  # a larger model takes too long to load for a check
_MIN_FREE_DISK = 5 * 10**9
_MIN_FREE_MEMORY = 10**9
_HUB = "https://huggingface.co"


@dataclass(frozen=True, slots=True)
class KernelReport:
    available: bool
    reason: str  # why not
    instruction_set: str
    threads: int


@dataclass(frozen=True, slots=True)
class CachedModel:
    name: str
    bytes: int
    path: str


@dataclass(frozen=True, slots=True)
class SelfTest:
    model: str  # empty: none was small enough
    tokens: int
    error: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    verdict: str
    problems: tuple[str, ...]
    tokenmill: str
    python: str
    torch: str  # its version; empty: not installed
    machine: Machine
    kernels: KernelReport
    cache: str
    free_disk_bytes: int
    models: tuple[CachedModel, ...]
    self_test: SelfTest
    network: tuple[tuple[str, str], ...]  # (address, "ok" or the problem); empty: not asked


def diagnose(network: bool = False) -> Diagnosis:
    machine = detect_machine()
    kernels = _kernel_report()
    cached = list_cached()
    free = _free_disk(cache_root())
    test = _self_test(cached)
    network_status = _check_network() if network else ()
    problems = _problems(machine, kernels, free, test, network_status)
    return Diagnosis(
        verdict=_verdict(kernels, test),
        problems=problems,
        tokenmill=__version__,
        python=platform.python_version(),
        torch=_torch_version(),
        machine=machine,
        kernels=kernels,
        cache=str(cache_root()),
        free_disk_bytes=free,
        models=tuple(CachedModel(name, found.bytes, str(found.path)) for name, found in cached.items()),
        self_test=test,
        network=network_status,
    )


def _torch_version() -> str:
    """Without importing it: that takes longer than everything else here."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def _torch_has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _kernel_report() -> KernelReport:
    reason = cpu.unavailable(HOST)
    if reason is not None:
        return KernelReport(False, reason, "", usable_cores())
    return KernelReport(True, "", cpu.instruction_set(), cpu.num_threads())


def _self_test(cached: dict[str, Resolved]) -> SelfTest:
    from tokenmill.engine.llm import LLM
    from tokenmill.types import SamplingParams

    small = {
        name: found
        for name, found in cached.items()
        if found.bytes <= _SELF_TEST_BYTES and read_encoder(found.path) is None
    }
    if not small:
        return SelfTest("", 0, "")
    name = min(small, key=lambda each: small[each].bytes)
    try:
        with LLM(small[name].path, context=64, concurrency=1) as llm:
            output = llm.generate("Once", SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))[0]
    except Exception as error:  # whatever it is, it is what the user came to learn
        return SelfTest(name, 0, f"{type(error).__name__}: {error}")
    return SelfTest(name, len(output.outputs[0].token_ids), "")


def _check_network() -> tuple[tuple[str, str], ...]:
    import httpx

    from tokenmill.checkpoint.sources.pip_index import read_pip_settings

    results = []
    for address in (*read_pip_settings().indexes, _HUB):
        shown = str(httpx.URL(address).copy_with(userinfo=b""))
        try:
            status = httpx.head(address, timeout=5, follow_redirects=True).status_code
            results.append((shown, "ok" if status < 500 else f"HTTP {status}"))
        except (httpx.HTTPError, OSError) as error:
            results.append((shown, f"{type(error).__name__}: {error}"))
    return tuple(results)


def _problems(
    machine: Machine, kernels: KernelReport, free_disk: int, test: SelfTest, network_status: tuple[tuple[str, str], ...]
) -> tuple[str, ...]:
    found = []
    if not kernels.available:
        found.append(f"every op runs on the slow reference path: {kernels.reason}")
    if test.error:
        found.append(f"{test.model} did not answer: {test.error}")
    if not test.model:
        found.append("no small model is cached, so nothing was run: tokenmill pull smollm2")
    if machine.gpus and not has_torch():
        found.append("a GPU is present and is not used: torch is not installed, install tokenmill[gpu]")
    elif machine.gpus and not _torch_has_cuda():
        found.append("a GPU is present and is not used: this torch has no CUDA, install tokenmill[gpu]")
    elif machine.gpus and (declined := gpu_generation.unavailable()) is not None:
        found.append(f"a GPU is present and is not used: {declined}")
    if gpu_generation.generic_is_forced():
        found.append(f"generic GPU kernels are forced, slower ones on Hopper: unset {gpu_generation.VARIABLE}")
    if free_disk < _MIN_FREE_DISK:
        found.append(f"{free_disk / 1e9:.1f} GB are free in the cache folder: set TOKENMILL_CACHE to a larger disk")
    if machine.available_bytes < _MIN_FREE_MEMORY:
        found.append(f"{machine.available_bytes / 1e9:.1f} GB of memory are free: close other programs")
    found += [f"{address} cannot be reached: {problem}" for address, problem in network_status if problem != "ok"]
    return tuple(found)


def _verdict(kernels: KernelReport, test: SelfTest) -> str:
    if test.error:
        return f"broken: {test.model} did not answer"
    speed = f"C++ kernels ({kernels.instruction_set})" if kernels.available else "slow reference kernels"
    if not test.model:
        return f"untested, {speed}"
    return f"ready: {test.model} answered with {test.tokens} tokens, {speed}"


def _free_disk(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise UserError(f"cannot read the cache folder {folder}: {error.strerror}", "set TOKENMILL_CACHE") from None
