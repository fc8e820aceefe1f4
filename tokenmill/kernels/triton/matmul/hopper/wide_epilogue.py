"""The epilogue of wide.py's tiles: the result is written, or sums are exchanged with programs of the same tile.

Knows where the rows of a tile lie in the matrix (`row_at`), how a consumer's sums are scaled, gated and written, and
how programs that had different blocks of a tile add theirs up. Knows nothing of codes, tokens and products.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenmill.kernels.triton.shared.gluon_device import barrier, silu_gate

ROWS = gl.constexpr(64)  # of the matrix in an accumulator, the tensor cores' own size; a tile has two, one per consumer
TOKENS = gl.constexpr(256)  # of a tile


class Result(NamedTuple):
    """Where finished tiles and parts of tiles go."""

    row_scale: Any  # float32 [N]
    bias: Any  # float32 [N] or None
    out: Any  # [M, N], gated [M, N / 2]
    partial: Any  # float32 [programs * token tiles * 2 * 2, ROWS * TOKENS]
    counters: Any  # int32 [tiles * token tiles * 2], zero between launches
    out_stride: Any


class Work(NamedTuple):
    """What a program has: blocks [begin, end) of the row-major sequence of all tiles' blocks, `steps` per tile."""

    token: Any  # first token of the tile
    begin: Any
    end: Any
    steps: Any
    share: Any  # blocks of every program but the last
    M: Any  # tokens
    N: Any  # rows of the matrix


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for; at most `partners` programs share a tile."""

    group: int
    gated: bool
    partners: int
    affine: bool
    pdl: bool

    def __post_init__(self) -> None:
        for field in fields(self):  # kernels take only these for constants
            object.__setattr__(self, field.name, gl.constexpr(getattr(self, field.name)))

    @property
    def box(self):
        """Rows of the matrix in one TMA copy of codes."""
        return gl.constexpr(8) if self.gated else ROWS

    @property
    def written(self):
        """Rows of the result of a consumer."""
        return ROWS // 2 if self.gated else ROWS


@gluon.jit
def row_at(place, tile, part, N, FORM: gl.constexpr):
    """The row of the matrix at a place (0 .. ROWS) of an accumulator. Gating and gated rows alternate by
    eight, which puts a pair into one thread."""
    if FORM.gated:
        row = (tile * 2 + part) * (ROWS // 2) + (place // 16) * 8 + place % 8 + (place // 8) % 2 * (N // 2)
    else:
        row = (tile * 2 + part) * ROWS + place
    return row


@gluon.jit
def gate_neighbours(sums, DTYPE: gl.constexpr):
    """sums [rows, tokens], whose gating and gated rows alternate by eight -> [rows // 2, tokens]."""
    COUNT: gl.constexpr = sums.shape[0]
    gate, up = gl.split(sums.reshape([COUNT // 16, 2, 8, sums.shape[1]]).permute((0, 2, 3, 1)))
    return silu_gate(gate, up, DTYPE).reshape([COUNT // 2, sums.shape[1]])


@gluon.constexpr_function
def written_layout(rows):
    """[TOKENS, rows] so that a thread has eight neighbouring rows, all from its own warp's part of an accumulator."""
    register = [[0, 1], [0, 2], [0, 4], [1, 0]]
    if rows == ROWS.value:
        lanes, warps = [[0, 8], [2, 0], [4, 0], [8, 0], [16, 0]], [[0, 16], [0, 32]]
        register.append([32, 0])
    else:
        lanes, warps = [[2, 0], [4, 0], [8, 0], [16, 0], [32, 0]], [[0, 8], [0, 16]]
    register += [[64, 0], [128, 0]]
    return gl.DistributedLinearLayout(register, lanes, warps, [], [TOKENS.value, rows])


@gluon.jit
def write_rows(values, out, row, token, M, N, out_stride, LAYOUT: gl.constexpr):
    """values [rows, TOKENS] -> out [token ..., row ...]."""
    transposed = gl.convert_layout(gl.permute(values.to(out.dtype.element_ty), (1, 0)), LAYOUT)
    tokens = token + gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT))
    rows = row + gl.arange(0, values.shape[0], gl.SliceLayout(0, LAYOUT))
    place = out + tokens[:, None].to(gl.int64) * out_stride + rows[None, :]
    gl.store(place, transposed, mask=(tokens < M)[:, None] & (rows < N)[None, :])


@gluon.jit
def place_of_sums(program, tile, steps, share, part):
    """Where a program keeps its sums of a tile it shares: at most its first and its last tile are such."""
    later = ((program * share) // steps != tile).to(gl.int32)
    slot = (program * gl.num_programs(0) + gl.program_id(0)) * 2 + later
    return (slot * 2 + part).to(gl.int64) * (ROWS * TOKENS)


@gluon.jit
def finish_tile(acc, result, work, tile, first, part, FORM: gl.constexpr):
    """acc float32 [ROWS, TOKENS] of a consumer -> the result where the program had all blocks of the tile, else its
    sums for `add_partners`."""
    out, out_stride = result.out, result.out_stride
    token, steps, share, M, N = work.token, work.steps, work.share, work.M, work.N
    ACC: gl.constexpr = acc.type.layout
    places = gl.arange(0, ROWS, gl.SliceLayout(1, ACC))
    rows = gl.minimum(row_at(places, tile, part, N, FORM), N - 1)
    acc *= gl.load(result.row_scale + rows)[:, None]
    if result.bias is not None:  # of the programs that share a tile, one adds it
        acc += (gl.load(result.bias + rows) * (first == 0).to(gl.float32))[:, None]
    if (tile * steps) // share == ((tile + 1) * steps - 1) // share:
        row = (tile * 2 + part) * FORM.written
        LAYOUT: gl.constexpr = written_layout(FORM.written)
        if FORM.gated:
            gated = gate_neighbours(acc, out.dtype.element_ty)
            write_rows(gated, out, row, token, M, N // 2, out_stride, LAYOUT)
        else:
            write_rows(acc, out, row, token, M, N, out_stride, LAYOUT)
    else:
        columns = gl.arange(0, TOKENS, gl.SliceLayout(0, ACC))
        start = place_of_sums(gl.program_id(1), tile, steps, share, part)
        gl.store(result.partial + start + places[:, None] * TOKENS + columns[None, :], acc)
        barrier()
        number = (tile * gl.num_programs(0) + gl.program_id(0)) * 2 + part
        gl.atomic_add(result.counters + number, 1, sem="acq_rel", scope="gpu")


@gluon.jit
def sum_partners(partial, inside, tile, earliest, latest, steps, share, part, FORM: gl.constexpr):
    """In the order of the depth, whoever arrived first: the same bits every time."""
    LAYOUT: gl.constexpr = inside.type.layout
    total = gl.zeros([inside.shape[0], inside.shape[1]], gl.float32, LAYOUT)
    for other in gl.static_range(FORM.partners):
        start = place_of_sums(gl.minimum(earliest + other, latest), tile, steps, share, part)
        there = (inside >= 0) & (earliest + other <= latest)
        total += gl.load(partial + start + inside, mask=there, other=0.0, cache_modifier=".cg")
    return total


@gluon.jit
def add_partners(result, work, tile, part, FORM: gl.constexpr):
    """Programs that share a tile wait for each other, and each adds up a share of the rows. All programs run at once
    (the launcher sees to it) and wait only when they have nothing else left to do, so waiting ends."""
    out, counter, out_stride = result.out, result.counters, result.out_stride
    token, steps, share, M, N = work.token, work.steps, work.share, work.M, work.N
    CHUNK: gl.constexpr = ROWS // FORM.partners
    LONG: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [gl.num_warps(), 1], [1, 0])
    earliest, latest = (tile * steps) // share, ((tile + 1) * steps - 1) // share
    number = (tile * gl.num_programs(0) + gl.program_id(0)) * 2 + part
    partners = latest - earliest + 1
    arrived = gl.atomic_add(counter + number, 0, sem="acquire", scope="gpu")
    while arrived < partners:
        arrived = gl.atomic_add(counter + number, 0, sem="acquire", scope="gpu")
    barrier()
    rows = gl.arange(0, CHUNK, gl.SliceLayout(1, LONG))
    columns = gl.arange(0, TOKENS, gl.SliceLayout(0, LONG))
    for chunk in range(gl.program_id(1) - earliest, FORM.partners, partners):
        inside = (chunk * CHUNK + rows)[:, None] * TOKENS + columns[None, :]
        total = sum_partners(result.partial, inside, tile, earliest, latest, steps, share, part, FORM)
        row = (tile * 2 + part) * FORM.written
        if FORM.gated:
            gated = gate_neighbours(total, out.dtype.element_ty)
            write_rows(gated, out, row + chunk * (CHUNK // 2), token, M, N // 2, out_stride, WIDE)
        else:
            write_rows(total, out, row + chunk * CHUNK, token, M, N, out_stride, WIDE)
    # The last to have seen all arrive resets the counter.
    if gl.atomic_add(counter + number, 1, sem="relaxed", scope="gpu") == 2 * partners - 1:
        gl.store(counter + number, 0)
