"""What a model is, in one record, whatever file it came from.

Filled from GGUF metadata or from a Hugging Face `config.json`; read by the architectures, the memory model and the
planner. Says nothing about how weights are stored. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.hardware.kv_layout import LayerKV


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched. `kind`: "default", "linear", "llama3" or "yarn"."""

    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: multiplies cos and sin; None: derived from `factor`
    mscale: float = 0.0  # yarn, as DeepSeek uses it
    mscale_all_dim: float = 0.0
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclass(frozen=True, slots=True)
class ModelDescription:
    architecture: str  # a name in model/architectures
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    norm_eps: float
    activation: str = "silu"  # "silu" | "gelu_tanh"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    rope_interleaved: bool = False  # pairs are (2i, 2i+1) instead of (i, i + dim/2): GGUF's order for llama
    local_rope_theta: float | None = None  # gemma3: frequency base of the sliding layers (never scaled)
    layer_kinds: tuple[str, ...] = ()  # "full" | "sliding" for each layer
    sliding_window: int = 0
    qkv_bias: bool = False  # qwen2
    output_bias: bool = False  # llama with attention_bias: bias on o_proj too
    mlp_bias: bool = False
    tie_embeddings: bool = False
    norm_offset: float = 0.0  # gemma from safetensors stores weight - 1
    query_scale: float | None = None  # multiplies q.k; None: head_dim ** -0.5
    embedding_scale: float = 1.0
    attention_softcap: float = 0.0  # 0: off
    logit_softcap: float = 0.0
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    name: str = ""

    @property
    def num_sliding_layers(self) -> int:
        return sum(kind == "sliding" for kind in self.layer_kinds)

    def kv_layers(self) -> list[LayerKV]:
        """What each layer keeps per token: the input of the KV layout."""
        return [
            LayerKV(kind, self.num_kv_heads, self.head_dim, self.sliding_window if kind == "sliding" else 0)
            for kind in self.layer_kinds
        ]
