"""Cold start of a process: seconds from its start to the first text, and its memory then, against llama.cpp.

    python benchmarks/first_token.py [MODEL] [--repeats 5] [--threads 2] [--before OTHER_TREE] [--peer PYTHON]

Contenders take turns: `tokenmill run`; with `--before`, that of another source tree; llama.cpp by its own server inside
a Python process (package xllamacpp; `--peer`: the Python that has it), without its warm-up run. Each answers the same
prompt in a new process, greedily, with the file in the page cache. Memory is what is resident when the first text
comes, and its peak until then; beside it stand the bytes of the weights as stored. The parts are those of one more
process that watches itself.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenmill.checkpoint.sources import resolve

_ROOT = Path(__file__).parents[1]
_PROMPT = "Why is the sky blue?"
_OURS = """
import sys
from tokenmill.cli.main import main
main(["run", sys.argv[1], sys.argv[3], "--max-tokens", "64", "--threads", sys.argv[2]])
"""
_PEER = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = sys.argv[1], 0, 1, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[2])
server = xllamacpp.Server(params)
def show(part):
    choices = part.get("choices") or [{}]
    print(choices[0].get("delta", {}).get("content") or "", end="", flush=True)
body = {"messages": [{"role": "user", "content": sys.argv[3]}], "max_tokens": 64, "temperature": 0, "stream": True}
server.handle_chat_completions(body, show)
"""
_PARTS = """
import sys, time
clock = time.perf_counter
begin = clock()
import tokenmill.cli.run, tokenmill.engine.async_engine
imported = clock()
from tokenmill import LLM, SamplingParams
llm = LLM(sys.argv[1], concurrency=1, threads=int(sys.argv[2]))
loaded = clock()
text = llm.render_chat([{"role": "user", "content": sys.argv[3]}])
rendered = clock()
llm.generate(text, SamplingParams(temperature=0, max_tokens=1))
done = clock()
print(f"imports {imported - begin:.3f} s, file, tokenizer and weights {loaded - imported:.3f} s, "
      f"template {rendered - loaded:.3f} s, first token {done - rendered:.3f} s; "
      f"torch imported: {'torch' in sys.modules}")
"""


@dataclass(slots=True)
class Contender:
    name: str
    python: str
    program: str
    tree: Path = _ROOT
    seconds: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)

    def start_once(self, path: Path, threads: int) -> None:
        environment = {**os.environ, "PYTHONPATH": str(self.tree)}
        command = [self.python, "-c", self.program, str(path), str(threads), _PROMPT]
        began = time.perf_counter()
        with subprocess.Popen(
            command,
            env=environment,
            cwd=self.tree,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.read(1), f"{self.name} gave no token"
            self.seconds.append(time.perf_counter() - began)
            status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            sizes = {line.split(":")[0]: int(line.split()[1]) for line in status if line.startswith(("VmRSS", "VmHWM"))}
            self.resident.append(sizes["VmRSS"])
            self.peak.append(sizes["VmHWM"])
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--before", type=Path, help="another source tree, with its C++ module built")
    parser.add_argument("--peer", default=sys.executable, help="the Python that has xllamacpp")
    options = parser.parse_args()
    path = resolve(options.model).path
    contenders = [Contender("tokenmill run", sys.executable, _OURS)]
    if options.before is not None:
        contenders.append(Contender("before", sys.executable, _OURS, options.before.resolve()))
    if subprocess.run([options.peer, "-c", "import xllamacpp"], capture_output=True, check=False).returncode == 0:
        contenders.append(Contender("llama.cpp", options.peer, _PEER))
    for _ in range(options.repeats):
        for contender in contenders:
            contender.start_once(path, options.threads)
    _print(contenders, path, options.repeats)
    command = [sys.executable, "-c", _PARTS, str(path), str(options.threads), _PROMPT]
    print(subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip())


def _print(contenders: Sequence[Contender], path: Path, repeats: int) -> None:
    stored = path.stat().st_size if path.is_file() else sum(each.stat().st_size for each in path.iterdir())
    print(f"{path.name}, {stored / 1e6:.0f} MB as stored; medians of {repeats}")
    ours = statistics.median(contenders[0].seconds)
    for each in contenders:
        seconds, resident, peak = (statistics.median(values) for values in (each.seconds, each.resident, each.peak))
        print(
            f"{each.name:14} first text after {seconds:6.3f} s ({seconds / ours:5.2f} times), "
            f"resident {resident / 1e3 * 1.024:6.1f} MB, peak {peak / 1e3 * 1.024:6.1f} MB"
        )


if __name__ == "__main__":
    main()
