"""llama.cpp built for this machine with the flags its own instructions give, from the source in llama-cpp-python.

    PATH=$(python benchmarks/peers/build_llamacpp.py [--folder DIR] [--version 0.3.36] [--jobs 2]):$PATH

Prints the folder that has llama-server, llama-bench and llama-cli. Done once (about a quarter of an hour on two cores);
the packages on the index are built for the oldest processor they support, which costs them several times their speed.
Needs cmake and a compiler. On x86 with AMX: CC=clang CXX=clang++ (and libomp), since what g++ 12 makes of llama.cpp's
tile configuration ends with an illegal instruction. `libggml-cpu` and `libllama` beside the programs are what
LLAMA_CPP_LIB_PATH wants.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
from pathlib import Path

_TARGETS = ("llama-server", "llama-bench", "llama-cli")
_OFF = ("LLAMA_CURL", "LLAMA_OPENSSL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_WEBUI")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/tokenmill/peers/llamacpp")
    parser.add_argument("--version", default="0.3.36", help="of llama-cpp-python")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at once")
    options = parser.parse_args()
    print(build(options.folder / options.version, options.version, options.jobs))


def build(folder: Path, version: str, jobs: int) -> Path:
    binaries = folder / "build/bin"
    if all((binaries / each).exists() for each in _TARGETS):
        return binaries
    source = _source(folder, version)
    _run("cmake", "-S", source, "-B", folder / "build", "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON",
         *(f"-D{name}=OFF" for name in _OFF))  # fmt: skip
    for target in _TARGETS:
        _run("cmake", "--build", folder / "build", "--target", target, "--parallel", jobs)
    return binaries


def _source(folder: Path, version: str) -> Path:
    found = folder / f"llama_cpp_python-{version}" / "vendor/llama.cpp"
    if not found.exists():
        folder.mkdir(parents=True, exist_ok=True)
        package = f"llama-cpp-python=={version}"
        _run(sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python",
             "--dest", folder, package)  # fmt: skip
        with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
    return found


def _run(*command: object) -> None:
    subprocess.run([str(each) for each in command], check=True, stdout=sys.stderr)


if __name__ == "__main__":
    main()
