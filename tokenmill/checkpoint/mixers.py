"""What mixes tokens in a layer, one record for each way: attention (full, sliding, chunked), latent, recurrent.

Each record holds its shape, says what it keeps of a sequence (the input of the KV layout) and names what goes beyond
the plain attention that every architecture has. Part of the model description (description.py). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tokenmill.hardware.kv_layout import LayerKV

SCALED_PROJECTIONS = "multipliers of projections"


@dataclass(frozen=True, slots=True)
class Attention:
    """Queries over the keys and values of earlier tokens."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int
    window: int = 0  # a token sees itself and the window - 1 tokens before it; 0: all of them
    chunk: int = 0  # Llama 4: a token sees the tokens of its own chunk of this length; 0: no chunks
    rope: str = "full"  # a name in ModelDescription.rope_tables; empty: no rotary embedding in this layer
    scale: float | None = None  # multiplies q.k; None: head_dim ** -0.5
    softcap: float = 0.0  # of scores; 0: off
    qkv_bias: bool = False
    output_bias: bool = False
    # "head" (one weight for all heads) | "heads" (one each) | "projection" (over all) | "unit" (no weight) | "" (none)
    head_norms: str = ""
    sinks: bool = False  # one learned logit per head joins the softmax and carries no value
    # Llama 4, in layers without rotary embedding: queries are multiplied by 1 + a ln(1 + floor((position + 1) / b))
    temperature: tuple[float, float] | None = None  # (a, b)
    output_gate: bool = False  # the query projection also makes a gate for the output
    output_scale: float = 1.0
    causal: bool = True
    kv_source: int | None = None  # Gemma 3n: an earlier layer whose keys and values are read instead of own ones

    @property
    def kind(self) -> str:
        return "sliding" if self.window else "chunked" if self.chunk else "full"

    def kv_need(self) -> LayerKV:
        """A chunk is kept like a window of its length: pages of earlier chunks are dropped a little late."""
        if self.kv_source is not None:
            return LayerKV("none", source=self.kv_source)
        kind = "sliding" if self.window or self.chunk else "full"
        values = self.value_dim if self.value_dim != self.head_dim else None
        return LayerKV(kind, self.num_kv_heads, self.head_dim, self.window or self.chunk, values)

    def features(self) -> Iterator[str]:
        if self.chunk:
            yield "chunked attention"
        if not self.rope:
            yield "layers without rotary embedding"
        if self.value_dim != self.head_dim:
            yield "values of another width than keys"
        if self.head_norms not in ("", "head"):
            names = {"projection": "norms over whole projections", "unit": "norms of heads without weights"}
            yield names.get(self.head_norms, "norms of each head")
        if self.temperature is not None:
            yield "queries scaled by position"
        if self.sinks:
            yield "attention sinks"
        if self.output_gate:
            yield "gated attention output"
        if not self.causal:
            yield "bidirectional attention"
        if self.kv_source is not None:
            yield "layers that read the KV of another"
        if self.output_scale != 1.0:
            yield SCALED_PROJECTIONS


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """DeepSeek's: keys and values of all heads come from one latent vector, the only thing that is kept."""

    num_heads: int
    query_rank: int  # 0: queries are projected at once
    kv_rank: int
    nope_dim: int  # of a key, not rotated
    rope_dim: int  # of a key, rotated and shared by all heads
    value_dim: int
    rope: str = "full"
    interleaved: bool = True
    bias: bool = False  # of the projections down to the ranks and of the output

    kind = "latent"
    num_kv_heads = 1

    @property
    def head_dim(self) -> int:
        """Of what is kept: one row for all heads."""
        return self.kv_rank + self.rope_dim

    def kv_need(self) -> LayerKV:
        return LayerKV("latent", self.num_kv_heads, self.head_dim, value_dim=0)

    def features(self) -> Iterator[str]:
        yield "latent attention"


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A state of fixed size instead of keys and values. `style`: "mamba", "mamba2" or "delta" (gated delta rule).

    mamba: `inner` channels with `state_size` numbers each, time steps of rank `rank`. mamba2: `num_heads` heads over
    `inner` channels, B and C in `num_groups` groups. delta: `num_heads` value heads of `value_dim`, `num_key_heads` key
    heads of `key_dim`.

    mamba: `step_norms` says whether time steps, B and C are normed: "weighted", "plain" (without weights) or not ("").
    mamba2: `norm` says where the output is: "gated" (the norm of the gated output), "ungated" (the norm is gated) or
    nowhere ("").
    """

    style: str
    convolution: int  # width of the causal convolution before the recurrence
    inner: int = 0  # mamba, mamba2
    state_size: int = 0  # mamba, mamba2
    rank: int = 0  # mamba
    num_heads: int = 0  # mamba2, delta
    num_groups: int = 0  # mamba2
    num_key_heads: int = 0  # delta
    key_dim: int = 0
    value_dim: int = 0
    convolution_bias: bool = False
    input_bias: bool = False
    output_bias: bool = False
    step_norms: str = ""
    step_norm_eps: float = 1e-6
    time_step_limits: tuple[float, float] = (0.0, float("inf"))
    norm: str = "gated"
    joined_inputs: bool = True  # delta: q, k, v and z are one matrix, its rows by key head; else one matrix each
    # Falcon-H1: constants that multiply z, x, B, C and dt as they are projected, and the output
    multipliers: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)
    output_scale: float = 1.0

    kind = "recurrent"

    @property
    def head_dim(self) -> int:
        """Channels of a head of mamba2."""
        return self.inner // self.num_heads

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Of one sequence."""
        if self.style == "delta":
            return (self.num_heads, self.key_dim, self.value_dim)
        if self.style == "mamba2":
            return (self.num_heads, self.head_dim, self.state_size)
        return (self.inner, self.state_size)

    @property
    def convolved(self) -> int:
        """Channels that pass the convolution."""
        if self.style == "delta":
            return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim
        return self.inner + 2 * self.num_groups * self.state_size

    def kv_need(self) -> LayerKV:
        return LayerKV("recurrent", states=((self.convolution - 1, self.convolved), self.state_shape))

    def features(self) -> Iterator[str]:
        yield {"mamba": "Mamba layers", "mamba2": "Mamba 2 layers"}.get(self.style, "gated delta rule layers")
        if set(self.multipliers) != {1.0} or self.output_scale != 1.0:
            yield SCALED_PROJECTIONS


Mixer = Attention | LatentAttention | Recurrent
