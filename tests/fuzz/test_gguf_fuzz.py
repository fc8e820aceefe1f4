"""Thousands of damaged GGUF files: each opens or is refused with one line; no crash, no hang, no huge allocation."""

from __future__ import annotations

import random
import resource
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.checkpoint.gguf_builder import write_model
from tokenmill.checkpoint.gguf import GGUFCheckpoint
from tokenmill.errors import CheckpointError
from tokenmill.kernels.ggml_types import TYPES
from tokenmill.kernels.ref_ggml import dequantize

NUM_MUTATIONS = 900  # of each kind
LIMIT_ABOVE_PRESENT = 256 * 2**20
NASTY = [0, 1, 7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**48, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 8]


@pytest.fixture
def memory_limit() -> Iterator[None]:
    """A damaged length that leads to an allocation becomes a MemoryError, which no test expects."""
    usage = Path("/proc/self/statm")
    if not usage.exists():
        pytest.skip("needs /proc to know the memory in use")
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(usage.read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + LIMIT_ABOVE_PRESENT, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def model_bytes(folder: Path, architecture: str) -> tuple[bytes, int]:
    """A small model, and where its header ends."""
    path = folder / "good.gguf"
    write_model(path, architecture)
    data = path.read_bytes()
    tensor_bytes = sum(GGUFCheckpoint(path).tensor(name).nbytes for name in GGUFCheckpoint(path).names())
    return data, len(data) - tensor_bytes


def mutate(kind: str, data: bytes, header: int, generator: random.Random) -> bytes:
    if kind == "truncate":
        return data[: generator.randrange(len(data))]
    damaged = bytearray(data)
    if kind == "flip":
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(header)] ^= 1 << generator.randrange(8)
    elif kind == "length":
        at = generator.randrange(header - 8)
        width = generator.choice(["<I", "<Q"])
        struct.pack_into(width, damaged, at, generator.choice(NASTY) % 2 ** (8 * struct.calcsize(width)))
    else:  # "splice": a run of header bytes from elsewhere
        source, target = generator.randrange(header), generator.randrange(header)
        damaged[target : target + 16] = data[source : source + 16]
    return bytes(damaged)


def open_and_touch(path: Path) -> str:
    try:
        checkpoint = GGUFCheckpoint(path)
        for name in checkpoint.names():
            stored = checkpoint.tensor(name)
            if TYPES[stored.type_name].is_block or stored.type_name == "F32":
                dequantize(stored.type_name, stored.data.reshape(-1, stored.data.shape[-1])[:1])
        for key in checkpoint.metadata:
            checkpoint.metadata[key]
    except CheckpointError as error:
        refusal = error
    else:
        return "opened"
    assert refusal.remedy
    assert "\n" not in str(refusal)
    assert len(str(refusal)) < 500
    return "refused"


@pytest.mark.usefixtures("memory_limit")
@pytest.mark.parametrize("kind", ["truncate", "flip", "length", "splice"])
def test_damaged_files(tmp_path: Path, kind: str) -> None:
    generator = random.Random(kind)
    outcomes: Counter[str] = Counter()
    path = tmp_path / "damaged.gguf"
    sources = [model_bytes(tmp_path, architecture) for architecture in ("llama", "gemma3")]
    for number in range(NUM_MUTATIONS):
        data, header = sources[number % 2]
        path.write_bytes(mutate(kind, data, header, generator))
        outcomes[open_and_touch(path)] += 1
    assert outcomes["refused"] > NUM_MUTATIONS // 10


def test_random_bytes_after_the_magic(tmp_path: Path) -> None:
    generator = random.Random(5)
    path = tmp_path / "noise.gguf"
    for _ in range(300):
        head = b"GGUF" + struct.pack("<I", 3) + struct.pack("<QQ", generator.choice(NASTY), generator.choice(NASTY))
        path.write_bytes(head + generator.randbytes(generator.randrange(400)))
        assert open_and_touch(path) == "refused"
