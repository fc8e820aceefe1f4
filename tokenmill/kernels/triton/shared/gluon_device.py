"""Device functions that Gluon kernels of several rooms call: device.py's, where Gluon needs its own.

Importing this needs a Triton with Gluon for Hopper (3.6 or later); `on_hopper` says whether there is one.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed in Triton 3.7


@gluon.jit
def launch_dependents():
    """Let the next kernel of the stream start."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)


@gluon.jit
def wait_for_predecessor():
    """Wait until everything earlier kernels of the stream wrote is visible."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)


@gluon.jit
def find_sequence(query_starts, block, num_seqs, TOKENS: gl.constexpr):
    """As device.py's."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        first_block = gl.load(query_starts + middle) // TOKENS + middle
        if first_block <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@gluon.jit
def silu_gate(gate, up, DTYPE: gl.constexpr):
    """As matmul/tile.py's: silu(gate) * up of the values a product without a gate would have written as DTYPE."""
    gate, up = gate.to(DTYPE).to(gl.float32), up.to(DTYPE).to(gl.float32)
    return gate * (1.0 / (1.0 + gl.exp2(gate * -1.4426950408889634))) * up
