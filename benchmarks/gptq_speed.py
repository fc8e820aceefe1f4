"""GPTQ of one layer against its unavoidable arithmetic: the Cholesky factorization and the matrix products alone.

    python benchmarks/gptq_speed.py [--out 2048] [--in 5632] [--tokens 65536]

Both sides start from the same inputs and run in turn, three times; medians are printed. "Products alone" is what torch
needs for X^T X (whole), the Cholesky of H, its inverse, the Cholesky of that (as published), and one product
of the weight with the triangular factor: W @ U.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.calibrate import StatisticsCollector
from tokenmill.quantize.methods.gptq import column_order, factor_hessian, gptq

_CHUNK = 4096  # tokens at a time, as in a job


def _seconds(run: Callable[[], object]) -> tuple[float, float]:
    """(wall time, CPU time of all threads); the second is meaningful on a busy machine too."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - begin, time.process_time() - begin_cpu


def _floor(weight: Tensor, inputs: Tensor) -> None:
    hessian = torch.zeros(inputs.shape[1], inputs.shape[1])
    for chunk in inputs.split(_CHUNK):
        hessian.addmm_(chunk.T, chunk)
    hessian.diagonal().add_(0.01 * hessian.diagonal().mean())
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    weight @ factor


def _ours(weight: Tensor, inputs: Tensor, scheme: Scheme) -> None:
    collector = StatisticsCollector(inputs.shape[1], inputs.shape[0], ("hessian",))
    for chunk in inputs.split(_CHUNK):
        collector.add(chunk)
    hessian = collector.finish().hessian
    assert hessian is not None
    _solve(weight, hessian, scheme)


def _solve(weight: Tensor, hessian: Tensor, scheme: Scheme) -> None:
    order = column_order(hessian.diagonal(), scheme.group_size, "gar")
    factor, _ = factor_hessian(hessian, 0.01, order)
    gptq(weight, factor, scheme, order)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=int, default=2048)
    parser.add_argument("--in", type=int, default=5632, dest="in_features")
    parser.add_argument("--tokens", type=int, default=128 * 512)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    weight = torch.randn(options.out, options.in_features)
    inputs = torch.randn(options.tokens, options.in_features)
    scheme = Scheme("int", 4, 128)
    ours, floor = [], []
    for _ in range(options.repeats):
        floor.append(_seconds(lambda: _floor(weight, inputs)))
        ours.append(_seconds(lambda: _ours(weight, inputs, scheme)))
    print(f"layer {options.out} x {options.in_features}, {options.tokens} tokens, {torch.get_num_threads()} threads")
    for kind, index in (("wall", 0), ("CPU", 1)):
        a, b = (statistics.median(each[index] for each in side) for side in (ours, floor))
        print(f"{kind}: gptq {a:.2f} s, Cholesky and matrix products alone {b:.2f} s, ratio {a / b:.2f}")


if __name__ == "__main__":
    main()
