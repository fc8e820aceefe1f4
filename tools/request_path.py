"""Counts the files and lines a reader meets between an HTTP chat request and its tokens, on the CPU and on a GPU.

A file counts if at least one of its functions runs
* in the HTTP process or the engine process of `tokenmill serve` while one streamed chat request is served (the second
  one, so that whatever happens only once has happened), or
* below the model's forward pass at start-up: executors record or capture that pass once and replay it.
Start-up otherwise, imports and C++ do not count. All lines of a file count, its comments too.

CPU: the server with its default executor on a small GGUF file. GPU: what the HTTP process runs and what the engine
process runs above `runtime`, as on the CPU; then `runtime`, `model`, `kernels` and `grammar` from an engine with the
GPU executor, its kernels run by Triton's interpreter, so that no GPU is needed. Kernels which the interpreter cannot
run (those written in Gluon for one generation of GPUs) are therefore not counted.

    python tools/request_path.py [--tree CHECKOUT] [--list] [--json]

`--tree` counts another checkout (it needs the C++ module built), for a comparison of two commits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
MODEL = "smollm2"
_READY = re.compile(r"ready in .* on (http://\S+)")
_BELOW_THE_ENGINE = ("runtime", "model", "kernels", "grammar")
_SECONDS = 300

# The GPU executor on CPU tensors: one request before, one while recording. A tiny model: the interpreter is slow.
_GPU_PROGRAM = """
import json, pathlib, sys
from tokenmill import LLM, SamplingParams
sys.path.append(sys.argv[2])
from request_trace import Recorder
folder, recorder = pathlib.Path(sys.argv[1]), Recorder()
(folder / "config.json").write_text(json.dumps({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 131, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False}))
options = {"load_format": "dummy", "context": 64, "page_size": 16, "device": "cpu", "kernels": "triton"}
params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
with LLM(folder, executor="cuda_graph", kv_cache_dtype="bfloat16", **options) as llm:
    llm.generate([[1, 2, 3, 4]], params)
    recorder.recording = True
    recorder.install()
    llm.generate([[5, 6, 7, 8]], params)
    sys.setprofile(None)
print(json.dumps(recorder.modules()))
"""


@dataclass(frozen=True)
class PathSize:
    """What one path takes."""

    files: int
    lines: int
    functions: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=TOOLS.parent, help="the checkout to count")
    parser.add_argument("--list", action="store_true", help="print the files of both paths")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    tree = arguments.tree.resolve()
    http, engine = trace_server(tree)
    on_gpu = trace_gpu(tree)
    upper = {name: count for name, count in engine.items() if not _is_below_the_engine(name)}
    lower = {name: count for name, count in on_gpu.items() if _is_below_the_engine(name)}
    paths = {"cpu": {**engine, **http}, "gpu": {**upper, **lower, **http}}
    counts = {name: count(tree, modules) for name, modules in paths.items()}
    if arguments.json:
        print(json.dumps({name: asdict(found) for name, found in counts.items()}))
        return
    for name, found in counts.items():
        print(f"{name}: {found.files} files, {found.lines:,} lines, {found.functions} functions that run")
    if arguments.list:
        for module in sorted({*paths["cpu"], *paths["gpu"]}):
            marks = " ".join(name if module in modules else "   " for name, modules in paths.items())
            print(f"{marks}  {_lines(tree, module):5}  {module}")


def count(tree: Path, modules: dict[str, int]) -> PathSize:
    return PathSize(len(modules), sum(_lines(tree, name) for name in modules), sum(modules.values()))


def trace_server(tree: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Modules of the HTTP process and of the engine process."""
    with _traced(tree) as (folder, environment):
        command = [sys.executable, "-m", "tokenmill", "serve", MODEL, "--port", "0", "--context", "512"]
        server = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, cwd=tree, env=environment, start_new_session=True
        )
        try:
            assert server.stderr is not None
            url = next(found[1] for found in map(_READY.search, server.stderr) if found)
            _chat(url, "Say hello.")
            time.sleep(3.0)  # idle moments after the first answer: what is prepared once
            (folder / "record").touch()
            time.sleep(0.5)  # every process looks for the file many times a second
            _chat(url, "Why is the sky blue?")
            time.sleep(0.5)  # what follows an answer: the access log, pages given back
            (folder / "record").unlink()
            found = _answers(folder)
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait()
    http = found.pop(server.pid)
    engine: dict[str, int] = {}
    for modules in found.values():
        engine.update(modules)
    return http, engine


def trace_gpu(tree: Path) -> dict[str, int]:
    """Modules of an engine that uses the GPU executor, in one process."""
    own = {"TRITON_INTERPRET": "1", "TOKENMILL_TUNING": "off", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(tree)}
    with tempfile.TemporaryDirectory(prefix="request-path-") as folder:
        command = [sys.executable, "-c", _GPU_PROGRAM, folder, str(TOOLS)]
        answer = subprocess.run(
            command, cwd=tree, env=os.environ | own, check=True, stdout=subprocess.PIPE, text=True, timeout=_SECONDS
        )
    found: dict[str, int] = json.loads(answer.stdout)
    return found


@contextlib.contextmanager
def _traced(tree: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder for the answers, and an environment in which Python starts with the recorder and imports `tree`."""
    with tempfile.TemporaryDirectory(prefix="request-path-") as name:
        folder, site = Path(name) / "answers", Path(name) / "site"
        folder.mkdir()
        site.mkdir()
        lines = [
            "import sys, pathlib",
            f"sys.path.append({str(TOOLS)!r})",
            "import request_trace",
            f"request_trace.install(pathlib.Path({str(folder)!r}))",
        ]
        (site / "sitecustomize.py").write_text("\n".join(lines))
        yield folder, os.environ | {"PYTHONPATH": os.pathsep.join((str(site), str(tree)))}


def _answers(folder: Path) -> dict[int, dict[str, int]]:
    """What each process that still lives recorded."""
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        alive = [int(path.stem) for path in folder.glob("*.alive") if Path(f"/proc/{path.stem}").exists()]
        files = {pid: folder / f"{pid}.json" for pid in alive}
        if all(file.exists() for file in files.values()):
            return {pid: json.loads(file.read_text()) for pid, file in files.items()}
        time.sleep(0.1)
    raise TimeoutError("a process did not write what it recorded")


def _chat(url: str, text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 16, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
        assert b"[DONE]" in answer.read()


def _is_below_the_engine(module: str) -> bool:
    return module.split(".")[1:2] != [] and module.split(".")[1] in _BELOW_THE_ENGINE


def _lines(tree: Path, module: str) -> int:
    path = tree.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return len(file.read_text(encoding="utf-8").splitlines())


if __name__ == "__main__":
    main()
